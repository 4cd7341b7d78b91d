#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace lowbit::cpu {
namespace {

constexpr const char* kNames[kNumIsas] = {"scalar", "avx2", "avx512", "neon"};

struct Feature {
    const char* name;
    bool present;
};

#if defined(__x86_64__)
// What the operating system saves on a context switch: without that, instructions fault though CPUID has them.
uint64_t saved_state() {
    uint32_t a, b, c, d;
    __cpuid(1, a, b, c, d);
    if (!(c >> 27 & 1)) return 0;
    __asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return a | static_cast<uint64_t>(d) << 32;
}

std::vector<Feature> detect() {
    uint32_t a, b, c, d, b7 = 0, c7 = 0, d7 = 0, a71 = 0, d71 = 0;
    __cpuid(1, a, b, c, d);
    const uint32_t c1 = c;
    if (__get_cpuid_count(7, 0, &a, &b7, &c7, &d7) && a >= 1) __get_cpuid_count(7, 1, &a71, &b, &c, &d71);
    const uint64_t state = saved_state();
    const bool ymm = (state & 0x6) == 0x6, zmm = ymm && (state & 0xe0) == 0xe0, tile = (state & 0x60000) == 0x60000;
    auto bit = [](uint32_t word, int i) { return (word >> i & 1) != 0; };
    return {
        {"avx2", ymm && bit(b7, 5)},         {"fma", ymm && bit(c1, 12)},
        {"f16c", ymm && bit(c1, 29)},        {"bmi2", bit(b7, 8)},
        {"avx_vnni", ymm && bit(a71, 4)},    {"avx512f", zmm && bit(b7, 16)},
        {"avx512dq", zmm && bit(b7, 17)},    {"avx512bw", zmm && bit(b7, 30)},
        {"avx512vl", zmm && bit(b7, 31)},    {"avx512_vbmi", zmm && bit(c7, 1)},
        {"avx512_vbmi2", zmm && bit(c7, 6)}, {"avx512_vnni", zmm && bit(c7, 11)},
        {"avx512_bf16", zmm && bit(a71, 5)}, {"avx512_fp16", zmm && bit(d7, 23)},
        {"amx_tile", tile && bit(d7, 24)},   {"amx_int8", tile && bit(d7, 25)},
        {"amx_bf16", tile && bit(d7, 22)},
    };
}
#elif defined(__aarch64__)
std::vector<Feature> detect() { return {{"neon", true}}; }
#else
std::vector<Feature> detect() { return {}; }
#endif

const std::vector<Feature>& features() {
    static const std::vector<Feature> found = detect();
    return found;
}

bool has_all(std::initializer_list<const char*> names) {
    for (const char* name : names) {
        if (!has_feature(name)) return false;
    }
    return true;
}

// The flags of CMakeLists.txt, asked of the processor.
bool detect_isa(Isa isa) {
    switch (isa) {
        case Isa::kScalar:
            return true;
        case Isa::kAvx2:
            return has_all({"avx2", "fma", "f16c", "bmi2"});
        case Isa::kAvx512:
            return has_all(
                {"avx2", "fma", "f16c", "bmi2", "avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vbmi"});
        case Isa::kNeon:
            return has_feature("neon");
    }
    return false;
}

Isa parse(const std::string& name) {
    std::string known;
    for (const std::string& candidate : isas()) known += (known.empty() ? "" : ", ") + candidate;
    for (int i = 0; i < kNumIsas; ++i) {
        if (name == kNames[i] && isa_available(static_cast<Isa>(i))) return static_cast<Isa>(i);
    }
    throw std::invalid_argument("instruction set '" + name + "' is not available here; expected one of " + known);
}

int best() {
    for (int i = kNumIsas - 1; i > 0; --i) {
        if (isa_available(static_cast<Isa>(i))) return i;
    }
    return 0;
}

// Throws on a name in LOWBIT_ISA that is not available, at the first call of a kernel: nothing falls back unseen.
int initial() {
    const char* name = std::getenv("LOWBIT_ISA");
    return name && *name ? static_cast<int>(parse(name)) : best();
}

std::atomic<int> forced{-1};

}  // namespace

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

bool has_feature(const char* name) {
    for (const Feature& f : features()) {
        if (f.present && std::strcmp(f.name, name) == 0) return true;
    }
    return false;
}

bool isa_available(Isa isa) {
    static const bool available[kNumIsas] = {detect_isa(Isa::kScalar), detect_isa(Isa::kAvx2), detect_isa(Isa::kAvx512),
                                             detect_isa(Isa::kNeon)};
    return available[static_cast<int>(isa)];
}

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (int i = 0; i < kNumIsas; ++i) {
        if (isa_available(static_cast<Isa>(i))) names.emplace_back(kNames[i]);
    }
    return names;
}

Isa current_isa() {
    const int now = forced.load(std::memory_order_relaxed);
    if (now >= 0) return static_cast<Isa>(now);
    static const int chosen = initial();
    return static_cast<Isa>(chosen);
}

void force_isa(const std::string& name) { forced.store(name.empty() ? -1 : static_cast<int>(parse(name))); }

std::vector<std::string> cpu_features() {
    std::vector<std::string> names;
    for (const Feature& f : features()) {
        if (f.present) names.emplace_back(f.name);
    }
    return names;
}

}  // namespace lowbit::cpu
