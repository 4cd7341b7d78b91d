// int16 pairs without a multiply-add instruction; included after mm_body.inl.

struct DotS16 {
    using Acc = VecI;
    static constexpr Kind kind = Kind::s16;
    static VecI dot(VecI acc, VecI a, VecI b) {
        return acc + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
    }
};
