// Implicit im2col matrix of a convolution: one row per output pixel, one column per kernel position
// and input channel. Parts of it are gathered on demand.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qsync {

// Geometry of a convolution over channels-last images. The first element of each pair is for
// height.
struct Windows {
    std::ptrdiff_t size[2], channels;
    std::ptrdiff_t kernel[2], stride[2], padding[2], dilation[2];
    std::ptrdiff_t out[2];
};

// Gather a submatrix of the im2col matrix: rows [pixel, pixel + pixels), columns [tap, tap + taps).
// Pixels outside the image are zeros.
//
// images: [count, height, width, channels] int8, contiguous; to: [pixels, taps] int8, row-major,
// must not overlap the images.
void gather(const Windows &windows, const std::int8_t *images, std::size_t pixel, std::size_t pixels, std::size_t tap, std::size_t taps,
            std::int8_t *to);

} // namespace qsync
