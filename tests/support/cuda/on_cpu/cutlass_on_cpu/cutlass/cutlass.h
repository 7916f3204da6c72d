// CPU replacement of CUTLASS's header of this name, whose host version gives all threads index 0.
#pragma once

#define canonical_lane_idx device_lane_idx
#define canonical_warp_idx_sync device_warp_idx_sync
#define canonical_warp_idx device_warp_idx
#define canonical_warp_group_idx device_warp_group_idx
#include_next "cutlass/cutlass.h"
#undef canonical_lane_idx
#undef canonical_warp_idx_sync
#undef canonical_warp_idx
#undef canonical_warp_group_idx

namespace cutlass {

inline int canonical_lane_idx() { return static_cast<int>(threadIdx.x % 32); }
inline int canonical_warp_idx_sync() { return static_cast<int>(threadIdx.x / 32); }
inline int canonical_warp_idx() { return static_cast<int>(threadIdx.x / 32); }
inline int canonical_warp_group_idx() { return static_cast<int>(threadIdx.x / 128); }

} // namespace cutlass
