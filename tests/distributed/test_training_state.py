"""Bit-identical resumption of training from a distributed checkpoint with `TrainingState`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import qsync_fx
from qsync_fx import OptionError, Plan
from qsync_fx.distributed import TrainingState
from qsync_fx.plan_switching import options_of
from tests.support.compiling.switched import NOT_FOLLOWED
from tests.support.models.small_models import Perceptron, build, compiled
from tests.support.processes import ranks

pytestmark = NOT_FOLLOWED
torch.set_num_threads(1)


def train(model: Any, steps: int) -> list[float]:
    generator, losses = torch.Generator().manual_seed(5), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_one_process_resumes_with_plan_and_rounding_stream(tmp_path: Path) -> None:
    network = build(Perceptron)
    model = compiled(network, precision="bf16")
    train(model, 2)
    plan = Plan("int8", [("head", "bf16")])
    qsync_fx.switch_plan(model, plan)
    states = {"model": network.state_dict(), "qsync": TrainingState(model)}
    dcp.save(states, checkpoint_id=tmp_path, no_dist=True)
    expected = train(model, 3)

    torch._dynamo.reset()
    torch.manual_seed(8)
    again = build(Perceptron, seed=1)
    model = compiled(again, precision="fp32")
    states = {"model": again.state_dict(), "qsync": TrainingState(model)}
    dcp.load(states, checkpoint_id=tmp_path, no_dist=True)
    assert options_of(model)[0].plan == plan
    assert train(model, 3) == expected


def test_error_feedback_of_each_rank_is_restored(tmp_path: Path) -> None:
    for result in ranks.results("resume", 2, tmp_path / "ranks", script="checkpoint_rank.py"):
        assert result["equal"] == [True] * 4
        assert result["plan"]


def test_a_model_that_is_not_compiled_has_no_plan() -> None:
    state = TrainingState(nn.Linear(2, 2))
    state.load_state_dict(state.state_dict())


def test_the_state_of_another_rank_is_an_error() -> None:
    state = TrainingState(nn.Linear(2, 2))
    with pytest.raises(OptionError, match="no state of rank0, only of rank7"):
        state.load_state_dict({"rank7": b""})
