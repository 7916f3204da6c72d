"""State of qsync_fx for torch.distributed.checkpoint: rounding stream, compression, and plan.

Invariant: with this state, the model and the optimizer, training continues bit by bit on as many
ranks as before.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from qsync_fx.communication.compressor_state import CompressorHandle
from qsync_fx.errors import OptionError
from qsync_fx.plan import Plan
from qsync_fx.plan.cluster_plan import this_process
from qsync_fx.plan_switching import options_of, switch_plan
from qsync_fx.rounding import rounding_stream


class TrainingState(Stateful):
    """Everything of qsync_fx that a checkpoint needs besides model and optimizer.

    `dcp.save({"model": ..., "optimizer": ..., "qsync": TrainingState(model, handle)})` on all
    ranks, and the same with `dcp.load`. It also suits Accelerate's `register_for_checkpointing`.

    Each rank saves its own state: the position of the rounding stream, error feedback and streams
    of gradient compression, and the active plan, unless compiled parts of the model have several.
    A load activates the saved plan. To load on more ranks than before, use
    `DefaultLoadPlanner(allow_partial_load=True)`: additional ranks start with a state of their own.

    Args:
        model: the trained model, compiled or not.
        compression: the result of `qsync_fx.distributed.compress`.
    """

    def __init__(self, model: nn.Module, compression: CompressorHandle | None = None) -> None:
        self._model, self._compression = model, compression

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank as bytes, under the name of the rank.

        Distributed checkpoints store equal names once, and restore only names that exist before a
        load, but error feedback exists only after a step. So names contain the rank, and the state
        is one value.
        """
        file = io.BytesIO()
        plans = {options.plan for options in options_of(self._model)}
        plan = plans.pop() if len(plans) == 1 else None
        state = {
            "rounding": rounding_stream.state_dict(),
            "plan": None if plan is None else plan.to_json(),
            "compression": None if self._compression is None else self._compression.state_dict(),
        }
        torch.save(state, file)
        return {_name(): file.getvalue()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of this rank.

        Raises:
            OptionError: the state lacks this rank, or belongs to another codec or model.
            PlanError: the saved plan cannot be read.
        """
        name = _name()
        if name not in state_dict:
            raise OptionError(
                f"the checkpoint has no state of {name}, only of {', '.join(state_dict)}",
                where="qsync_fx.distributed.TrainingState.load_state_dict",
                do="resume with as many ranks as before, or without this state",
            )
        state = torch.load(io.BytesIO(state_dict[name]), weights_only=True)
        if state["plan"] is not None and options_of(self._model):
            switch_plan(self._model, Plan.from_json(state["plan"]))
        if self._compression is not None and state["compression"] is not None:
            self._compression.load_state_dict(state["compression"])
        rounding_stream.load_state_dict(state["rounding"])


def _name() -> str:
    return f"rank{this_process().rank or 0}"
