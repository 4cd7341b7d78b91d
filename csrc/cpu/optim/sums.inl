// Sums of squares as integers: docs/numerics.md section 11. Part of row_kernels_body.inl and row_kernels_scalar.cpp:
// compilers make vectors of these loops.

// x^2 in steps of 1 / scale, which is a power of two; 0 where that is not below 2^kSquareBits. The sum with 2^52 is
// rounded to an integer, which its lowest bits then are.
LOWBIT_INLINE inline int64_t square_term(float x, double scale) {
    const double wide = x, exact = wide * wide * scale, sum = (exact < kSquareEnd ? exact : 0.0) + 0x1p52;
    int64_t bits;
    __builtin_memcpy(&bits, &sum, sizeof bits);
    return bits - (int64_t{1023 + 52} << 52);
}

int64_t square_sum(const float* x, int64_t n, double scale) {
    int64_t sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += square_term(x[i], scale);
    return sum;
}

void add_squares(const float* x, int64_t n, const double* scales, int64_t* sums) {
    for (int64_t i = 0; i < n; ++i) sums[i] += square_term(x[i], scales[i]);
}
