"""Number-format support: how each device runs each format.

`support` returns whether a format runs natively, is simulated exactly, or is substituted, with a
reason; passes, operators, reports and `qsync doctor` all use it. Formats without an entry in the
tables are simulated. `resolve` maps the planned format of an operator to the format that runs.
`capability` respects an assumed target GPU, so that all decisions refer to the same device.

Invariant: each (device, format) has one answer, and each deviation from the plan is returned with
its reason.
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
    """Availability of our kernels for a CUDA device.

    Attributes:
        arch: architecture that they are compiled for; None if there are none.
        reason: why there are none.
        formats: names of the encodings that they multiply natively.
        capability: of an assumed device that is not present; None for a device that torch sees.
    """

    arch: str | None
    reason: str
    formats: frozenset[str] = frozenset()
    capability: tuple[int, int] | None = None


def _not_loaded(device: torch.device) -> Kernels:
    return Kernels(None, "the backend is not loaded")


class Offer:
    """Registry entry of the backend, which provides kernels and registers itself on import."""

    kernels: Callable[[torch.device], Kernels] = staticmethod(_not_loaded)
    forget: tuple[Callable[[], object], ...] = ()


target: ContextVar[tuple[str, tuple[int, int]] | None] = ContextVar("qsync_target", default=None)
"""Device type that counts as another GPU, and the compute capability of that GPU."""


def target_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability that a device is assumed to have; None without assumption."""
    result = target.get()
    return result[1] if result is not None and result[0] == device.type else None


ANY = (99, 0)
"""Compute capability of a device that is no GPU and compiles all formats."""


def capability(device: torch.device) -> tuple[int, int]:
    """Return the actual or assumed compute capability of a device."""
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
    """Treat tensors of device type "meta" as tensors on `device`."""
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
"""Compute capability that introduces tensor cores for an `encoding` (NVIDIA's whitepapers)."""

_COMPILED_SINCE = {"bf16": (8, 0)}
"""Compute capability from which Inductor compiles graphs with a format (torch 2.11 to 2.15)."""

_INSTEAD = {"bf16": "fp16"}
"""Substitute of a format that a device does not compile."""

_EVERYWHERE = ("fp64", "fp32")


@dataclass(frozen=True)
class Support:
    """How a device runs a format.

    Attributes:
        how: "native": its own unit; "simulated": the format's exact numerics on another unit;
            "substituted": another format.
        runs_as: the format that runs: the requested one unless substituted.
        reason: one clause, for reports.
    """

    how: Literal["native", "simulated", "substituted"]
    runs_as: Precision
    reason: str


def offer(kernels: Callable[[torch.device], Kernels], *forgets: Callable[[], object]) -> None:
    """Register the backend's query for CUDA kernels, and clear cached answers.

    Args:
        kernels: returns the kernels for a device.
        forgets: functions that clear caches of the backend.
    """
    Offer.kernels, Offer.forget = staticmethod(kernels), forgets
    forget()


@functools.cache
def support(device: torch.device, fmt: Precision, exact: bool = False) -> Support:
    """Return how `device` runs `fmt`; `exact` forbids substitution.

    Raises:
        DeviceError: the device type is not supported, or `exact` excludes the only option.
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
    """Return whether graphs with values of a plain format are compiled for a device.

    Dynamo runs other graphs eagerly, without a plan.
    """
    return _compiled_at(capability(device), fmt)


def _compiled_at(capability: tuple[int, int], fmt: Precision) -> bool:
    return fmt.name not in _COMPILED_SINCE or capability >= _COMPILED_SINCE[fmt.name]


def row_on(device: torch.device, fmt: Precision) -> Precision:
    """Return a format's row with dtypes that the device compiles.

    On GPUs before Ampere (V100, T4), FP16 replaces BF16 as compute dtype, output, gradient and
    fallback. FP16 represents the values of 8-bit floats, but not their sums, so these are computed
    in FP32.
    """
    return row_at(capability(device), fmt)


def row_at(capability: tuple[int, int], fmt: Precision) -> Precision:
    """Return a format's row for GPUs of a compute capability; see `row_on`."""
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
    """Clear cached answers, for example of a device that is no longer assumed."""
    for clear in (support.cache_clear, *Offer.forget):
        clear()


def default_precision(device: torch.device) -> Precision:
    """Return the default format: BF16 if it is native on the device, else FP32."""
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
            "FP16 runs as BF16 on the CPU, which has no FP16 unit (emulate_unsupported=True "
            "forbids this)",
        )
    if encoding(fmt).name == "int8":
        return _integers(fmt)
    return Support(
        "simulated",
        fmt,
        f"the CPU has no {fmt} unit: exact {fmt} values are computed in {fmt.carrier}",
    )


def _integers(fmt: Precision) -> Support:
    if (wrong := wrong_path()) is not None:
        return Support(
            "simulated",
            fmt,
            f"{wrong.where} is invalid, so operators in {fmt} fail: {wrong.what}",
        )
    if native_integer_unit():
        return Support(
            "native",
            fmt,
            "this CPU has a unit for INT8; convolutions with few channels run exactly in BF16",
        )
    if not cpu_multiplies_integers():
        return Support(
            "simulated",
            fmt,
            "the INT8 unit of this CPU saturates sums (no VNNI): exact values are computed in FP32",
        )
    # Exact sums do not imply a unit: oneDNN is also exact without one.
    if {"vnni", "amx"}.intersection(cpu().features):
        return Support(
            "native",
            fmt,
            "oneDNN uses an INT8 unit that the native module's ISA variant does not use; "
            "convolutions run exactly in BF16",
        )
    return Support(
        "simulated",
        fmt,
        "this CPU has no known INT8 unit: oneDNN multiplies exact values without one",
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
                f"{fmt} cannot be compiled for compute capability {major}.{minor}, and "
                f"emulate_unsupported=True forbids {instead} as a substitute",
                where=f"device {device}",
                do=f"plan {instead} for this device, or set emulate_unsupported=False",
            )
        return Support(
            "substituted",
            instead,
            f"{fmt} runs as {instead}: {fmt} cannot be compiled for compute capability "
            f"{major}.{minor}",
        )
    if since is None or result < since:
        return Support(
            "simulated",
            fmt,
            f"compute capability {major}.{minor} has no {values} unit: exact {values} values are "
            f"computed in {carrier}",
        )
    if fmt.plain:
        return Support("native", fmt, f"compute capability {major}.{minor} has {fmt} tensor cores")
    if values.name in kernels.formats:
        return Support(
            "native",
            fmt,
            f"CUTLASS kernels for {kernels.arch} use the {values} tensor cores if that is faster",
        )
    reason = kernels.reason or f"qsync_fx has no kernel for products of {values} and {values}"
    if fmt.kind == "integer":
        return Support(
            "native",
            fmt,
            f"cuBLAS multiplies {values}; convolutions run exactly in {carrier}: {reason}",
        )
    return Support(
        "simulated",
        fmt,
        f"exact {values} values are computed in {carrier}, not by {values} tensor cores: {reason}",
    )


def resolve(
    row: OperatorRow,
    planned: Precision,
    device: torch.device,
    exact: bool,
    live: Precision | None = None,
    refused: str | None = None,
) -> tuple[Precision, str]:
    """Return the format that an adjustable operator runs in, and why it differs from `planned`.

    Args:
        row: the operator.
        exact: forbids substitution of the planned format by the device.
        live: format of the result in the model itself, which torch computes in; it is not
            substituted.
        refused: why our operator cannot replace this one; None if it can.

    Returns:
        The format, and the reason; "" if the format is `planned`.
    """
    runs, reasons = planned, []
    # Scaled formats and formats that exist only inside products need an operator of ours, which
    # exists for products with a weight.
    if not runs.plain and (refused is not None or not row.scaled):
        runs = live if live is not None and live.bits < 32 else row_on(device, planned).elsewhere
        but = f", and {row.unscaled}:" if row.unscaled else ","
        why = (
            f"{refused}, so it"
            if refused is not None
            else f"{planned} applies to products with a weight{but} {row.name}"
        )
        reasons.append(f"{why} runs in {runs}")
    # torch computes in the model's own format, regardless of the unit of the device.
    result = (
        support(device, runs, exact or runs is live) if runs is not live or not runs.plain else None
    )
    if result is not None and result.runs_as is not runs:
        runs = result.runs_as
        reasons.append(result.reason)
    return runs, "; ".join(reasons)


def stays(owned: Precision, planned: Precision, automatic: bool) -> bool:
    """Return whether a default precision leaves a format of the model unchanged.

    This is the case for FP64, for a narrow float that the default would widen, and for any narrow
    float if the precision was chosen automatically.

    Args:
        owned: format in the model.
        planned: the default's row on the device.
        automatic: whether the user requested no precision.
    """
    wide = planned.output
    widened = not planned.scaled and owned.dtype is not wide.dtype and promoted(owned, wide) is wide
    return owned.name == "fp64" or widened or (automatic and owned.bits < 32)
