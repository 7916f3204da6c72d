"""What makes a configuration of a convolution a kernel, and which problems it serves.

Tables of rules as in `rules_gemm`, for the same reason. Implicit GEMMs: of an output the rows are pixels, the columns output channels, and
each sum goes over the filter and the input channels; of the input gradient the columns are input channels; of the weight gradient the rows
are output channels, the columns filter and input channels, and sums go over pixels.

Invariant: nothing here looks at a device.
"""

from __future__ import annotations

from typing import Final, get_args

from qsync_fx.backend.cuda.config import ARCHITECTURES, KernelConfig
from qsync_fx.backend.cuda.conv_source import hopper
from qsync_fx.backend.cuda.hardware import OPERANDS, OUTPUTS, SHARED_MEMORY, instruction_of, size_of
from qsync_fx.backend.cuda.problem import Activation, ConvOperation, ConvProblem, Problem
from qsync_fx.backend.cuda.rules_gemm import ALIGNMENT, SINCE, STAGES, SWIZZLE, UNIT, Rule

_WARP: Final = 32
_REGISTERS: Final = 65536
_ADDRESSES: Final = 96  # registers that addresses, masks and operands take beside the sums, measured
_EPILOGUE: Final = 32 * 1024  # of shared memory at sm_90a, for stores
_BYTES: Final = 2**31  # a tensor has fewer: offsets are of 32 bits
_CORNER: Final = 127  # TMA tells how far a filter reaches beyond an image in eight bits, with a sign
_FILTER: Final = 32  # CUTLASS 2.x keeps a bit for each row and column of the filter


def _sizes(shape: object) -> bool:
    return (
        isinstance(shape, tuple) and len(shape) == 3 and all(type(size) is int and 0 < size <= 1024 for size in shape)
    )


def _divides(c: KernelConfig) -> bool:
    return c.warp is not None and c.tile[0] % c.warp[0] == c.tile[1] % c.warp[1] == 0 and c.tile[2] == c.warp[2]


def _warps(c: KernelConfig) -> int:
    assert c.warp is not None
    return (c.tile[0] // c.warp[0]) * (c.tile[1] // c.warp[1])


def _sums(c: KernelConfig) -> int:
    """Accumulators a thread; at sm_90a one group of four warps has the whole tile."""
    m, n = (c.tile[0], c.tile[1]) if hopper(c) or c.warp is None else (c.warp[0], c.warp[1])
    return m * n // (4 * _WARP if hopper(c) else _WARP)


def _stage_bytes(c: KernelConfig) -> int:
    return c.tile[2] * (c.tile[0] * size_of(c.a) + c.tile[1] * size_of(c.b))


_PLAIN: Final = (
    Rule("arch", lambda c: c.arch not in ARCHITECTURES, f"the architecture is one of {', '.join(ARCHITECTURES)}"),
    Rule(
        "volta",
        lambda c: c.arch == "sm_70",
        "sm_70 needs NVRTC 12, for which there is no template yet: nvcc 13 cannot compile it",
    ),
    Rule(
        "operation",
        lambda c: c.operation not in get_args(ConvOperation),
        "the operation of a convolution is fprop, dgrad or wgrad",
    ),
    Rule(
        "shapes",
        lambda c: (
            not all(map(_sizes, (c.tile, c.warp or (1, 1, 1), c.instruction or (1, 1, 1), c.cluster or (1, 1, 1))))
        ),
        "tile, warp, instruction and cluster are three sizes from 1 to 1024",
    ),
    Rule(
        "operands",
        lambda c: (c.a, c.b) not in OPERANDS or c.a.startswith("fp8"),
        "there are convolutions of int8, fp16, bf16, tf32 and fp32 by the same format",
    ),
    Rule("output", lambda c: c.out not in OUTPUTS, "the output is fp32, fp16 or bf16"),
    Rule("activation", lambda c: c.activation not in get_args(Activation), "the activation is none, relu or gelu"),
    Rule(
        "schedule",
        lambda c: c.schedule not in ("multistage", "pipelined", "warp_specialized"),
        "the schedule of a convolution is multistage, pipelined or warp_specialized",
    ),
    SWIZZLE,
    ALIGNMENT,
    STAGES,
)
"""What the other rules take for granted."""

_BOTH: Final = (
    SINCE,
    UNIT,
    Rule(
        "int8",
        lambda c: c.a == "int8" and c.operation != "fprop",
        "tensor cores take INT8 only contiguous along the sum, which channels of gradients are not: fprop alone",
    ),
    Rule(
        "scales",
        lambda c: (
            (c.a_scale, c.b_scale)
            not in (("none", "none"), ("tensor", "channel" if c.operation == "fprop" else "tensor"))
        ),
        'a kernel reads no scales, or one of a and any kind of b ("tensor", "channel"; of gradients "tensor")',
    ),
    Rule(
        "gradients",
        lambda c: c.operation != "fprop" and (c.bias or c.activation != "none"),
        "gradients have no bias and no activation",
    ),
    Rule(
        "wide",
        lambda c: c.alignment * size_of(c.a) > 16 or c.out_alignment * size_of(c.out) > 16,
        "one access has at most 16 bytes",
    ),
    Rule(
        "parts",
        lambda c: c.order == "split_k" and (c.operation != "wgrad" or c.out != "fp32" or hopper(c)),
        "only weight gradients in FP32, by multistage or pipelined kernels, are sums of parts",
    ),
)

_CUTLASS_2: Final = (
    Rule(
        "names",
        lambda c: c.warp is None or c.instruction is None or c.cluster is not None,
        "a kernel below wgmma names warp and instruction, and no cluster",
    ),
    Rule("warp divides tile", lambda c: not _divides(c), "the warp tile divides the tile in m and n, and has its k"),
    Rule(
        "instruction",
        lambda c: c.instruction != instruction_of(c),
        "the instruction is the one that the architecture has for the format",
    ),
    Rule(
        "iterations",
        lambda c: (
            c.unit == "tensor"
            and c.warp is not None
            and c.instruction is not None
            and (
                any(w % i for w, i in zip(c.warp, c.instruction, strict=True)) or c.warp[2] // c.instruction[2] % 2 != 0
            )
        ),
        "the warp tile is a multiple of the instruction, an even one in k: loads of one half hide behind the other",
    ),
    Rule(
        "rows of memory",
        lambda c: c.unit == "tensor" and c.tile[2] * size_of(c.a) not in (64, 128),
        "a tile has 64 or 128 bytes along k, which is what shared memory without bank conflicts is laid out for",
    ),
    Rule(
        "columns of memory",
        lambda c: (
            c.unit == "tensor"
            and c.operation != "fprop"
            and (
                c.tile[1] * size_of(c.b) % 128 != 0 or (c.operation == "wgrad" and c.tile[0] * size_of(c.a) % 128 != 0)
            )
        ),
        "operands of gradients that lie across the sum have rows of 128 bytes in a tile",
    ),
    Rule(
        "simt tile",
        lambda c: c.unit == "simt" and (c.tile[2] != 8 or c.alignment != 1 or c.out_alignment != 1),
        "FP32 tiles have 8 along k, and alignments of 1",
    ),
    Rule(
        "16 bytes",
        lambda c: c.unit == "tensor" and c.alignment * size_of(c.a) != 16,
        "tensor cores are fed 16 bytes at a time: channels that are no multiple are filled up before",
    ),
    Rule("warps", lambda c: _divides(c) and not 1 <= _warps(c) <= 16, "a threadblock has 1 to 16 warps"),
    Rule(
        "loads",
        lambda c: (
            _divides(c)
            and c.unit == "tensor"
            and any(c.tile[i] * c.tile[2] * size_of(c.a) % (16 * _WARP * _warps(c)) for i in (0, 1))
        ),
        "threads share the loads of a tile evenly, 16 bytes each",
    ),
    Rule(
        "registers",
        lambda c: _divides(c) and _sums(c) + _ADDRESSES > min(256, _REGISTERS // (_WARP * _warps(c))),
        "the sums of a warp tile fit into registers",
    ),
    Rule("order", lambda c: c.order not in ("identity", "split_k"), "tiles are in the order identity, or split_k"),
    Rule(
        "strided swizzle",
        lambda c: c.operation == "dgrad" and c.strided and c.swizzle == 2,
        "the swizzle of strided gradients is 1, 4 or 8",
    ),
    Rule(
        "pipeline",
        lambda c: (c.schedule == "pipelined") != (c.arch == "sm_75"),
        "sm_75 is pipelined: it has no asynchronous copies, which multistage needs",
    ),
    Rule(
        "stages of the pipeline",
        lambda c: (c.stages != 2) if c.schedule == "pipelined" else not 3 <= c.stages <= 10,
        "pipelined has two stages, multistage three to ten",
    ),
    Rule(
        "shared memory",
        lambda c: _stage_bytes(c) * c.stages > SHARED_MEMORY[c.arch],
        "the stages fit into shared memory",
    ),
)

_CUTLASS_3: Final = (
    Rule("hopper", lambda c: c.arch != "sm_90a", "warp_specialized is a schedule of sm_90a"),
    Rule(
        "wgmma",
        lambda c: c.unit != "tensor" or c.warp is not None or c.instruction is not None,
        "the schedule says warp and instruction",
    ),
    Rule("tf32", lambda c: c.a == "tf32" and c.operation != "fprop", "wgmma takes TF32 only contiguous along the sum"),
    Rule(
        "stride",
        lambda c: c.operation == "dgrad" and c.strided,
        "TMA unfolds gradients of stride 1 alone: strided ones are multistage",
    ),
    Rule(
        "cluster",
        lambda c: c.cluster is None or not all(size in (1, 2) for size in c.cluster) or c.cluster[2] != 1,
        "a cluster has 1 or 2 threadblocks in m and n",
    ),
    Rule("tile m", lambda c: c.tile[0] not in (64, 128), "m of the tile is 64 or 128"),
    Rule("tile n", lambda c: c.tile[1] not in (64, 128, 256), "n of the tile is 64, 128 or 256"),
    Rule(
        "tile k", lambda c: c.tile[2] * size_of(c.a) != 128, "a tile has 128 bytes along k, the widest swizzle of TMA"
    ),
    Rule(
        "TMA",
        lambda c: c.alignment * size_of(c.a) != 16 or c.out_alignment * size_of(c.out) != 16,
        "TMA moves 16 aligned bytes: alignments are 16 bytes",
    ),
    Rule("registers", lambda c: _sums(c) > 128, "the sums of a tile fit into registers: 128 a thread"),
    Rule("order", lambda c: c.order != "identity" or c.swizzle != 1, "tiles are in the order identity, with swizzle 1"),
    Rule(
        "shared memory",
        lambda c: _stage_bytes(c) * max(c.stages, 2) + _EPILOGUE > SHARED_MEMORY[c.arch],
        "two stages or as many as are asked for fit into shared memory beside the epilogue",
    ),
    Rule(
        "stages of the pipeline", lambda c: c.stages == 1, "a pipeline has two stages or more; 0 takes as many as fit"
    ),
)

TABLES: Final = (_PLAIN, _BOTH, _CUTLASS_2, _CUTLASS_3)


def broken(config: KernelConfig) -> list[Rule]:
    """Returns the rules that a convolution's configuration breaks. Where plain ones are, the others are not asked."""
    plain = [rule for rule in _PLAIN if rule.broken(config)]
    return plain or [rule for rule in (*_BOTH, *(_CUTLASS_3 if hopper(config) else _CUTLASS_2)) if rule.broken(config)]


def problems(config: KernelConfig) -> list[str]:
    """Returns the sentences of the rules that a configuration breaks; none if it is valid."""
    return [rule.sentence for rule in broken(config)]


def serves(config: KernelConfig, problem: Problem) -> str | None:
    """Returns why a valid configuration does not serve a problem: a clause; None if it does."""
    if not isinstance(problem, ConvProblem):
        return f"it computes a convolution ({config.operation})"
    return _unsuited(config, problem) or _misshapen(config, problem) or _misaligned(config, problem)


def _unsuited(config: KernelConfig, problem: ConvProblem) -> str | None:
    if config.operation != problem.operation:
        return f"it computes {config.operation}, not {problem.operation}"
    if (config.a, config.b) != (problem.a, problem.b):
        return f"it multiplies {config.a} by {config.b}, not {problem.a} by {problem.b}"
    if config.out != problem.out:
        return f"its output is {config.out}, not {problem.out}"
    if config.activation != problem.activation:
        return f"its activation is {config.activation}, not {problem.activation}"
    if config.a_scale == "none" and (problem.a_scale, problem.b_scale) != ("none", "none"):
        return "it reads no scales"
    if problem.a_scale == "channel" or (problem.b_scale == "channel" and problem.operation != "fprop"):
        return "scales that vary along the sum, or along pixels, cannot be applied after it"
    if problem.bias and not config.bias:
        return "it adds no bias"
    return None


def _misshapen(config: KernelConfig, problem: ConvProblem) -> str | None:
    positive = (problem.n, problem.h, problem.w, problem.c, problem.k, problem.r, problem.s)
    if min(*positive, *problem.stride, *problem.dilation) < 1 or min(problem.padding) < 0:
        return "sizes, strides and dilations are at least 1, paddings at least 0"
    if min(problem.p, problem.q) < 1:
        return "the filter is larger than the image"
    strided = problem.stride != (1, 1)
    if problem.operation == "dgrad" and strided != config.strided:
        return f"it serves {'strided' if config.strided else 'unit'} strides alone"
    if problem.operation == "dgrad" and strided and problem.dilation != (1, 1):
        return "input gradients of convolutions both strided and dilated are not provided"
    reach = [dilation * (size - 1) for dilation, size in zip(problem.dilation, (problem.r, problem.s), strict=True)]
    if hopper(config):
        if max(*reach, *problem.padding) > _CORNER:
            return f"TMA reaches {_CORNER} pixels beyond an image"
        if max(problem.stride) > 8:
            return "TMA has strides up to 8"
    elif max(problem.r, problem.s) > _FILTER:
        return f"filters have up to {_FILTER} rows and columns"
    return None


def _misaligned(config: KernelConfig, problem: ConvProblem) -> str | None:
    last = {"fprop": "k", "dgrad": "c", "wgrad": "c"}[problem.operation]
    multiples = [("c", config.alignment), (last, config.out_alignment)]
    if problem.operation != "fprop":
        multiples.append(("k", config.alignment))
    for name, multiple in multiples:
        if (size := getattr(problem, name)) % multiple:
            return f"{name} = {size} is no multiple of {multiple}"
    x = problem.n * problem.h * problem.w * problem.c
    weight = problem.k * problem.r * problem.s * problem.c
    y = problem.n * problem.p * problem.q * problem.k
    a, b, d = {"fprop": (x, weight, y), "dgrad": (y, weight, x), "wgrad": (y, x, weight)}[problem.operation]
    # Sums of convolutions with 16-bit results are staged as FP32, and CUTLASS counts the result as such.
    if max(a * size_of(config.a), b * size_of(config.b), 4 * d) >= _BYTES:
        return "a tensor has 2 GiB or more (of a result, counted as FP32)"
    columns = {"fprop": problem.k, "dgrad": problem.c, "wgrad": problem.r * problem.s * problem.c}[problem.operation]
    if -(-columns // config.tile[1]) > 65535:
        return f"the result has more than 65535 tiles of {config.tile[1]} columns"
    return None
