"""Selection of a kernel, a kernel after padding, or torch for a product; tuned or untuned, on
simulated devices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from test_cuda_launch import CPU, config

from qsync_fx.backend.cuda.kernel_config import Arch, KernelConfig
from qsync_fx.backend.cuda.problem import Problem, padding
from qsync_fx.backend.cuda.runtime.device_state import assumed, decision, forget
from qsync_fx.backend.cuda.selection import candidates
from qsync_fx.backend.cuda.selection.select import KernelDecision, decide
from qsync_fx.backend.cuda.tuning import Environment, TunedChoice, TuningTable
from qsync_fx.devices import support
from qsync_fx.formats import FORMATS
from tests.support.cuda.large_products import BF16, INT8


def configs(count: int) -> tuple[KernelConfig, ...]:
    return tuple(replace(config(INT8), out="bf16", stages=3 + index) for index in range(count))


def aligned_only(problem: Problem, arch: Arch) -> tuple[KernelConfig, ...]:
    return configs(2) if padding.filled(problem) == problem and problem.a == "int8" else ()


def chosen(
    problem: Problem, choice: TunedChoice | None = None, arch: Arch = "sm_80"
) -> KernelDecision:
    environment = Environment("", "", "", "", "", 1)
    table = None if choice is None else TuningTable(environment, {choice.problem: choice})
    return decide(problem, arch, table, aligned_only)


FIRST, SECOND = configs(2)


def test_untuned_products_of_quantized_operands_go_to_kernels() -> None:
    """Check that kernels are preferred, because torch would convert the operands first."""
    for problem in (INT8, replace(INT8, m=128), replace(INT8, k=128, m=2**20)):
        selected = chosen(problem)
        assert (
            selected.config == FIRST
            and selected.problem == problem
            and selected.reason == "not tuned"
        )


def test_odd_sizes_are_filled_up_or_left_to_torch() -> None:
    selected = chosen(replace(INT8, k=4095))
    assert selected.config == FIRST and selected.problem == INT8 and "copied" in selected.reason
    assert "costs more" in chosen(replace(INT8, k=3)).reason
    none = chosen(BF16)
    assert none.config is None and none.problem == BF16 and "sm_80 has no kernel" in none.reason


def test_tuned_choice_is_used() -> None:
    times = {"torch": 3.0, FIRST.name: 2.0, SECOND.name: 1.0}
    assert (
        chosen(INT8, TunedChoice(INT8, SECOND.name, times, faster_than_bf16=True)).config == SECOND
    )
    assert chosen(replace(INT8, m=4001), TunedChoice(INT8, SECOND.name, times)).config == SECOND
    torch_wins = chosen(INT8, TunedChoice(INT8, "torch", times))
    assert torch_wins.config is None and torch_wins.integers
    slower = chosen(INT8, TunedChoice(INT8, SECOND.name, times, faster_than_bf16=False))
    assert slower.config is None and not slower.integers and "no faster than bf16" in slower.reason
    on_t4 = chosen(
        INT8, TunedChoice(INT8, SECOND.name, times, faster_than_bf16=False), arch="sm_75"
    )
    assert on_t4.config is None and "no faster than fp16" in on_t4.reason


def test_missing_tuned_kernel_falls_back_to_the_next_best() -> None:
    times = {"torch": 3.0, "gone": 1.0, FIRST.name: 2.0}
    assert chosen(INT8, TunedChoice(INT8, "gone", times)).config == FIRST
    assert (
        chosen(INT8, TunedChoice(INT8, "gone", {"torch": 1.5, "gone": 1.0, FIRST.name: 2.0})).config
        is None
    )


def test_candidates_support_the_layers() -> None:
    """Check the real candidates: every product of a large INT8 layer has a kernel or a reason on
    every architecture.
    """
    backward = replace(BF16, out="fp32", b_major="row")
    for arch in get_args(Arch):
        for problem in (INT8, BF16, backward, replace(backward, a_major="column")):
            selected = decide(problem, arch)
            assert selected.reason and (selected.config is None or selected.config.arch == arch)
        assert decide(INT8, arch).config is not None


def test_selection_needs_no_gpu() -> None:
    device = torch.device("cuda", 3)
    with assumed("sm_90a"):
        assert (selected := decision(INT8, device).config) is not None and selected.arch == "sm_90a"
        assert decision(INT8, CPU).config is None
    with assumed(None):
        assert decision(INT8, device).reason == "the device is assumed to have no kernels"
    assert decision(INT8, CPU).reason == "cpu has no kernels"


def test_kernels_make_formats_native() -> None:
    device = torch.device("cuda", 0)
    with assumed("sm_90a"):
        supports = {name: support(device, row) for name, row in FORMATS.items()}
        assert [name for name, s in supports.items() if s.kind == "simulated"] == ["fp8_e5m2"]
        assert (
            "CUTLASS kernels for sm_90a" in supports["fp8"].reason
            and "qsync_fx has no kernel" in supports["fp8_e5m2"].reason
        )
    with assumed("sm_75"):
        assert (
            support(device, FORMATS["int8"]).kind == "native"
            and support(device, FORMATS["fp8"]).kind == "simulated"
        )
        assert "no tf32 unit" in support(device, FORMATS["tf32"]).reason


def test_a_candidate_of_a_user_is_chosen_when_it_was_tuned() -> None:
    mine = candidates.add(replace(candidates.candidates(INT8, "sm_80")[0], stages=3))
    try:
        choice = TunedChoice(INT8, mine.name, {"torch": 2.0, mine.name: 1.0})
        assert (
            decide(
                INT8, "sm_80", TuningTable(Environment("", "", "", "", "", 1), {INT8: choice})
            ).config
            == mine
        )
    finally:
        candidates.remove(mine)


def test_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSYNC_KERNELS", "off")
    forget()
    try:
        selected = decision(INT8, torch.device("cuda", 0))
        assert selected.config is None and "QSYNC_KERNELS" in selected.reason
    finally:
        monkeypatch.undo()
        forget()
