"""Search for convolutions whose outputs or gradients torch computes wrongly on this CPU.

    python tests/support/computing/convolution_search.py --count 5000 --dimensions 3

Random problems are compared with FP64 results, which oneDNN does not compute. Uninitialized memory
contains NaN, which reveals values that a kernel does not write. Problems run in child processes,
since some kernels write out of bounds and end with SIGABRT or SIGSEGV. With `--guarded` the
gradients come from `convolution_backward` in qsync_fx.backend.operators.conv_gradients, which must
be correct for every problem.

`ONEDNN_MAX_CPU_ISA=AVX512_CORE` and other values restrict the CPU's instruction set.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from qsync_fx.backend.operators.conv_gradients import (
    Geometry,
    convolution_backward,
    forward,
    unsafe_dimensions,
)

CHANNELS = ((4, 6), (3, 16), (8, 8), (16, 16), (16, 32), (32, 48), (64, 64), (128, 32), (1, 5))
TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float32: 1e-4}
"""Largest error by dtype, relative to the largest value of the tensor."""
BATCH = 20
"""Problems per child process."""


@dataclass(frozen=True)
class Problem:
    """Shapes of a convolution.

    Attributes:
        batch, in_channels, out_channels, groups: numbers.
        size, kernel, stride, padding, dilation, output_padding: one number per spatial dimension.
        transposed: whether it is a transposed convolution.
        channels_last: whether tensors are channels-last in memory.
        seed: seed of the values.
    """

    batch: int
    in_channels: int
    out_channels: int
    groups: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    transposed: bool
    channels_last: bool
    seed: int

    @property
    def geometry(self) -> Geometry:
        return (
            list(self.stride),
            list(self.padding),
            list(self.dilation),
            self.transposed,
            list(self.output_padding),
            self.groups,
        )

    @property
    def output_size(self) -> list[int]:
        each = zip(
            self.size,
            self.kernel,
            self.stride,
            self.padding,
            self.dilation,
            self.output_padding,
            strict=True,
        )
        if self.transposed:
            return [(n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, k, s, p, d, o in each]
        return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in each]

    @property
    def valid(self) -> bool:
        """Whether torch accepts the problem. Dilated kernels of one value, which crash in BF16, are
        excluded.
        """
        spare = zip(self.output_padding, self.stride, self.dilation, strict=True)
        dilated = zip(self.kernel, self.dilation, strict=True)
        return (
            min(self.output_size) > 0
            and all(o < max(s, d) for o, s, d in spare)
            and all(k > 1 or d == 1 for k, d in dilated)
        )

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return the incoming gradient, the input and the weight."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = self.out_channels, self.in_channels // self.groups, *self.kernel
        if self.transposed:
            shape = self.in_channels, self.out_channels // self.groups, *self.kernel
        shapes = (
            (self.batch, self.out_channels, *self.output_size),
            (self.batch, self.in_channels, *self.size),
            shape,
        )
        values = [torch.randn(sizes, generator=generator).to(dtype) for sizes in shapes]
        if self.channels_last and len(self.size) > 1:
            last = torch.channels_last if len(self.size) == 2 else torch.channels_last_3d
            values = [tensor.contiguous(memory_format=last) for tensor in values]
        gradient, x, weight = values
        return gradient, x, weight


def draw(source: random.Random, dimensions: Sequence[int] = (1, 2, 3)) -> Problem:
    """Return a random problem with one of the given numbers of spatial dimensions."""
    while True:
        spatial, transposed = source.choice(dimensions), source.random() < 0.2
        channels = source.choice(CHANNELS)
        groups = source.choice((1, 1, 1, 2, channels[0]))
        if groups == 2:
            channels = 2 * channels[0], 2 * channels[1]
        elif groups > 2:
            channels = groups, groups
        strided, dilated = source.random() < 0.5, source.random() < 0.3

        def each(*numbers: int, spatial: int = spatial) -> tuple[int, ...]:
            return tuple(source.choice(numbers) for _ in range(spatial))

        kernel = each(1, 2, 3, 3, 3, 4, 5, 7)
        dilation = each(1, 2, 3) if dilated else (1,) * spatial
        padding = tuple(
            source.choice((k // 2 * d, k // 2 * d, 0, 1, 2, 3, 6))
            for k, d in zip(kernel, dilation, strict=True)
        )
        problem = Problem(
            batch=source.choice((1, 2, 3)),
            in_channels=channels[0],
            out_channels=channels[1],
            groups=groups,
            size=each(1, 2, 2, 3, 4, 5, 7, 8, 9, 14),
            kernel=kernel,
            stride=each(1, 1, 2, 3) if strided else (1,) * spatial,
            padding=padding,
            dilation=dilation,
            output_padding=each(0, 0, 1) if transposed else (0,) * spatial,
            transposed=transposed,
            channels_last=source.random() < 0.4,
            seed=source.randrange(2**31),
        )
        if problem.valid:
            return problem


def wrong(problem: Problem, dtype: torch.dtype, guarded: bool = False) -> list[str]:
    """Return the names of wrong results: output, and gradients of input, weight and bias."""
    operands = problem.tensors(dtype)
    compute = _by_qsync if guarded else _by_torch
    results = compute(problem, *operands)
    expected = _by_torch(problem, *(operand.double() for operand in operands))
    names = "output", "input gradient", "weight gradient", "bias gradient"
    return [
        name
        for name, result, right in zip(names, results, expected, strict=True)
        if not _close(result, right, TOLERANCE[dtype])
    ]


def _by_torch(problem: Problem, gradient: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
    output = torch.ops.aten.convolution.default(x, weight, None, *problem.geometry)
    backward = torch.ops.aten.convolution_backward.default
    arguments = gradient, x, weight, [problem.out_channels], *problem.geometry
    return [output, *backward(*arguments, [True] * 3)]


def _by_qsync(problem: Problem, gradient: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
    output = forward(x, weight, None, problem.geometry)
    bias_sizes = [problem.out_channels]
    backward = convolution_backward
    return [output, *backward(gradient, x, weight, bias_sizes, problem.geometry, [True] * 3)]


def _close(result: Tensor, expected: Tensor, tolerance: float) -> bool:
    bound = tolerance * max(expected.abs().max().item(), 0.01)
    return result.shape == expected.shape and bool(((result - expected).abs() <= bound).all())


@contextmanager
def dirty_memory() -> Iterator[None]:
    """Fill new tensors with NaN in the context."""
    before = torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filling


def judged(
    problems: Sequence[Problem], dtype: torch.dtype, guarded: bool = False
) -> list[list[str]]:
    """Return the wrong results of each problem, or "crash", computed in a child process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with os.fdopen(writing, "w") as stream:
            for problem in problems:
                with dirty_memory():
                    names = wrong(problem, dtype, guarded)
                print(json.dumps(names), file=stream, flush=True)
        # glibc detects a corrupted heap when memory is freed or allocated.
        del stream
        _ = [bytearray(size) for size in range(16, 40_000, 488)]
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        results: list[list[str]] = [json.loads(line) for line in stream if line.endswith("]\n")]
    _, status = os.waitpid(child, 0)
    if status == 0:
        return results
    if len(problems) == 1:
        return [[*(results[0] if results else []), "crash"]]
    return [judged([problem], dtype, guarded)[0] for problem in problems]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dimensions", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--guarded", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # threads do not survive fork
    dtype = getattr(torch, arguments.dtype)
    source = random.Random(arguments.seed)
    counts: collections.Counter[tuple[str, ...]] = collections.Counter()
    for start in range(0, arguments.count, BATCH):
        count = min(BATCH, arguments.count - start)
        problems = [draw(source, arguments.dimensions) for _ in range(count)]
        results = judged(problems, dtype, arguments.guarded)
        for problem, names in zip(problems, results, strict=True):
            unsafe = unsafe_dimensions(problem.kernel, problem.size, problem.geometry)
            counts[f"{len(problem.size)}-D", "guarded" if any(unsafe) else "as it is", *names] += 1
            if names:
                print(json.dumps({"wrong": names, "unsafe": unsafe, **asdict(problem)}), flush=True)
    for key, number in sorted(counts.items()):
        print(number, *key)
    return int(any(len(key) > 2 and (arguments.guarded or key[1] == "as it is") for key in counts))


if __name__ == "__main__":
    sys.exit(main())
