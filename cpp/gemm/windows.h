// The windows of a convolution as a matrix that is not there: a row for each value of the output's plane, a column for each tap and channel.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qsync {

// Images lie with their channels last. The first of each pair is for height.
struct Windows {
    std::ptrdiff_t size[2], channels;
    std::ptrdiff_t kernel[2], stride[2], padding[2], dilation[2];
    std::ptrdiff_t out[2];
};

// Copies `pixels` rows of the matrix from the one called `pixel` on, of each `taps` values from `tap` on, one row after the other.
void gather(const Windows &windows, const std::int8_t *images, std::size_t pixel, std::size_t pixels, std::size_t tap, std::size_t taps,
            std::int8_t *to);

} // namespace qsync
