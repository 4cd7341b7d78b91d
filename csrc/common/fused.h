// Constants of lowbit/reference/fused.py: docs/numerics.md section 15.
#pragma once

#include <cstdint>

namespace lowbit {

// Names of lowbit/ops/fused.py, in its order.
enum class Activation : int32_t { kSilu, kGeluTanh };

constexpr float kLog2E = 0x1.715476p+0f, kHighLn2 = 0x1.62e4p-1f, kLowLn2 = 0x1.7f7d1cp-20f;
constexpr float kExp[] = {0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558f2p-5f, 0x1.123a0ap-7f, 0x1.6a23f2p-10f};
constexpr float kRounder = 0x1.8p23f;
constexpr uint32_t kRounderBits = 0x4b400000u;
constexpr float kExpLimit = 104.0f, kGateLimit = 128.0f;
constexpr float kGelu[] = {0x1.988454p+0f, 0x1.2444f2p-4f, 0x1.b6676cp-3f};

// Rows whose terms of a gradient of a weight are added one after the other.
constexpr int64_t kNormRows = 64;

}  // namespace lowbit
