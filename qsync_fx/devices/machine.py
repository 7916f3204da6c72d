"""Machine identity of a profile, and detection of huge pages on Linux.

Two machines compare equal if times measured on one apply to the other, as far as names, features,
threads and versions show.
"""

from __future__ import annotations

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
"""Environment setting, made before a process starts, by which glibc requests huge pages."""

_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True)
class HugePages:
    """Use of transparent huge pages, which speed up training on a CPU.

    The system's policy is "always", "madvise" (on request) or "never"; "" if unknown.
    """

    policy: str
    requested: bool
    available: bool

    @property
    def missing(self) -> bool:
        """Whether the process runs without huge pages and the setting would enable them."""
        return self.policy == "madvise" and self.available and not self.requested

    def __str__(self) -> str:
        by_policy = {
            "": "unknown",
            "always": "used for all processes of this system",
            "never": f"disabled on this system ({_POLICY})",
        }
        if self.policy in by_policy:
            return by_policy[self.policy]
        if self.requested:
            return "used: requested by this process"
        return f"not used; faster training: {SWITCH} python ..." if self.available else "not used"


def huge_pages() -> HugePages:
    """Return the state of the system and of this process."""
    try:
        text = _POLICY.read_text()
    except OSError:
        text = ""
    library = platform.libc_ver()
    if "malloc" in environment.text("LD_PRELOAD"):
        library = ("", "")  # a preloaded allocator ignores glibc's setting
    return of(text, environment.text("GLIBC_TUNABLES"), library)


def of(policy: str, tunables: str, library: tuple[str, str]) -> HugePages:
    """Return the state described by the policy file, GLIBC_TUNABLES and the C library."""
    chosen = policy.partition("[")[2].partition("]")[0]
    name, version = library
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    # The last of repeated settings is active; 2 requests reserved pages.
    settings = dict(setting.partition("=")[::2] for setting in tunables.split(":"))
    available = name == "glibc" and parts >= (2, 35)
    requested = available and settings.get("glibc.malloc.hugetlb") in ("1", "2")
    return HugePages(chosen, requested, available)


_PREDICTED = ", predicted"


@dataclass(frozen=True)
class Machine:
    """Device and library versions that a profile belongs to.

    `features` are instruction sets or the compute capability; torch computes with `threads`.
    """

    device: str
    name: str
    features: list[str]
    threads: int
    torch: str
    qsync_fx: str

    def check(self, current: Machine) -> None:
        """Raise `ProfileError` if this machine differs from `current`."""
        differing = [
            f"{name} {_listed(stored)}, here {_listed(getattr(current, name))}"
            for name, stored in vars(self).items()
            if stored != getattr(current, name)
        ]
        if differing:
            message = f"the profile was measured on another machine: {'; '.join(differing)}"
            accept = "accept the profile with any_machine=True (qsync replay: --any-machine)"
            raise ProfileError(message, do=f"measure on this machine, or {accept}")

    @property
    def predicted(self) -> bool:
        """Whether this is a device of the catalog with predicted instead of measured times."""
        return self.name.endswith(_PREDICTED)

    def stands_for(self, device: Device) -> bool:
        """Return whether a profile of this machine was predicted for a device of the catalog."""
        return self.predicted and self.name == of_catalog(device).name


def this_machine(device: torch.device | str = "cpu") -> Machine:
    """Return the machine of this process: its CPU, or its GPU for a CUDA device."""
    device = torch.device(device)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        features = [f"compute capability {major}.{minor}"]
        # One thread queues kernels, regardless of the number of CPU threads.
        return _machine("cuda", torch.cuda.get_device_name(device), features, 1)
    processor = cpu()
    return _machine("cpu", processor.model, list(processor.features), torch.get_num_threads())


def of_catalog(device: Device) -> Machine:
    """Return the machine of profiles that are predicted for a device of the catalog."""
    kind = "cuda" if device.kind == "gpu" else "cpu"
    return _machine(kind, f"{device.title}{_PREDICTED}", [], 1)


def _machine(device: str, name: str, features: list[str], threads: int) -> Machine:
    return Machine(device, name, features, threads, torch.__version__, qsync_fx.__version__)


def here_for(machine: Machine) -> Machine:
    """Return the local machine of the same kind: its GPU for a GPU, if any; else its CPU."""
    if machine.device == "cuda" and torch.cuda.is_available():
        return this_machine("cuda")
    return this_machine()


def _listed(value: object) -> str:
    if not isinstance(value, list):
        return str(value)
    return " ".join(map(str, value)) or "none"
