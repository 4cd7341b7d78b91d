// What the processor can do at best, for benchmarks to hold kernels against.
#pragma once

#include <cstdint>

namespace lowbit::cpu {

// Does `operations` (or a few more) multiplications and additions in registers, on every thread, with the fastest
// arithmetic on fp32 (0), bf16 (1) or bytes (2) that the instruction set in use has; whether it has any on those.
bool spin(int arithmetic, int64_t operations);

// Reads memory, on every thread; something that depends on all of it.
int32_t read(const void* data, int64_t bytes);

}  // namespace lowbit::cpu
