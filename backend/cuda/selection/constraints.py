"""Rules of kernel configurations, and the problems that a configuration serves.

CUTLASS detects most invalid configurations only by a static assertion after ten seconds, and some
(a spill, a pipeline that does not fit) only when the kernel runs. No rule queries a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, get_args

from qsync_fx.backend.cuda.codegen import LARGEST_K, on_hopper
from qsync_fx.backend.cuda.kernel_config import (
    ARCHITECTURES,
    OPERANDS,
    OUTPUTS,
    SHARED_MEMORY,
    KernelConfig,
    instruction_of,
    multiplies,
    size_of,
)
from qsync_fx.backend.cuda.problem import ConvOperation, ConvProblem, GemmProblem, Major, Problem

_WARP: Final = 32
_ALL_REGISTERS: Final = 65536
# Registers for addresses, masks, operands and scales, besides the accumulators (measured).
_ADDRESSES: Final = 96

_FP8: Final = ("fp8", "fp8_e5m2")
_FAST: Final = ("multistage", "cooperative", "pingpong")  # schedules with a fast FP8 variant
_GEMM_SCHEDULES: Final = (*_FAST, *(f"{name}_fast" for name in _FAST), "pipelined")

_CONV_EPILOGUE_BYTES: Final = 32 * 1024  # bytes of shared memory for stores on sm_90a
# Registers of 255 that remain next to the addresses and masks of pixels (168 fit, 192 spill).
_BESIDE_PIXELS: Final = 176
# Accumulators per thread if few registers remain (64 use up to 224 registers, 128 do not fit).
_FEW_SUMS: Final = 64


def problems(config: KernelConfig) -> list[str]:
    """Return the rules that a configuration breaks, as sentences; none if it is valid.

    Later rules assume the earlier ones, so only the first stage with broken rules is returned.
    """
    first, rules, hopper = _gemm_fields, _gemm, on_hopper(config)
    if config.operation in get_args(ConvOperation):
        first, rules = _conv_fields, _conv
    if broken := [*_fields(config), *first(config)]:
        return broken
    if not hopper and (broken := [*_warp_tile(config)]):
        return broken
    return [*_common(config), *(_cutlass_3 if hopper else _cutlass_2)(config), *rules(config)]


def _fields(c: KernelConfig) -> Iterator[str]:
    if c.arch not in ARCHITECTURES:
        yield f"the architecture must be one of {', '.join(ARCHITECTURES)}"
    shapes = (x for x in (c.warp, c.instruction, c.cluster) if x is not None)
    if not all(map(_positive, (c.tile, *shapes))):
        yield "tile, warp, instruction and cluster must each have three sizes from 1 to 1024"
    if c.out not in OUTPUTS:
        yield "the output must be fp32, fp16 or bf16"
    if c.swizzle not in (1, 2, 4, 8):
        yield "the swizzle must be 1, 2, 4 or 8"
    if c.alignment not in (1, 2, 4, 8, 16) or c.out_alignment not in (1, 2, 4, 8):
        yield "alignments must be powers of two, up to 16 (operands) and 8 (output)"
    if type(c.stages) is not int or not 0 <= c.stages <= 16:
        yield "there must be at most 16 stages"


def _positive(shape: object) -> bool:
    if not isinstance(shape, tuple) or len(shape) != 3:
        return False
    return all(type(size) is int and 0 < size <= 1024 for size in shape)


def _warp_tile(c: KernelConfig) -> Iterator[str]:
    if c.warp is None or c.instruction is None or c.cluster is not None:
        yield "a kernel without wgmma needs warp and instruction, and no cluster"
    elif c.tile[0] % c.warp[0] or c.tile[1] % c.warp[1] or c.tile[2] != c.warp[2]:
        yield "the warp tile must divide the tile in m and n, and have the same k"


def _common(c: KernelConfig) -> Iterator[str]:
    if not multiplies(c.arch, c.a, c.b):
        yield "the architecture must have tensor cores for the formats"
    if c.unit != {"fp32": "simt"}.get(c.a, "tensor"):
        yield 'fp32 needs the unit "simt"; all other formats need tensor cores'
    if c.alignment * size_of(c.a) > 16 or c.out_alignment * size_of(c.out) > 16:
        yield "a memory access has at most 16 bytes"


def _warps(c: KernelConfig) -> int:
    assert c.warp is not None
    return (c.tile[0] // c.warp[0]) * (c.tile[1] // c.warp[1])


def _stage_bytes(c: KernelConfig) -> int:
    """Return the shared memory bytes of one stage: a tile of each operand."""
    m, n, k = c.tile
    return k * (m * size_of(c.a) + n * size_of(c.b))


def _cutlass_2(c: KernelConfig) -> Iterator[str]:
    assert c.warp is not None and c.instruction is not None
    width, warps = size_of(c.a), _warps(c)
    row = c.tile[2] * width
    if c.instruction != instruction_of(c):
        yield "the instruction must be the one that the architecture has for the format"
    multiples = all(w % i == 0 for w, i in zip(c.warp, c.instruction, strict=True))
    if not multiples or c.warp[2] // c.instruction[2] % 2:
        yield "the warp tile must be a multiple of the instruction, in k an even multiple"
    if c.unit == "tensor" and row not in (64, 128):
        yield "a tile must have 64 or 128 bytes along k, to avoid conflicts in shared memory"
    if c.unit == "simt" and (row, c.alignment * width, c.out_alignment) != (32, 4, 1):
        yield "simt tiles must have 32 bytes along k, alignment 4 bytes, output alignment 1"
    if warps > 16:
        yield "a threadblock must have 1 to 16 warps"
    if c.unit == "tensor" and any(size * row % (16 * _WARP * warps) for size in c.tile[:2]):
        yield "the loads of a tile must divide evenly among threads, 16 bytes each"
    if (c.schedule == "pipelined") != (c.arch == "sm_75"):
        yield "sm_75 needs the schedule pipelined, since it has no asynchronous copies"
    if c.stages not in ([2] if c.schedule == "pipelined" else range(3, 11)):
        yield "pipelined needs two stages, multistage three to ten"
    if _stage_bytes(c) * c.stages > SHARED_MEMORY[c.arch]:
        yield "the stages must fit into shared memory"
    if _sums(c) + _ADDRESSES > min(256, _ALL_REGISTERS // (_WARP * warps)):
        yield "the accumulators of a warp tile must fit into registers"


def _cutlass_3(c: KernelConfig) -> Iterator[str]:
    if c.arch != "sm_90a":
        yield f"{c.schedule} is a schedule of sm_90a"
    if c.unit != "tensor" or c.warp is not None or c.instruction is not None:
        yield 'wgmma kernels have the unit "tensor", and no warp and instruction'
    if c.tile[2] * size_of(c.a) != 128:
        yield "a tile must have 128 bytes along k, the widest swizzle of TMA"
    if c.alignment * size_of(c.a) != 16 or c.out_alignment * size_of(c.out) != 16:
        yield "TMA copies 16 aligned bytes: alignments must be 16 bytes"
    if c.stages == 1:
        yield "a pipeline needs at least two stages; 0 selects as many as fit"
    if _sums(c) > 128:
        yield "the accumulators must fit into registers: 128 per thread, 64 for accurate FP8"
    if _stage_bytes(c) * max(c.stages, 2) + _epilogue_bytes(c) > SHARED_MEMORY[c.arch]:
        yield "the stages, at least two, must fit into shared memory together with the epilogue"


def _sums(c: KernelConfig) -> int:
    """Return the accumulators per thread."""
    m, n, _ = c.warp or c.tile
    threads = _WARP
    if on_hopper(c):
        # A tile belongs to one group of four warps, or to two.
        threads = 256 if c.schedule.startswith("cooperative") else 128
        m, n, _ = c.tile
    # FP8 accumulators move to a second set every few instructions.
    if c.a in _FP8 and not c.schedule.endswith("_fast"):
        return 2 * m * n // threads
    return m * n // threads


def _epilogue_bytes(c: KernelConfig) -> int:
    """Return the shared memory bytes of the sm_90a epilogue."""
    if c.operation != "gemm":
        return _CONV_EPILOGUE_BYTES
    # Four buffers of 32 columns, and the vectors of scales and bias.
    return min(c.tile[0], 128) * 32 * size_of(c.out) * 4 + 8 * c.tile[1] + 1024


def _gemm_fields(c: KernelConfig) -> Iterator[str]:
    if c.operation != "gemm":
        yield "the operation must be gemm, fprop, dgrad or wgrad"
    if (c.a, c.b) not in OPERANDS:
        yield "there are kernels for " + ", ".join(f"{a} x {b}" for a, b in OPERANDS)
    if not {c.a_major, c.b_major} <= set(get_args(Major)):
        yield "operands must be row-major or column-major"
    if (c.a_scale, c.b_scale) not in (("none", "none"), ("channel", "channel")):
        yield 'a kernel reads no scales, or any scale of both operands ("channel")'
    if c.schedule not in _GEMM_SCHEDULES:
        yield "the schedule must be multistage, pipelined, cooperative or pingpong"


def _gemm(c: KernelConfig) -> Iterator[str]:
    k_major = (c.a_major, c.b_major) == ("row", "column")
    if c.unit == "tensor" and size_of(c.a) == 1 and not k_major:
        yield "tensor cores need INT8 and FP8 contiguous along k: a row-major, b column-major"
    if c.schedule.endswith("_fast") and c.a not in _FP8:
        yield "only FP8 products have a fast accumulation variant"
    yield from _gemm_3(c, k_major) if on_hopper(c) else _gemm_2(c)


def _gemm_2(c: KernelConfig) -> Iterator[str]:
    if c.order not in ("identity", "stream_k") or (c.order == "stream_k" and c.swizzle != 1):
        yield "the tile order must be identity, or stream_k without swizzle"
    if c.schedule != "pipelined" and c.alignment * size_of(c.a) < 4:
        yield "asynchronous copies need at least 4 bytes"
    if c.unit == "tensor" and size_of(c.a) == 1 and c.alignment != 16:
        yield "INT8 and FP8 operands of tensor cores must be aligned to 16 bytes"
    if c.a in _FP8 and c.arch == "sm_90a":
        yield "FP8 on sm_90a needs wgmma (cooperative or pingpong)"


def _gemm_3(c: KernelConfig, k_major: bool) -> Iterator[str]:
    cooperative = c.schedule.startswith("cooperative")
    x, y, z = c.cluster or (0, 0, 0)
    if not {x, y} <= {1, 2, 4} or z != 1 or x * y > 8:
        yield "a cluster must have at most 8 threadblocks: 1, 2 or 4 in m and in n"
    if c.tile[0] not in ((128, 256) if cooperative else (64, 128)):
        yield "m of the tile must be 128 or 256 for cooperative, 64 or 128 for pingpong"
    if c.tile[1] not in (32, 64, 128, 256):
        yield "n of the tile must be 32, 64, 128 or 256"
    if c.a == "tf32" and not k_major:
        yield "wgmma needs TF32 contiguous along k: others spill or are transposed; use multistage"
    if c.order not in ("persistent", "stream_k") or (c.order == "stream_k" and not cooperative):
        yield "the tile order must be persistent, or stream_k for cooperative kernels"


# Convolutions are implicit GEMMs. For fprop, rows are pixels, columns are output channels, and sums
# run over the filter and the input channels. For dgrad, columns are input channels. For wgrad, rows
# are output channels, columns are filter and input channels, and sums run over pixels.


def _conv_fields(c: KernelConfig) -> Iterator[str]:
    if (c.a, c.b) not in OPERANDS or c.a.startswith("fp8"):
        yield "both operands must have the same format: int8, fp16, bf16, tf32 or fp32"
    if c.schedule not in ("multistage", "pipelined", "warp_specialized"):
        yield "the schedule of a convolution must be multistage, pipelined or warp_specialized"


def _conv(c: KernelConfig) -> Iterator[str]:
    if c.a == "int8" and c.operation != "fprop":
        yield "only fprop supports INT8: channels of gradients are not along the reduction"
    any_scale = ("tensor", {"fprop": "channel"}.get(c.operation, "tensor"))
    if (c.a_scale, c.b_scale) not in (("none", "none"), any_scale):
        yield 'a kernel reads no scales, or "tensor" of a and "channel" (gradients: "tensor") of b'
    if c.operation != "fprop" and c.bias:
        yield "gradient kernels have no bias"
    split = c.operation == "wgrad" and c.out == "fp32" and not on_hopper(c)
    if c.order == "split_k" and not split:
        yield "only weight gradients in FP32, by multistage or pipelined kernels, support split_k"
    yield from _conv_3(c) if on_hopper(c) else _conv_2(c)


def _conv_2(c: KernelConfig) -> Iterator[str]:
    width, tensor = size_of(c.a), c.unit == "tensor"
    strided = c.operation == "dgrad" and c.strided
    rows = {"fprop": (), "dgrad": (c.tile[1],), "wgrad": c.tile[:2]}[c.operation]
    if tensor and any(size * width % 128 for size in rows):
        yield "gradient operands that are strided along the reduction need tile rows of 128 bytes"
    if tensor and c.alignment * width != 16:
        yield "tensor cores read 16 bytes at a time: other channel counts must be padded"
    # Registers per thread of one stage that is loaded, but not yet stored to shared memory.
    loaded = _stage_bytes(c) // (4 * _WARP * _warps(c))
    pixels = c.schedule == "pipelined" and c.operation != "wgrad"
    if pixels and loaded + _sums(c) > _BESIDE_PIXELS:
        yield "values that a pipelined kernel has loaded must fit into registers with its sums"
    if c.order not in ("identity", "split_k"):
        yield "the tile order must be identity or split_k"
    if strided and tensor and _sums(c) > _FEW_SUMS:
        yield "strided gradients compute pixel indices and have registers for 64 accumulators"
    deep = c.operation == "wgrad" and c.tile[2] * width > 64
    if c.arch == "sm_90a" and deep and _sums(c) > _FEW_SUMS:
        yield "weight gradients on sm_90a with over 64 accumulators need tiles of 64 bytes along k"
    if strided and c.swizzle == 2:
        yield "the swizzle of strided gradients must be 1, 4 or 8"


def _conv_3(c: KernelConfig) -> Iterator[str]:
    x, y, z = c.cluster or (0, 0, 0)
    if c.a == "tf32" and c.operation != "fprop":
        yield "wgmma needs TF32 contiguous along the reduction"
    if c.operation == "dgrad" and c.strided:
        yield "TMA supports only input gradients of stride 1; use multistage"
    if not {x, y} <= {1, 2} or z != 1:
        yield "a cluster must have 1 or 2 threadblocks in m and in n"
    if c.tile[0] not in (64, 128):
        yield "m of the tile must be 64 or 128"
    if c.tile[1] not in (64, 128, 256):
        yield "n of the tile must be 64, 128 or 256"
    if c.order != "identity" or c.swizzle != 1:
        yield "the tile order must be identity, with swizzle 1"


_LARGEST: Final = (1 << 31) - 1
_ACROSS: Final = (1 << 16) - 1  # limit of the grid's second dimension, in threadblocks
_BYTES: Final = 2**31  # limit of a convolution's tensors: offsets are 32-bit
# TMA encodes the reach of a filter beyond the image as a signed byte.
_CORNER: Final = 127
_FILTER: Final = 32  # CUTLASS 2.x has one mask bit per row and column of the filter


def serves(config: KernelConfig, problem: Problem) -> str | None:
    """Return why a valid configuration does not serve a problem, as a clause; None if it does."""
    return next(_misfits(config, problem), None)


def _misfits(c: KernelConfig, p: Problem) -> Iterator[str]:
    """Yield the reasons in order; later ones assume that the earlier ones do not apply."""
    if c.operation != p.operation:
        yield f"it computes {c.operation}, not {p.operation}"
    if (c.a, c.b) != (p.a, p.b):
        yield f"it multiplies {c.a} by {c.b}, not {p.a} by {p.b}"
    if c.out != p.out:
        yield f"its output is {c.out}, not {p.out}"
    if c.a_scale == "none" and (p.a_scale, p.b_scale) != ("none", "none"):
        yield "it reads no scales"
    if p.bias and not c.bias:
        yield "it adds no bias"
    yield from _gemm_misfits(c, p) if isinstance(p, GemmProblem) else _conv_misfits(c, p)


def _gemm_misfits(c: KernelConfig, p: GemmProblem) -> Iterator[str]:
    if c.a_major != p.a_major or c.b_major != p.b_major:
        ours, theirs = (f"{x.a_major}-major a and {x.b_major}-major b" for x in (c, p))
        yield f"it reads {ours}, not {theirs}"
    if not all(1 <= size <= _LARGEST for size in (p.m, p.n, p.k)):
        yield f"sizes must be from 1 to {_LARGEST}"
    longest = LARGEST_K.get(p.a, p.k)
    if p.k > longest:
        yield f"k = {p.k} is above {longest}: sums may overflow 32 bits"
    inner_a = {"row": "k", "column": "m"}[c.a_major]
    inner_b = {"row": "n", "column": "k"}[c.b_major]
    yield from _misaligned(c, p, {inner_a, inner_b}, "n")
    if not on_hopper(c) and -(-p.n // c.tile[1]) > _ACROSS:
        yield f"n = {p.n} has more than {_ACROSS} tiles of {c.tile[1]}"


def _misaligned(c: KernelConfig, p: Problem, operands: set[str], output: str) -> Iterator[str]:
    multiples = [*((name, c.alignment) for name in sorted(operands)), (output, c.out_alignment)]
    for name, multiple in multiples:
        if (size := getattr(p, name)) % multiple:
            yield f"{name} = {size} is not a multiple of {multiple}"


def _conv_misfits(c: KernelConfig, p: ConvProblem) -> Iterator[str]:
    if p.a_scale == "channel" or (p.b_scale == "channel" and p.operation != "fprop"):
        yield "scales that vary along the reduction, or per pixel, cannot be applied to its result"
    if min(p.n, p.h, p.w, p.c, p.k, p.r, p.s, *p.stride, *p.dilation) < 1 or min(p.padding) < 0:
        yield "sizes, strides and dilations must be at least 1, paddings at least 0"
    if min(p.p, p.q) < 1:
        yield "the filter is larger than the image"
    strided = p.operation == "dgrad" and p.stride != (1, 1)
    if p.operation == "dgrad" and strided != c.strided:
        kind = {True: "strides other than 1", False: "stride 1"}[c.strided]
        yield f"it supports only {kind}"
    if strided and p.dilation != (1, 1):
        yield "input gradients of convolutions with both stride and dilation are not supported"
    if not on_hopper(c):
        if max(p.r, p.s) > _FILTER:
            yield f"filters must have at most {_FILTER} rows and columns"
    elif max(p.dilation[0] * (p.r - 1), p.dilation[1] * (p.s - 1), *p.padding) > _CORNER:
        yield f"TMA reaches at most {_CORNER} pixels beyond an image"
    elif max(p.stride) > 8:
        yield "TMA supports strides up to 8"
    operands, output = {"c", "k"}, "c"
    if p.operation == "fprop":
        operands, output = {"c"}, "k"
    yield from _misaligned(c, p, operands, output)
    first, second, result = p.shapes
    # Sums of convolutions with 16-bit results are staged as FP32, and CUTLASS checks that size.
    sizes = (math.prod(first) * size_of(c.a), math.prod(second) * size_of(c.b))
    if max(*sizes, math.prod(result) * 4) >= _BYTES:
        yield "a tensor has 2 GiB or more (of a result, counted as FP32)"
    columns = result[3]
    if p.operation == "wgrad":
        columns = math.prod(result[1:])
    if -(-columns // c.tile[1]) > _ACROSS:
        yield f"the result has more than {_ACROSS} tiles of {c.tile[1]} columns"
