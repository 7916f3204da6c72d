// Memory that a call needs while it runs, kept for the next one: given back to the system, it would cost a page fault for each 4 KB of it
// at every call.
#pragma once

#include <cstddef>

namespace qsync {

// Memory at a multiple of 64 bytes, alive as long as this. Of what is given back, a few pieces are kept for whoever comes next, on whatever
// thread; so their number is that of calls at one time.
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
