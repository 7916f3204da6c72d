"""What DUO has outstanding between two steps, as it is saved: parameters before the look ahead, and gradients not used in full yet.

Invariant: all ranks save the same, so any of them may load it, among as many ranks as there may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from qsync_fx.communication.duo.pure import copied
from qsync_fx.communication.duo.replica import Replica, Use
from qsync_fx.communication.geometry import Piece
from qsync_fx.errors import OptionError


def saved(pending: Replica, use: Use, kept: Sequence[Tensor], pieces: Sequence[Piece]) -> dict[str, Any]:
    """Returns what `load` takes: a copy."""
    return {
        "step": pending.step,
        "weights": {piece.name: weight.clone() for piece, weight in zip(pieces, kept, strict=True)},
        "gradients": {pieces[place].name: gradient.clone() for place, gradient in pending.gradients.items()},
        "groups": copied(use.groups),
        "used": list(use.used),
        "factor": use.factor,
        "scale": use.scale,
        "scaled": use.scaled,
    }


def check_rank(state: Mapping[str, Any], rank: int, world: int) -> None:
    """Raises `OptionError` where a state is of another rank, or of one among more or fewer, which has other parts of parameters."""
    if (state.get("rank"), state.get("world")) != (rank, world):
        raise OptionError(
            f"the state is that of rank {state.get('rank')} of {state.get('world')}, whose optimizer has other parts of parameters than "
            f"that of rank {rank} of {world}",
            where="the state of DUO, sharded",
            do="go on among as many ranks, each with its own state; among others, flush before parameters are saved, and begin with a new "
            "optimizer, or with one that has loaded handle.whole_optimizer_state() before compress",
        )


def load(found: Mapping[str, Any], kept: Sequence[Tensor], pieces: Sequence[Piece]) -> Replica:
    """Writes the parameters before the look ahead into `kept`, and returns the gradients.

    Raises:
        OptionError: it is of another model.
    """
    weights, gradients = found["weights"], found["gradients"]
    for piece, weight in zip(pieces, kept, strict=True):
        if piece.name not in weights or weights[piece.name].shape != weight.shape:
            raise OptionError(
                "the state of DUO is of another model",
                where=f"{piece.name}, {list(weight.shape)}",
                do="load it into the same model",
            )
    for piece, weight in zip(pieces, kept, strict=True):
        weight.copy_(weights[piece.name])
    places = {piece.name: place for place, piece in enumerate(pieces)}
    pending = Replica(found["step"])
    pending.gradients = {places[name]: gradient.clone() for name, gradient in gradients.items()}
    pending.use = Use(copied(found["groups"]), list(found["used"]), found["factor"], found["scale"], found["scaled"])
    return pending
