// The instruction sets that kernels are compiled for, which of them this processor has, and which one is in use.
#pragma once

#include <string>
#include <vector>

namespace lowbit::cpu {

// In order of preference: the last one available is used.
enum class Isa : int { kScalar = 0, kAvx2 = 1, kAvx512 = 2, kNeon = 3 };
constexpr int kNumIsas = 4;

const char* isa_name(Isa isa);

// Whether this processor (and its operating system) runs code compiled for `isa`, and the build contains some.
bool isa_available(Isa isa);

// Names of the available ones, scalar first.
std::vector<std::string> isas();

// The one in use: what was forced, else the environment's LOWBIT_ISA, else the best available.
Isa current_isa();

// Uses the named one from now on in this library; an empty name lifts that. Throws std::invalid_argument, naming those
// available, for one that is not.
void force_isa(const std::string& name);

// Processor features that kernels ask for, as "avx512_bf16", those present only.
std::vector<std::string> cpu_features();
bool has_feature(const char* name);

}  // namespace lowbit::cpu
