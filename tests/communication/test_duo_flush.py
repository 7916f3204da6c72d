"""Warning of DUO if training ends with an outstanding lookahead step, and none otherwise."""

from __future__ import annotations

import gc
import warnings

import pytest

from qsync_fx.communication.duo.optimizer_steps import Outstanding


class Training:
    pass


def test_exit_with_an_outstanding_step_has_a_remedy() -> None:
    def ends() -> None:
        training = Training()
        Outstanding(training, 1).step = 3
        del training
        gc.collect()

    with pytest.warns(
        UserWarning, match=r"rank 1: .* step 3 .* a lookahead step. Call handle.flush\(\)"
    ):
        ends()


def test_exit_without_an_outstanding_step_is_silent() -> None:
    training = Training()
    outstanding = Outstanding(training, 0)
    outstanding.step = 3
    outstanding.step = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del training
        gc.collect()
