// Scratch memory with a free list. Returning it to the operating system would cost a page fault per
// 4 KB in every call.
#pragma once

#include <cstddef>

namespace qsync {

// Scratch memory, aligned to 64 bytes, owned by this object. A few released buffers are retained
// and reused by later calls on any thread, so as many buffers exist as calls run concurrently.
class Workspace {
  public:
    explicit Workspace(std::size_t bytes);
    ~Workspace();
    Workspace(const Workspace &) = delete;
    Workspace &operator=(const Workspace &) = delete;
    std::byte *get() const { return at_; }

  private:
    std::byte *at_;
    std::size_t bytes_;
};

} // namespace qsync
