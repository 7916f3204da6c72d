"""Where a profile was taken, so that it is not taken for one of another place.

Invariant: two machines are equal where times measured on one hold on the other, as far as can be told from their names.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

import qsync_fx
from qsync_fx.devices.device import Device
from qsync_fx.devices.processor import cpu
from qsync_fx.errors import ProfileError

_RECKONED = ", reckoned"


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
                do="measure here, or take it as it is with any_machine=True (qsync replay: --any-machine)",
            )

    @property
    def reckoned(self) -> bool:
        """Whether it is a device of the catalog, of which nothing was measured."""
        return self.name.endswith(_RECKONED)

    def stands_for(self, device: Device) -> bool:
        """Whether what is of this machine was reckoned for a device of the catalog."""
        return self.reckoned and self.name == of_catalog(device).name


def this_machine(device: torch.device | str = "cpu") -> Machine:
    """Returns the processor at hand, or its GPU, and what runs on it."""
    device = torch.device(device)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        features = [f"compute capability {major}.{minor}"]
        # However many threads the processor has, one queues.
        return Machine("cuda", torch.cuda.get_device_name(device), features, 1, torch.__version__, qsync_fx.__version__)
    processor = cpu()
    return Machine(
        "cpu",
        processor.model,
        list(processor.features),
        torch.get_num_threads(),
        torch.__version__,
        qsync_fx.__version__,
    )


def of_catalog(device: Device) -> Machine:
    """Returns the machine that a profile which is reckoned for a device of the catalog is of."""
    kind = "cuda" if device.kind == "gpu" else "cpu"
    return Machine(kind, f"{device.title}{_RECKONED}", [], 1, torch.__version__, qsync_fx.__version__)


def here_for(machine: Machine) -> Machine:
    """Returns what is at hand of the kind of another machine: the GPU for one of a GPU, where there is any."""
    return this_machine(machine.device if machine.device == "cuda" and torch.cuda.is_available() else "cpu")


def _said(value: object) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
