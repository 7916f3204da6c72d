// Parallel loops over index ranges, with OpenMP if available, and the floating-point mode of
// kernels.
#pragma once

#include <cstddef>

#ifdef QSYNC_X86
#include <xmmintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

namespace qsync {

// Scope with round-to-nearest and without flush-to-zero. `torch.set_flush_denormal` and libraries
// built with -ffast-math change MXCSR, which would change results.
class IeeeMode {
  public:
#ifdef QSYNC_X86
    IeeeMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~IeeeMode() { _mm_setcsr(saved_); }
    IeeeMode(const IeeeMode &) = delete;
    IeeeMode &operator=(const IeeeMode &) = delete;

  private:
    unsigned saved_;
#endif
};

// Call work(begin, end, thread) on at most `threads` consecutive ranges that cover [0, n). The
// length of each range but the last is a multiple of `grain`.
template <class Work> void parallel(std::size_t n, std::size_t grain, int threads, const Work &work) {
    const std::size_t grains = (n + grain - 1) / grain;
    if (static_cast<std::size_t>(threads) > grains) threads = static_cast<int>(grains);
    const auto range = [&](std::size_t thread, std::size_t team) {
        const IeeeMode mode;
        const std::size_t begin = grains * thread / team * grain, end = grains * (thread + 1) / team * grain;
        if (begin < n) work(begin, end < n ? end : n, thread);
    };
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        range(static_cast<std::size_t>(omp_get_thread_num()), static_cast<std::size_t>(omp_get_num_threads()));
        return;
    }
#endif
    range(0, 1);
}

} // namespace qsync
