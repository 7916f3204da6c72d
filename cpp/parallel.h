// Work over index ranges, on threads or not.
#pragma once

#include <cstddef>

#ifdef QSYNC_X86
#include <xmmintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

namespace qsync {

// Rounds to nearest and keeps denormals while it lives: `torch.set_flush_denormal` and libraries built with -ffast-math change the
// processor's mode, and results would change with it.
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

// Calls work(begin, end, thread) on `threads` consecutive ranges of [0, n) at most, each but the last a multiple of `grain` long.
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
