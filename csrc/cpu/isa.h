// The instruction sets that kernels are compiled for, which of them this processor has, and which one is in use.
#pragma once

#include <string>
#include <vector>

// Every instruction set of this kind of processor: the name, then the features (isa.cpp) that its compiler flags
// (CMakeLists.txt) take for granted. In order of preference: the last one available is used. row_kernels_NAME.cpp and
// mm_NAME.cpp hold its kernels; tables of them are made from this list.
// clang-format off
#if defined(__x86_64__)
#define LOWBIT_ISAS(row) \
    row(scalar) \
    row(avx2, "avx2", "fma", "f16c", "bmi2") \
    row(avx512, "avx2", "fma", "f16c", "bmi2", "avx512f", "avx512dq", "avx512bw", "avx512vl")
#elif defined(__aarch64__)
#define LOWBIT_ISAS(row) row(scalar) row(neon, "neon")
#else
#define LOWBIT_ISAS(row) row(scalar)
#endif

namespace lowbit::cpu {

// Positions in LOWBIT_ISAS.
#define LOWBIT_ISA_ID(name, ...) name,
enum class Isa : int { LOWBIT_ISAS(LOWBIT_ISA_ID) kCount };
// clang-format on
#undef LOWBIT_ISA_ID

constexpr int kNumIsas = static_cast<int>(Isa::kCount);

const char* isa_name(Isa isa);

// Names of those that this processor (and its operating system) runs, scalar first.
std::vector<std::string> isas();

// The one in use: what was forced, else the environment's LOWBIT_ISA, else the best available.
Isa current_isa();

// Uses the named one from now on in this library; an empty name lifts that. Throws std::invalid_argument, naming those
// available, for one that is not.
void force_isa(const std::string& name);

// Processor features that kernels ask for, as "avx512_bf16", those present only. The environment's LOWBIT_WITHOUT takes
// some away, as "avx512_vnni,avx512_bf16"; std::invalid_argument for a name that is none.
std::vector<std::string> cpu_features();
// Throws std::invalid_argument for a name that isa.cpp does not list.
bool has_feature(const char* name);

}  // namespace lowbit::cpu
