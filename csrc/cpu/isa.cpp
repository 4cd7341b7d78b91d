#include "cpu/isa.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace lowbit::cpu {
namespace {

constexpr const char* kNames[] = {
#define LOWBIT_ISA_NAME(name, ...) #name,
    LOWBIT_ISAS(LOWBIT_ISA_NAME)
#undef LOWBIT_ISA_NAME
};

// -- features ---------------------------------------------------------------------------------------------------------
#if defined(__x86_64__)
// Where CPUID tells of a feature: leaf 1, leaf 7, and leaf 7 with subleaf 1.
enum Word { kC1, kB7, kC7, kD7, kA71, kNumWords };
// What the operating system must save on a context switch (XCR0): without that, instructions fault though CPUID has
// them.
enum State : uint64_t { kGeneral = 0, kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000 };

struct Feature {
    std::string_view name;
    Word word;
    int bit;
    State state;
};

constexpr Feature kFeatures[] = {
    {"avx2", kB7, 5, kYmm},         {"fma", kC1, 12, kYmm},         {"f16c", kC1, 29, kYmm},
    {"bmi2", kB7, 8, kGeneral},     {"avx512f", kB7, 16, kZmm},     {"avx512dq", kB7, 17, kZmm},
    {"avx512bw", kB7, 30, kZmm},    {"avx512vl", kB7, 31, kZmm},    {"avx512_vbmi", kC7, 1, kZmm},
    {"avx512_vnni", kC7, 11, kZmm}, {"avx512_bf16", kA71, 5, kZmm}, {"amx_tile", kD7, 24, kTiles},
    {"amx_int8", kD7, 25, kTiles},  {"amx_bf16", kD7, 22, kTiles},
};

struct Processor {
    uint32_t words[kNumWords] = {};
    uint64_t state = 0;

    Processor() {
        uint32_t a, b, c, d;
        __cpuid(1, a, b, words[kC1], d);
        if (__get_cpuid_count(7, 0, &a, &words[kB7], &words[kC7], &words[kD7]) && a >= 1) {
            __get_cpuid_count(7, 1, &words[kA71], &b, &c, &d);
        }
        if (!(words[kC1] >> 27 & 1)) return;
        __asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
        state = a | static_cast<uint64_t>(d) << 32;
    }
};

bool detected(const Feature& f) {
    static const Processor processor;
#if defined(LOWBIT_EMULATE)  // csrc/tests/emulated.h stands in for what comes after VNNI, in tests
    if (f.name == "avx512_vbmi" || f.name == "avx512_bf16" || f.state == kTiles) return true;
#endif
    return (processor.words[f.word] >> f.bit & 1) && (processor.state & f.state) == f.state;
}
#else
struct Feature {
    std::string_view name;
    unsigned long word = 0, bit = 0;   // Linux: of the auxiliary vector; 0: it is always there
    const char* apple_name = nullptr;  // macOS: of sysctl
};

#if defined(__aarch64__)
// By their numbers, which are Linux's ABI: headers of older systems lack some.
constexpr Feature kFeatures[] = {{"neon"},
                                 {"dotprod", 16, 1ul << 20, "hw.optional.arm.FEAT_DotProd"},
                                 {"i8mm", 26, 1ul << 13, "hw.optional.arm.FEAT_I8MM"},
                                 {"bf16", 26, 1ul << 14, "hw.optional.arm.FEAT_BF16"}};
#else
constexpr Feature kFeatures[] = {{"generic"}};
#endif

bool detected(const Feature& f) {
    if (f.word == 0) return true;
#if defined(__linux__)
    return (getauxval(f.word) & f.bit) != 0;
#elif defined(__APPLE__)
    int found = 0;
    size_t size = sizeof found;
    return sysctlbyname(f.apple_name, &found, &size, nullptr, 0) == 0 && found != 0;
#else
    return false;
#endif
}
#endif

constexpr const Feature* find_feature(std::string_view name) {
    for (const Feature& f : kFeatures) {
        if (f.name == name) return &f;
    }
    return nullptr;
}

// The features that the environment's LOWBIT_WITHOUT names, separated by commas: tests see an older processor so.
std::vector<std::string_view> unwanted() {
    const char* value = std::getenv("LOWBIT_WITHOUT");
    std::string_view rest = value ? value : "";
    std::vector<std::string_view> names;
    while (!rest.empty()) {
        const std::string_view name = rest.substr(0, rest.find(','));
        rest.remove_prefix(std::min(rest.size(), name.size() + 1));
        if (find_feature(name) == nullptr) {
            throw std::invalid_argument("LOWBIT_WITHOUT: unknown processor feature '" + std::string(name) + "'");
        }
        names.push_back(name);
    }
    return names;
}

bool present(const Feature& f) {
    static const std::vector<std::string_view> without = unwanted();
    return detected(f) && std::find(without.begin(), without.end(), f.name) == without.end();
}

// -- instruction sets -------------------------------------------------------------------------------------------------
template <class... Names>
constexpr bool all_known(Names... names) {
    return (... && (find_feature(names) != nullptr));
}
template <class... Names>
bool has_all(Names... names) {
    return (... && has_feature(names));
}

// A feature that is misspelled would only make the instruction set disappear.
#define LOWBIT_ISA_KNOWN(name, ...) static_assert(all_known(__VA_ARGS__), "isa.cpp lists no such feature for " #name);
LOWBIT_ISAS(LOWBIT_ISA_KNOWN)
#undef LOWBIT_ISA_KNOWN

bool available(int isa) {
    static const bool found[] = {
#define LOWBIT_ISA_FOUND(name, ...) has_all(__VA_ARGS__),
        LOWBIT_ISAS(LOWBIT_ISA_FOUND)
#undef LOWBIT_ISA_FOUND
    };
    return found[isa];
}

int parse(const std::string& name) {
    std::string known;
    for (const std::string& candidate : isas()) known += (known.empty() ? "" : ", ") + candidate;
    for (int i = 0; i < kNumIsas; ++i) {
        if (name == kNames[i] && available(i)) return i;
    }
    throw std::invalid_argument("instruction set '" + name + "' is not available here; expected one of " + known);
}

int best() {
    int isa = kNumIsas - 1;
    while (!available(isa)) --isa;
    return isa;
}

// Throws on a name in LOWBIT_ISA that is not available, at the first call of a kernel: nothing falls back unseen.
int initial() {
    const char* name = std::getenv("LOWBIT_ISA");
    return name && *name ? parse(name) : best();
}

std::atomic<int> forced{-1};

}  // namespace

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

bool has_feature(const char* name) {
    const Feature* feature = find_feature(name);
    if (feature == nullptr) throw std::invalid_argument("unknown processor feature '" + std::string(name) + "'");
    return present(*feature);
}

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (int i = 0; i < kNumIsas; ++i) {
        if (available(i)) names.emplace_back(kNames[i]);
    }
    return names;
}

Isa current_isa() {
    const int now = forced.load(std::memory_order_relaxed);
    if (now >= 0) return static_cast<Isa>(now);
    static const int chosen = initial();
    return static_cast<Isa>(chosen);
}

void force_isa(const std::string& name) { forced.store(name.empty() ? -1 : parse(name)); }

std::vector<std::string> cpu_features() {
    std::vector<std::string> names;
    for (const Feature& f : kFeatures) {
        if (present(f)) names.emplace_back(f.name);
    }
    return names;
}

}  // namespace lowbit::cpu
