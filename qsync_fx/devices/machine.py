"""Where a profile was taken, so that it is not taken for one of another place.

Invariant: two machines are equal where times measured on one hold on the other, as far as can be told from their names.

Whether what a process allocates lies in huge pages, which training on a CPU is faster with.

Invariant: it looks and changes nothing, and says nothing of systems whose files are not Linux's.
"""

from __future__ import annotations

import dataclasses
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

import qsync_fx
from qsync_fx import environment
from qsync_fx.devices.cpu_features import cpu
from qsync_fx.devices.device_model import Device
from qsync_fx.errors import ProfileError

SWITCH = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
"""What has glibc ask for huge pages: in the environment of a process before it starts."""

_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SINCE = (2, 35)
"""The glibc that knows the switch first."""


@dataclass(frozen=True)
class HugePages:
    """What the system does, and what this process asks it for.

    Attributes:
        policy: of transparent huge pages: "always", "madvise" (those who ask have them) or "never"; "" where it cannot be known.
        asked: whether this process asks for them.
        can_ask: whether its C library is one that the switch is for.
    """

    policy: str
    asked: bool
    can_ask: bool

    @property
    def missing(self) -> bool:
        """Whether the process has none and would have them for the switch."""
        return self.policy == "madvise" and not self.asked and self.can_ask

    def __str__(self) -> str:
        if not self.policy:
            return "unknown"
        if self.policy == "always":
            return "used, by this system for all processes"
        if self.policy == "never":
            return "none: this system has them switched off (/sys/kernel/mm/transparent_hugepage/enabled)"
        if self.asked:
            return "used: this process asks for them"
        return f"not used: {SWITCH} python ... trains faster" if self.can_ask else "not used"


def huge_pages() -> HugePages:
    """Looks at the system and this process."""
    try:
        text = _POLICY.read_text()
    except OSError:
        text = ""
    # Another allocator that is loaded first does as it likes.
    is_libc_malloc = "malloc" not in environment.text("LD_PRELOAD")
    return of(
        text,
        environment.text("GLIBC_TUNABLES"),
        platform.libc_ver() if is_libc_malloc else ("", ""),
    )


def of(policy: str, tunables: str, library: tuple[str, str]) -> HugePages:
    """Reads what a system says of itself.

    Args:
        policy: the file of transparent huge pages, which has the one that holds in brackets.
        tunables: GLIBC_TUNABLES of the process: settings between colons.
        library: name and version of the C library that allocates.
    """
    chosen = policy.partition("[")[2].partition("]")[0]
    name, version = library
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    # Of a setting that stands twice the last one holds; 2 asks for pages that are set aside.
    settings = dict(setting.partition("=")[::2] for setting in tunables.split(":"))
    available = name == "glibc" and parts >= _SINCE
    return HugePages(
        chosen, available and settings.get("glibc.malloc.hugetlb") in ("1", "2"), available
    )


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

    def check(self, current: Machine) -> None:
        """Raises `ProfileError` where this is another machine than `here`."""
        both = (
            (part.name, getattr(self, part.name), getattr(current, part.name))
            for part in dataclasses.fields(self)
        )
        differing = [
            f"{name} {_said(existing)}, here {_said(now)}"
            for name, existing, now in both
            if existing != now
        ]
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
        return Machine(
            "cuda",
            torch.cuda.get_device_name(device),
            features,
            1,
            torch.__version__,
            qsync_fx.__version__,
        )
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
    return Machine(
        kind, f"{device.title}{_RECKONED}", [], 1, torch.__version__, qsync_fx.__version__
    )


def here_for(machine: Machine) -> Machine:
    """Returns what is at hand of the kind of another machine: the GPU for one of a GPU, where there is any."""
    return this_machine(
        machine.device if machine.device == "cuda" and torch.cuda.is_available() else "cpu"
    )


def _said(value: object) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
