"""State of the rounding stream: it follows the states of torch's generator, and has its own state
to save and load.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import Tensor, manual_seed  # manual_seed by name, before qsync_fx wraps it

import qsync_fx
from tests.support.computing.rounding_steps import started
from tests.support.models.small_models import assert_equal

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


# States of torch's generator.


def _through_a_file(state: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save({"torch": state}, file)
    file.seek(0)
    loaded: Tensor = torch.load(file, weights_only=True)["torch"]
    return loaded


@pytest.mark.parametrize(
    "copy_state",
    [lambda state: state, copy.deepcopy, _through_a_file],
    ids=["itself", "copy", "file"],
)
def test_a_state_that_is_set_back_brings_the_rounding_back(
    copy_state: Callable[[Tensor], Tensor],
) -> None:
    step = started()
    manual_seed(3)
    step()
    state = copy_state(torch.get_rng_state())
    second = step()
    manual_seed(9)
    step()
    torch.set_rng_state(state)
    assert_equal(second, step())


def test_a_state_that_knows_no_place_leaves_the_stream_where_it_is() -> None:
    """Check that a state without a stream position does not reset the stream, which would repeat
    roundings: Dynamo restores clones of states when it compiles.
    """
    step = started()
    manual_seed(3)
    step()
    before = qsync_fx.rounding_stream.state_dict()
    state = torch.get_rng_state().clone()
    step()
    torch.set_rng_state(state)
    assert qsync_fx.rounding_stream.state_dict() == {**before, "draws": before["draws"] + 1}


def test_a_fork_leaves_no_trace() -> None:
    step = started()
    manual_seed(3)
    step()
    before = qsync_fx.rounding_stream.state_dict()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12)
        first = step()
        torch.manual_seed(12)
        assert_equal(first, step())
    assert qsync_fx.rounding_stream.state_dict() == before


def test_states_equal_torch() -> None:
    state, generator_state = torch.get_rng_state(), torch.default_generator.get_state()
    assert type(state) is type(generator_state)
    assert torch.equal(state, generator_state)
    assert torch.manual_seed(1) is torch.default_generator
    assert torch.random.default_generator.device == torch.default_generator.device


# The stream's own state.


def test_state_from_json_resumes_bit_equal() -> None:
    step = started()
    manual_seed(3)
    step()
    saved = json.dumps(qsync_fx.rounding_stream.state_dict())
    second, third = step(), step()
    torch.seed()
    qsync_fx.rounding_stream.load_state_dict(json.loads(saved))
    assert_equal(second, step())
    assert_equal(third, step())


@pytest.mark.parametrize("loaded_first", [True, False])
def test_it_does_not_matter_whether_torch_s_state_is_set_before_or_after(
    loaded_first: bool,
) -> None:
    step = started()
    manual_seed(3)
    step()
    torch_state, saved = torch.get_rng_state().clone(), qsync_fx.rounding_stream.state_dict()
    second = step()
    torch.seed()
    if loaded_first:
        qsync_fx.rounding_stream.load_state_dict(saved)
    torch.set_rng_state(torch_state)
    if not loaded_first:
        qsync_fx.rounding_stream.load_state_dict(saved)
    assert_equal(second, step())


def test_seeding_after_a_state_was_set_wins() -> None:
    step = started()
    manual_seed(3)
    first = step()
    qsync_fx.rounding_stream.load_state_dict({"seed": 8, "draws": 5})
    manual_seed(3)
    assert_equal(first, step())


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [1],
        {},
        {"seed": 1},
        {"seed": 1, "draws": -1},
        {"seed": 1.5, "draws": 1},
        {"seed": 1, "draws": True},
    ],
)
def test_invalid_state_is_rejected_without_effect(wrong: Any) -> None:
    before = qsync_fx.rounding_stream.state_dict()
    with pytest.raises(qsync_fx.QSyncError, match="rounding stream") as caught:
        qsync_fx.rounding_stream.load_state_dict(wrong)
    assert caught.value.where
    assert caught.value.do
    assert qsync_fx.rounding_stream.state_dict() == before
