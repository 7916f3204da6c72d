"""Where a profile was taken, so that it is not taken for one of another place.

Invariant: two machines are equal where times measured on one hold on the other, as far as can be told from their names.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

import qsync_fx
from qsync_fx.devices.processor import cpu
from qsync_fx.errors import ProfileError


@dataclass(frozen=True)
class Machine:
    """A device and the libraries that run there.

    Attributes:
        device: its type.
        name: as the system calls it.
        features: the instruction sets that matter here.
        threads: that torch computes with.
        torch, qsync_fx: versions.
    """

    device: str
    name: str
    features: list[str]
    threads: int
    torch: str
    qsync_fx: str

    def check(self, here: Machine) -> None:
        """Raises `ProfileError` where this is another machine than `here`."""
        both = ((part.name, getattr(self, part.name), getattr(here, part.name)) for part in dataclasses.fields(self))
        differing = [f"{name} {_said(there)}, here {_said(now)}" for name, there, now in both if there != now]
        if differing:
            raise ProfileError(
                f"it was measured on another machine: {'; '.join(differing)}",
                do="measure here, or take it as it is with any_machine=True",
            )


def this_machine() -> Machine:
    """Returns the processor at hand, and what runs on it."""
    processor = cpu()
    return Machine(
        "cpu",
        processor.model,
        list(processor.features),
        torch.get_num_threads(),
        torch.__version__,
        qsync_fx.__version__,
    )


def _said(value: object) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
