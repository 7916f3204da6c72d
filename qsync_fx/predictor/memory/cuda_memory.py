"""Memory that torch's CUDA allocator and NVIDIA's libraries need in addition to tensors.

A prediction for a GPU counts these terms, so that it is not below the peak that torch reports; a
CPU has none of them. Sources of the sizes: torch's c10/cuda/CUDACachingAllocator, and the section
"cuBLAS workspaces" of its CUDA notes.
"""

from __future__ import annotations

import functools
from typing import Final

from qsync_fx.devices.device_catalog import canonical, get, is_path
from qsync_fx.predictor.model.model_graph import ModelGraph

KIB: Final = 1024
MIB: Final = 1024 * KIB

BLOCK: Final = 512
"""Granularity of blocks (kMinBlockSize)."""
_OWN_SEGMENT, _SEGMENT = 10 * MIB, 2 * MIB
"""Size from which a block has a segment of its own, and the granularity of these segments
(kMinLargeAlloc, kRoundLarge)."""
FRAGMENTATION: Final = 2 * MIB + 20 * MIB
"""Unused parts of segments that smaller blocks share, at most one of each size at a time
(kSmallBuffer, kLargeBuffer)."""

_HANDLES: Final = 2
"""cuBLAS handles with a workspace: of the thread of the forward and of the backward pass."""
_WORKSPACE: Final = 2 * 4096 * KIB + 8 * 16 * KIB
"""Bytes of a cuBLAS workspace, CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8."""
_HOPPER, _HOPPER_WORKSPACE = (9, 0), 32 * MIB
"""Since this compute capability a workspace is larger, as NVIDIA's cuBLAS manual recommends."""


def on_gpu(graph: ModelGraph) -> bool:
    """Return whether a model was explained for a GPU."""
    return graph.device != "cpu"


def allocated(graph: ModelGraph, size: int) -> int:
    """Return the bytes that the device's allocator reserves for a tensor of `size` bytes."""
    if not on_gpu(graph):
        return size
    granularity = _SEGMENT if size >= _OWN_SEGMENT else BLOCK
    return -(-size // granularity) * granularity


@functools.cache
def workspace_bytes(device: str) -> int:
    """Return the bytes of the cuBLAS workspaces on a GPU; an unknown GPU has the largest ones."""
    listed = is_path(device) or canonical(device) is not None
    capability = get(device).capability if listed else None
    large = capability is None or capability >= _HOPPER
    return _HANDLES * (_HOPPER_WORKSPACE if large else _WORKSPACE)


def convolution_workspace(operand_bytes: int, result_bytes: int) -> int:
    """Return the bytes of a cuDNN convolution: copies of its operands and its result.

    Tensor cores read channels-last tensors, so that cuDNN converts other layouts (NVIDIA, cuDNN
    developer guide, "Tensor Core operations").
    """
    return operand_bytes + result_bytes
