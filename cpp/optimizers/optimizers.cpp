// Multithreaded optimizer steps: all tensors of a call are one index range that the threads divide.

#include "optimizers/optimizers.h"

#include "parallel.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace qsync {
namespace {

// Elements per thread that amortize waking it.
constexpr std::size_t GRAIN = std::size_t{1} << 13;

// Return whether two parameters share memory. Their steps then run one after the other, as in
// torch.
template <class Tensor> bool overlap(const Tensor *tensors, std::size_t count) {
    std::vector<std::pair<const float *, const float *>> ranges;
    for (std::size_t i = 0; i < count; ++i)
        if (tensors[i].n != 0) ranges.emplace_back(tensors[i].parameter, tensors[i].parameter + tensors[i].n);
    std::sort(ranges.begin(), ranges.end());
    for (std::size_t i = 1; i < ranges.size(); ++i)
        if (ranges[i].first < ranges[i - 1].second) return true;
    return false;
}

// Call work(tensor, begin, size) on segments of the concatenation of all tensors, which the threads
// divide.
template <class Tensor, class Work> void over_all(const Tensor *tensors, std::size_t count, int threads, const Work &work) {
    std::vector<std::size_t> ends(count);
    std::size_t total = 0;
    for (std::size_t i = 0; i < count; ++i) ends[i] = total += tensors[i].n;
    parallel(total, GRAIN, threads > 1 && overlap(tensors, count) ? 1 : threads, [&](std::size_t begin, std::size_t end, std::size_t) {
        auto i = static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
        for (; begin < end; ++i) {
            const std::size_t start = ends[i] - tensors[i].n, stop = std::min(end, ends[i]);
            if (begin < stop) work(tensors[i], begin - start, stop - begin);
            begin = std::max(begin, stop);
        }
    });
}

} // namespace

void adam(const Optimizers &optimizers, const AdamTensor *tensors, std::size_t count, const AdamRule &rule, Decay decay, bool scaled,
          int threads) {
    over_all(tensors, count, threads, [&](const AdamTensor &t, std::size_t at, std::size_t n) {
        const bool bounded = t.largest != nullptr;
        optimizers.adam[decay][bounded][scaled](t.parameter + at, t.gradient + at, t.first + at, t.second + at,
                                                bounded ? t.largest + at : nullptr, n, rule, t.negative_step, t.root);
    });
}

void sgd(const Optimizers &optimizers, const SgdTensor *tensors, std::size_t count, const SgdRule &rule, bool decays, bool nesterov,
         bool scaled, int threads) {
    over_all(tensors, count, threads, [&](const SgdTensor &t, std::size_t at, std::size_t n) {
        Momentum momentum = NO_MOMENTUM;
        if (t.buffer != nullptr) momentum = nesterov ? (t.first ? NESTEROV_FIRST : NESTEROV) : (t.first ? FIRST : GOING_ON);
        optimizers.sgd[decays][momentum][scaled](t.parameter + at, t.gradient + at, momentum ? t.buffer + at : nullptr, n, rule);
    });
}

} // namespace qsync
