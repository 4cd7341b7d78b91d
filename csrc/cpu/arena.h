// Memory that a thread keeps from one call to the next: fresh pages would cost more than small products do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace lowbit::cpu {

class Arena {
  public:
    Arena() = default;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena() { std::free(base_); }
    // Room for that many bytes, at a cache line; what was there is lost where there was not enough.
    uint8_t* reserve(size_t bytes) {
        if (bytes > size_) {
            std::free(base_);
            size_ = (bytes + 4095) / 4096 * 4096;
            base_ = static_cast<uint8_t*>(std::aligned_alloc(64, size_));
            if (base_ == nullptr) {
                size_ = 0;
                throw std::bad_alloc();
            }
        }
        return base_;
    }

  private:
    uint8_t* base_ = nullptr;
    size_t size_ = 0;
};

}  // namespace lowbit::cpu
