"""What a device offers each number format.

Invariant: one answer per (device, format), with a reason, and everybody asks here: the passes, the lowered operators, the report and
`qsync doctor`. A format that this table does not name is simulated, exactly, so that a new format needs no line here.

As what a device counts: what it is, or a GPU that is assumed in its place; and who knows of kernels for it.

Invariant: whoever asks for a compute capability asks here, so that all that is decided for an assumed GPU is decided for the same one.

From the precision that a plan asks for to the one that runs.

Invariant: the answer differs from the plan only for a reason that is returned with it, so nothing is lost silently.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import torch

from qsync_fx.devices.cpu_features import (
    cpu,
    cpu_multiplies_integers,
    native_bf16_unit,
    native_integer_unit,
    wrong_path,
)
from qsync_fx.errors import DeviceError
from qsync_fx.formats import FP32, Precision, encoding, precision, promoted
from qsync_fx.ops.spec import OperatorRow


@dataclass(frozen=True)
class Kernels:
    """Whether there are kernels of ours for a CUDA device.

    Attributes:
        arch: what they are compiled for; None where there are none.
        reason: why not.
        formats: names of the encodings that they multiply with themselves.
        capability: of a device that is assumed and not there; None for one that torch knows.
    """

    arch: str | None
    reason: str
    formats: frozenset[str] = frozenset()
    capability: tuple[int, int] | None = None


def _not_loaded(device: torch.device) -> Kernels:
    return Kernels(None, "the backend is not loaded")


class Offer:
    """Who knows of kernels: the backend, which stands above this module and says so when it is imported."""

    kernels: Callable[[torch.device], Kernels] = staticmethod(_not_loaded)
    forget: tuple[Callable[[], object], ...] = ()


target: ContextVar[tuple[str, tuple[int, int]] | None] = ContextVar("qsync_target", default=None)
"""The type of devices that count as another, and its compute capability."""


def target_of(device: torch.device) -> tuple[int, int] | None:
    """Returns the compute capability that a device counts as having; None where it counts as what it is."""
    result = target.get()
    return result[1] if result is not None and result[0] == device.type else None


ANY = (99, 0)
"""The capability of a device that is no GPU, and compiles everything."""


def capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of a CUDA device, or the one that a device counts as having."""
    assumed = target_of(device) or (
        Offer.kernels(device).capability if device.type != "meta" else None
    )
    if assumed is not None:
        return assumed
    return (
        torch.cuda.get_device_capability(device)
        if device.type == "cuda" and torch.cuda.is_available()
        else ANY
    )


@contextlib.contextmanager
def standing_for(device: torch.device) -> Iterator[None]:
    """Lets tensors without values (of the type "meta") count as ones of `device`."""
    token = target.set(("meta", result)) if (result := capability(device)) != ANY else None
    try:
        yield
    finally:
        if token is not None:
            target.reset(token)


CUDA_SINCE = {
    "fp16": (7, 0),
    "int8": (7, 5),
    "bf16": (8, 0),
    "tf32": (8, 0),
    "fp8": (8, 9),
    "fp8_e5m2": (8, 9),
}
"""Compute capability whose tensor cores first have the values of a format, by its `encoding` (NVIDIA's architecture whitepapers)."""

_COMPILED_SINCE = {"bf16": (8, 0)}
"""Compute capability below which Inductor compiles no graph that holds a format, by its name (torch 2.11 to 2.15)."""

_INSTEAD = {"bf16": "fp16"}
"""What stands in for a format that a device does not compile."""

_EVERYWHERE = ("fp64", "fp32")


@dataclass(frozen=True)
class Support:
    """How a device runs a format.

    Attributes:
        how: "native": its own unit; "simulated": the format's exact numerics on another unit; "substituted": another format.
        runs_as: the format that runs: the one asked for, unless substituted.
        reason: one clause, for reports.
    """

    how: Literal["native", "simulated", "substituted"]
    runs_as: Precision
    reason: str


def offer(kernels: Callable[[torch.device], Kernels], *forgets: Callable[[], object]) -> None:
    """Lets `support` ask `kernels` for what there is for a CUDA device; what it has answered before is forgotten.

    `forgets` are called where answers of the backend's own do not hold any longer.
    """
    Offer.kernels, Offer.forget = staticmethod(kernels), forgets
    forget()


@functools.cache
def support(device: torch.device, fmt: Precision, exact: bool = False) -> Support:
    """Returns how `device` runs `fmt`; `exact` forbids substitution.

    Raises:
        DeviceError: qsync_fx does not run on this type of device.
    """
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(
            f"qsync_fx does not run on device type {device.type!r}",
            where=f"device {device}",
            do="move the model to the CPU or to a CUDA device",
        )
    if fmt.name in _EVERYWHERE:
        return Support("native", fmt, f"{fmt} runs everywhere")
    gpu = device.type == "cuda" or Offer.kernels(device).capability is not None
    return _cuda(device, fmt, exact) if gpu else _cpu(fmt, exact)


def compiles(device: torch.device, fmt: Precision) -> bool:
    """Whether graphs that hold values of a plain format are compiled for a device; Dynamo runs others as they are, without a plan."""
    return _compiled_at(capability(device), fmt)


def _compiled_at(capability: tuple[int, int], fmt: Precision) -> bool:
    return fmt.name not in _COMPILED_SINCE or capability >= _COMPILED_SINCE[fmt.name]


def row_on(device: torch.device, fmt: Precision) -> Precision:
    """Returns a format's row as it is on a device: carrier, output, gradient, and what runs elsewhere are formats that it compiles.

    On GPUs before Ampere (V100, T4) they are FP16 and not BF16. FP16 holds the values of the 8-bit floats, but not their sums: those are
    carried in FP32 there.
    """
    return row_at(capability(device), fmt)


def row_at(capability: tuple[int, int], fmt: Precision) -> Precision:
    """Returns a format's row as it is on GPUs of a compute capability, as `row_on` does."""
    return (
        fmt
        if all(_compiled_at(capability, precision(name)) for name in _INSTEAD)
        else _without(fmt)
    )


@functools.cache
def _without(fmt: Precision) -> Precision:
    wide = fmt.scaled and fmt.kind == "float"

    def instead(other: Precision) -> Precision:
        return precision(_INSTEAD.get(other.name, other))

    return dataclasses.replace(
        fmt,
        carrier=FP32 if wide else instead(fmt.carrier),
        output=instead(fmt.output),
        gradient=instead(fmt.gradient),
        elsewhere=instead(fmt.elsewhere),
    )


def forget() -> None:
    """Drops what has been answered, of devices that are assumed no longer."""
    for clear in (support.cache_clear, *Offer.forget):
        clear()


def default_precision(device: torch.device) -> Precision:
    """Returns what runs when the user asks for nothing: BF16 where the device has it, else FP32."""
    bf16 = precision("bf16")
    return bf16 if support(device, bf16).how == "native" else FP32


def _cpu(fmt: Precision, exact: bool) -> Support:
    if fmt.name == "bf16":
        if native_bf16_unit():
            return Support("native", fmt, "this CPU computes BF16 through oneDNN")
        return Support(
            "simulated", fmt, "this CPU has no BF16 unit: values are converted to FP32 and back"
        )
    if fmt.name == "fp16":
        if exact:
            return Support("simulated", fmt, "PyTorch computes FP16 on the CPU exactly and slowly")
        return Support(
            "substituted",
            precision("bf16"),
            "FP16 runs as BF16 on the CPU, which has no FP16 unit (emulate_unsupported=True forbids it)",
        )
    if encoding(fmt).name == "int8":
        return _integers(fmt)
    return Support(
        "simulated",
        fmt,
        f"the CPU has no {fmt} unit: its exact values are computed in {fmt.carrier}",
    )


def _integers(fmt: Precision) -> Support:
    if (wrong := wrong_path()) is not None:
        return Support(
            "simulated",
            fmt,
            f"{wrong.where} is wrong, and whatever computes in {fmt} fails: {wrong.what}",
        )
    if native_integer_unit():
        return Support(
            "native",
            fmt,
            "this CPU has a unit for INT8; convolutions use it where their channels are many, "
            "others run exactly in BF16",
        )
    if not cpu_multiplies_integers():
        return Support(
            "simulated",
            fmt,
            "this CPU's INT8 unit saturates sums (it has no VNNI): exact values are computed in FP32",
        )
    # That sums are exact says nothing of a unit: what has none may be exact, too.
    if {"vnni", "amx"}.intersection(cpu().features):
        return Support(
            "native",
            fmt,
            "oneDNN has a unit for INT8 and the native module's path has none; convolutions run exactly in BF16",
        )
    return Support(
        "simulated",
        fmt,
        "no unit for INT8 is known of this CPU: oneDNN multiplies exact values without one",
    )


def _cuda(device: torch.device, fmt: Precision, exact: bool) -> Support:
    kernels = Offer.kernels(device)
    values = encoding(fmt)
    since = CUDA_SINCE.get(values.name)
    major, minor = result = kernels.capability or torch.cuda.get_device_capability(device)
    carrier = row_on(device, fmt).carrier
    if fmt.plain and not compiles(device, fmt):
        instead = precision(_INSTEAD[fmt.name])
        if exact:
            raise DeviceError(
                f"compute capability {major}.{minor} compiles no {fmt}, and emulate_unsupported=True forbids {instead} in its place",
                where=f"device {device}",
                do=f"plan {instead} there, or drop exact",
            )
        return Support(
            "substituted",
            instead,
            f"{fmt} runs as {instead}: nothing compiles {fmt} for compute capability {major}.{minor}",
        )
    if since is None or result < since:
        return Support(
            "simulated",
            fmt,
            f"compute capability {major}.{minor} has no {values} unit: its exact values are computed in {carrier}",
        )
    if fmt.plain:
        return Support("native", fmt, f"compute capability {major}.{minor} has {fmt} tensor cores")
    if values.name in kernels.formats:
        return Support(
            "native",
            fmt,
            f"CUTLASS kernels for {kernels.arch} use the {values} tensor cores where that is faster",
        )
    reason = kernels.reason or f"there is no kernel of ours that multiplies {values} by {values}"
    if fmt.kind == "integer":
        return Support(
            "native",
            fmt,
            f"cuBLAS multiplies {values}; convolutions run exactly in {carrier}: {reason}",
        )
    return Support(
        "simulated",
        fmt,
        f"its exact values are computed in {carrier}, not by the {values} tensor cores: {reason}",
    )


def resolve(
    row: OperatorRow,
    planned: Precision,
    device: torch.device,
    exact: bool,
    live: Precision | None = None,
    refused: str | None = None,
) -> tuple[Precision, str]:
    """Returns the format that an adjustable operator runs in, and why it is not `planned`; "" where it is.

    Args:
        exact: forbids that the device runs another format in place of the planned one.
        refused: why an operator of ours cannot take the place of this one; None where it can.
        held: the format that the model itself holds the operator's result in: torch computes in it, so nothing is put in its place.
    """
    runs, reasons = planned, []
    # Scaled formats and formats that exist only inside products need an operator of ours, which products with a weight have.
    if not runs.plain and (refused is not None or not row.scaled):
        runs = live if live is not None and live.bits < 32 else row_on(device, planned).elsewhere
        but = f", and {row.unscaled}:" if row.unscaled else ","
        why = (
            f"{refused}, so it"
            if refused is not None
            else f"{planned} is for products with a weight{but} {row.name}"
        )
        reasons.append(f"{why} runs in {runs}")
    # What the model itself holds torch computes in, whatever the device makes of it.
    result = (
        support(device, runs, exact or runs is live) if runs is not live or not runs.plain else None
    )
    if result is not None and result.runs_as is not runs:
        runs = result.runs_as
        reasons.append(result.reason)
    return runs, "; ".join(reasons)


def stays(owned: Precision, planned: Precision, automatic: bool) -> bool:
    """Whether a default leaves what the model holds: FP64, a narrow float that it would widen, and any narrow float where nobody asked.

    Args:
        planned: the default's row on the device.
    """
    wide = planned.output
    widened = not planned.scaled and owned.dtype is not wide.dtype and promoted(owned, wide) is wide
    return owned.name == "fp64" or widened or (automatic and owned.bits < 32)
