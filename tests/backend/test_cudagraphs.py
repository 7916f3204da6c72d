"""The option "cudagraphs" and torch's equivalent mode: parsing, errors for other modes, and a
warning on devices without CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import qsync_fx
from qsync_fx.backend import compile as compiling
from qsync_fx.backend.entry import options_of
from qsync_fx.backend.inductor import inductor_config
from qsync_fx.options import Options

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def test_the_mode_is_the_option() -> None:
    assert (
        options_of({"mode": "reduce-overhead"})
        == Options(cudagraphs=True)
        == options_of({"options": {"cudagraphs": True}})
    )


@pytest.mark.parametrize(
    "mode", ["max-autotune", "max-autotune-no-cudagraphs", "reduce_overhead", 3]
)
def test_other_modes_are_refused_by_name(mode: Any) -> None:
    with pytest.raises(qsync_fx.OptionError) as raised:
        options_of({"mode": mode})
    assert f"has no mode {str(mode)!r}" in str(raised.value) and "reduce-overhead" in str(
        raised.value.do
    )


def test_cudagraphs_are_enabled_on_cuda_only() -> None:
    wanted = Options(cudagraphs=True)
    assert inductor_config.captures(wanted, CUDA) and not inductor_config.captures(Options(), CUDA)
    assert inductor_config.inductor(CUDA, True) == {
        "triton.cudagraphs": True
    } and "triton.cudagraphs" not in inductor_config.inductor(CUDA)
    with pytest.warns(qsync_fx.PlanWarning, match='"cudagraphs" has no effect on cpu'):
        assert not inductor_config.captures(wanted, CPU)


def test_a_graph_is_compiled_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The option passes from torch.compile to the inner compiler."""
    flags: list[bool] = []
    inner = compiling.inner_compiler

    def watched(
        name: str, device: torch.device, fast_dropout: bool, cudagraphs: bool, **others: bool
    ) -> Any:
        flags.append(cudagraphs)
        return inner("eager", device)

    monkeypatch.setattr(compiling, "inner_compiler", watched)
    monkeypatch.setattr(inductor_config, "captures", lambda options, device: options.cudagraphs)
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    for keywords in ({"mode": "reduce-overhead"}, {"options": {"cudagraphs": True}}, {}):
        torch.compiler.reset()
        torch.compile(model, backend="qsync", **keywords)(x)  # type: ignore[call-overload]
    assert flags == [True, True, False]


def test_seed_is_drawn_outside_the_cuda_graph() -> None:
    assert torch.Tag.cudagraph_unsafe in torch.ops.qsync.draw.default.tags
