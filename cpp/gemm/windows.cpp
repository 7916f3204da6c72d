// Gathering of im2col rows from channels-last images.

#include "gemm/windows.h"

#include <algorithm>
#include <cstring>

namespace qsync {
namespace {

// Copy `count` values from index `first` of an image row of `length` values. Values in front of the
// row and behind it are zeros.
void copy_row(const std::int8_t *row, std::ptrdiff_t length, std::ptrdiff_t first, std::ptrdiff_t count, std::int8_t *to) {
    const std::ptrdiff_t before = std::clamp<std::ptrdiff_t>(-first, 0, count);
    const std::ptrdiff_t within = std::clamp<std::ptrdiff_t>(length - first - before, 0, count - before);
    if (before != 0) std::memset(to, 0, static_cast<std::size_t>(before));
    if (within != 0) std::memcpy(to + before, row + first + before, static_cast<std::size_t>(within));
    const std::ptrdiff_t after = count - before - within;
    if (after != 0) std::memset(to + before + within, 0, static_cast<std::size_t>(after));
}

} // namespace

void gather(const Windows &windows, const std::int8_t *images, std::size_t pixel, std::size_t pixels, std::size_t tap, std::size_t taps,
            std::int8_t *to) {
    const Windows &w = windows;
    const std::ptrdiff_t row = w.size[1] * w.channels, plane = w.out[0] * w.out[1];
    // Without dilation, the values of adjacent kernel columns are adjacent in memory.
    const std::ptrdiff_t line = w.kernel[1] * w.channels, together = w.dilation[1] == 1 ? line : w.channels;
    const auto begin = static_cast<std::ptrdiff_t>(tap), end = begin + static_cast<std::ptrdiff_t>(taps);
    for (auto at = static_cast<std::ptrdiff_t>(pixel); pixels != 0; --pixels, ++at) {
        const std::ptrdiff_t image = at / plane, y0 = at % plane / w.out[1] * w.stride[0] - w.padding[0];
        const std::ptrdiff_t x0 = at % w.out[1] * w.stride[1] - w.padding[1];
        for (std::ptrdiff_t t = begin; t < end;) {
            const std::ptrdiff_t in_line = t % line, first = in_line % together, count = std::min(together - first, end - t);
            const std::ptrdiff_t y = y0 + t / line * w.dilation[0], x = x0 + in_line / together * w.dilation[1];
            if (y < 0 || y >= w.size[0])
                std::memset(to, 0, static_cast<std::size_t>(count));
            else
                copy_row(images + (image * w.size[0] + y) * row, row, x * w.channels + first, count, to);
            t += count;
            to += count;
        }
    }
}

} // namespace qsync
