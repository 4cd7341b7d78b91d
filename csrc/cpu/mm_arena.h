// Memory that a thread keeps from one product to the next: fresh pages would cost more than small products do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace lowbit::cpu::mm {

class Arena {
  public:
    ~Arena() { std::free(base_); }
    // At least `bytes`, aligned to cache lines; what was there before is gone.
    uint8_t* reserve(size_t bytes) {
        if (bytes <= size_) return base_;
        std::free(base_);
        size_ = (bytes + 4095) / 4096 * 4096;
        base_ = static_cast<uint8_t*>(std::aligned_alloc(64, size_));
        if (base_ == nullptr) {
            size_ = 0;
            throw std::bad_alloc();
        }
        return base_;
    }

  private:
    uint8_t* base_ = nullptr;
    size_t size_ = 0;
};

// Hands out parts of a piece of memory; from null, it only finds how much is needed.
class Parts {
  public:
    explicit Parts(uint8_t* base) : base_(base) {}
    template <class T>
    void take(T*& pointer, int64_t count) {
        pointer = reinterpret_cast<T*>(base_ + used_);
        // Decoders write past the end, by less than a line (kSlack).
        used_ += (static_cast<size_t>(count) * sizeof(T) + 127) / 64 * 64;
    }
    size_t used() const { return used_; }

  private:
    uint8_t* base_;
    size_t used_ = 0;
};

}  // namespace lowbit::cpu::mm
