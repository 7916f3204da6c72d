"""Timings on a GPU, by CUDA events.

What is measured is a row of launches without gaps: the GPU is kept busy with something else until they are all queued, so that the time to
launch from Python is not part of it, and operands take turns among copies that do not fit its cache together, as a training step's do not.

Invariant: a kernel is timed only after its result was right. It must not win by computing something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from qsync_fx.backend.cuda.kernel.config import KernelConfig
from qsync_fx.backend.cuda.libraries import kernels
from qsync_fx.backend.cuda.problem import ConvProblem, GemmProblem, Problem
from qsync_fx.backend.cuda.run import launch
from qsync_fx.backend.cuda.run.peers import Operands, differs, operands, peer
from qsync_fx.backend.cuda.tune.tuning import Candidate, TuningError, name_of
from qsync_fx.errors import KernelError

COPIES_BYTES: Final = 256 * 2**20
"""Operands of this many bytes together are more than the largest cache (50 MB on an H100, 96 MB on an L40) holds."""

MOST_COPIES: Final = 8
BUSY_CYCLES: Final = 4_000_000
"""What the GPU waits before the first launch: some two milliseconds, in which Python queues a hundred launches."""

SECONDS: Final = 0.005
"""How long one measurement should take."""

MOST_LAUNCHES: Final = 50


class EventTimer:
    """Measures candidates for one problem on one device."""

    def __init__(self, problem: Problem, taken: Problem, device: torch.device) -> None:
        """
        Args:
            problem: what is computed.
            taken: how kernels take it (`select.way`).
            device: a CUDA device.
        """
        self._problem, self._taken, self._device = problem, taken, device
        self._runs: dict[str, list[Callable[[], Tensor]]] = {}
        self._launches: dict[str, int] = {}
        try:
            first = operands(problem, device)
            size = sum(t.nbytes for t in (first.a, first.b))
            count = max(2, min(MOST_COPIES, COPIES_BYTES // max(size, 1)))
            self._copies = [first, *(operands(problem, device) for _ in range(count - 1))]
        except torch.OutOfMemoryError as error:
            raise _no_memory(error) from error

    def measure(self, candidate: Candidate) -> list[float]:
        """Returns the seconds of one launch, the mean of a row of them."""
        name = name_of(candidate)
        try:
            if name not in self._runs:
                self._prepare(candidate)
            return [self._row(self._runs[name], self._launches[name])]
        except torch.OutOfMemoryError as error:
            raise _no_memory(error) from error
        except RuntimeError as error:
            raise KernelError(f"it failed: {str(error).splitlines()[0]}", where=name) from error

    def _prepare(self, candidate: Candidate) -> None:
        """Compiles, checks and warms up a candidate, and finds how many launches make a row."""
        runs = [self._runner(candidate, given) for given in self._copies]
        if not isinstance(candidate, str):
            wrong = differs(self._problem, runs[0](), self._copies[0])
            if wrong:
                raise TuningError(f"its result is wrong: {wrong}", where=candidate.name)
        self._row(runs, len(runs))
        took = self._row(runs, len(runs))
        self._launches[name_of(candidate)] = max(len(runs), min(MOST_LAUNCHES, int(SECONDS / took)))
        self._runs[name_of(candidate)] = runs

    def _runner(self, candidate: Candidate, given: Operands) -> Callable[[], Tensor]:
        if isinstance(candidate, str):
            return peer(self._problem, given)
        return call_of(candidate, self._problem, self._taken, given)

    def _row(self, runs: list[Callable[[], Tensor]], launches: int) -> float:
        with torch.cuda.device(self._device), torch.no_grad():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
            start.record()
            for at in range(launches):
                runs[at % len(runs)]()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / launches


def call_of(config: KernelConfig, problem: Problem, taken: Problem, given: Operands) -> Callable[[], Tensor]:
    """Returns a call of a kernel on some operands, without what decides and checks; its library is compiled here.

    Args:
        problem, taken: as in `EventTimer`.
    """
    library = kernels.library(kernels.unit_of(config))
    assert library is not None
    tensors = given.a, given.b, given.a_scale, given.b_scale, given.bias
    if isinstance(taken, GemmProblem):
        matrix = taken
        return lambda: launch.run_gemm(library, config, matrix, *tensors)
    assert isinstance(problem, ConvProblem)
    images, whole = problem, taken
    return lambda: launch.run_conv(library, config, images, whole, *tensors)


def _no_memory(error: Exception) -> TuningError:
    return TuningError(
        f"the device has too little memory for it: {str(error).splitlines()[0]}",
        do="free memory on it, or tune smaller batches",
    )
