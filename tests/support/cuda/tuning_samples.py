"""Problems, candidates and recorded timings for the tests of the tuner."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from qsync_fx.backend.cuda.kernel_config import KernelConfig
from qsync_fx.backend.cuda.problem import ConvProblem, GemmProblem, Problem
from qsync_fx.backend.cuda.tuning import RECORDING, Environment, RecordedTimer, TimingRecording

INT8 = GemmProblem(4096, 4096, 4096, "int8", "int8", "bf16", a_scale="tensor", b_scale="tensor")
BF16 = replace(INT8, a="bf16", b="bf16", a_scale="none", b_scale="none")
CONV = ConvProblem(
    "fprop", 32, 28, 28, 64, 64, 3, 3, (1, 1), (1, 1), (1, 1), "int8", "int8", "bf16"
)
HERE = Environment("NVIDIA H200", "570.86", "13.0", "2.13.0", "4.2.0", 1)


def configs(count: int) -> list[KernelConfig]:
    return [
        KernelConfig("gemm", "sm_80", "int8", "int8", "bf16", (128, 128, 64), stages=3 + index)
        for index in range(count)
    ]


def timer(*seconds: list[float] | None) -> tuple[list[KernelConfig], RecordedTimer]:
    """Return candidates and their timer; the first list is torch's seconds, None is a failing
    candidate.
    """
    candidates = configs(len(seconds) - 1)
    names = ["torch", *(config.name for config in candidates)]
    return candidates, RecordedTimer(
        {name: s for name, s in zip(names, seconds, strict=True) if s is not None}
    )


def recording(timings: dict[Problem, dict[str, list[float]]]) -> TimingRecording:
    return TimingRecording(HERE, "sm_90a", timings)


def problem_from(fields: dict[str, Any]) -> Problem:
    """Return the problem of a recording from its fields."""
    head = {"format": RECORDING.name, "version": 1, "environment": asdict(HERE), "arch": "sm_80"}
    rows = [{"problem": fields, "seconds": {}}]
    return RECORDING.decode(json.dumps({**head, "timings": rows})).timings[0].problem
