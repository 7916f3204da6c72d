"""Number-format support: how each device runs each format.

`capability` respects an assumed target GPU, so that all decisions refer to the same device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import torch

from qsync_fx.devices.cpu_features import (
    cpu,
    cpu_multiplies_integers,
    native_bf16_unit,
    native_integer_products,
    native_integer_unit,
    wrong_path,
)
from qsync_fx.devices.device_catalog import canonical, get, is_path, names
from qsync_fx.errors import DeviceError
from qsync_fx.formats import FP32, Precision, encoding, precision, promoted
from qsync_fx.ops.spec import OperatorRow


@dataclass(frozen=True)
class Kernels:
    """Availability of our kernels for a CUDA device.

    Attributes:
        arch: architecture that they are compiled for; None, with a reason, if there are none.
        formats: names of the encodings that they multiply natively.
        capability: of an assumed device that is not present; None for a device that torch sees.
    """

    arch: str | None
    reason: str
    formats: frozenset[str] = frozenset()
    capability: tuple[int, int] | None = None


class Offer:
    """Registry entry of the backend, which provides kernels and registers itself on import."""

    kernels: Callable[[torch.device], Kernels] = staticmethod(
        lambda device: Kernels(None, "the backend is not loaded")
    )
    forget: tuple[Callable[[], object], ...] = ()


target: ContextVar[tuple[str, tuple[int, int], str] | None] = ContextVar(
    "qsync_target", default=None
)
"""Device type that counts as another GPU, and the compute capability and name of that GPU."""


def target_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability that a device is assumed to have; None without assumption."""
    device_type, assumed, _ = target.get() or ("", None, "")
    return assumed if device_type == device.type else None


def target_name(device: torch.device) -> str:
    """Return the name of the GPU in `TARGETS` that a device is assumed to be; "" if unknown."""
    device_type, _, name = target.get() or ("", None, "")
    return name if device_type == device.type else ""


ANY = (99, 0)
"""Compute capability of a device that is no GPU and compiles all formats."""


def capability(device: torch.device) -> tuple[int, int]:
    """Return the actual or assumed compute capability of a device."""
    assumed = target_of(device)
    if assumed is None and device.type != "meta":
        assumed = Offer.kernels(device).capability
    if assumed is not None:
        return assumed
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_capability(device)
    return ANY


@contextlib.contextmanager
def standing_for(device: torch.device) -> Iterator[None]:
    """Treat tensors of device type "meta" as tensors on `device`."""
    result = capability(device)
    if result == ANY:
        yield
        return
    token = target.set(("meta", result, target_name(device)))
    try:
        yield
    finally:
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

_BF16_SINCE = (8, 0)
"""Compute capability from which Inductor compiles graphs with BF16 (torch 2.11 to 2.15)."""


@dataclass(frozen=True)
class Support:
    """How a device runs a format.

    Attributes:
        kind: "native": its own unit; "simulated": the format's exact numerics on another unit;
            "substituted": another format.
        reason: one clause, for reports.
    """

    kind: Literal["native", "simulated", "substituted"]
    runs_as: Precision
    reason: str


def offer(kernels: Callable[[torch.device], Kernels], *forgets: Callable[[], object]) -> None:
    """Register the backend's query for CUDA kernels, and functions that clear its caches."""
    Offer.kernels, Offer.forget = staticmethod(kernels), forgets
    forget()


@functools.cache
def support(device: torch.device, fmt: Precision, exact: bool = False) -> Support:
    """Return how `device` runs `fmt`; raise `DeviceError` if it cannot without substitution.

    `exact` forbids substitution.
    """
    if device.type not in ("cpu", "cuda"):
        message = f"qsync_fx does not run on device type {device.type!r}"
        do = "move the model to the CPU or to a CUDA device"
        raise DeviceError(message, where=f"device {device}", do=do)
    if fmt.name in ("fp64", "fp32"):
        return Support("native", fmt, f"{fmt} runs everywhere")
    gpu = device.type == "cuda" or Offer.kernels(device).capability is not None
    return _cuda(device, fmt, exact) if gpu else _cpu(fmt, exact)


def compiles(device: torch.device, fmt: Precision) -> bool:
    """Return whether graphs with a plain format are compiled, not run eagerly without a plan."""
    return fmt.name != "bf16" or capability(device) >= _BF16_SINCE


def row_on(device: torch.device, fmt: Precision) -> Precision:
    """Return a format's row with dtypes that the device compiles.

    On GPUs before Ampere (V100, T4), FP16 replaces BF16. FP16 represents the values of 8-bit
    floats, but not their sums, so these are computed in FP32.
    """
    return row_at(capability(device), fmt)


def row_at(capability: tuple[int, int], fmt: Precision) -> Precision:
    """Return a format's row for GPUs of a compute capability; see `row_on`."""
    return fmt if capability >= _BF16_SINCE else _without_bf16(fmt)


@functools.cache
def _without_bf16(fmt: Precision) -> Precision:
    formats = {
        field: precision("fp16")
        for field in ("carrier", "output", "gradient", "elsewhere")
        if getattr(fmt, field).name == "bf16"
    }
    if fmt.scaled and fmt.kind == "float":
        formats["carrier"] = FP32
    return dataclasses.replace(fmt, **formats)  # type: ignore[arg-type]


def forget() -> None:
    """Clear cached answers, for example of a device that is no longer assumed."""
    for clear in (support.cache_clear, *Offer.forget):
        clear()


def default_precision(device: torch.device) -> Precision:
    """Return the default format: BF16 if it is native on the device, else FP32."""
    bf16 = precision("bf16")
    return bf16 if support(device, bf16).kind == "native" else FP32


def _cpu(fmt: Precision, exact: bool) -> Support:
    if fmt.name == "bf16":
        if native_bf16_unit():
            return Support("native", fmt, "this CPU computes BF16 through oneDNN")
        reason = "this CPU has no BF16 unit: values are converted to FP32 and back"
        return Support("simulated", fmt, reason)
    if fmt.name == "fp16":
        if exact:
            return Support("simulated", fmt, "PyTorch computes FP16 on the CPU exactly and slowly")
        reason = "FP16 runs as BF16 on the CPU, which has no FP16 unit"
        reason = f"{reason} (emulate_unsupported=True forbids this)"
        return Support("substituted", precision("bf16"), reason)
    if encoding(fmt).name == "int8":
        return _integer_support(fmt)
    reason = f"the CPU has no {fmt} unit: exact {fmt} values are computed in {fmt.carrier}"
    return Support("simulated", fmt, reason)


def _integer_support(fmt: Precision) -> Support:
    if (wrong := wrong_path()) is not None:
        reason = f"{wrong.where} is invalid, so operators in {fmt} fail: {wrong.what}"
        return Support("simulated", fmt, reason)
    if native_integer_unit():
        reason = "this CPU has a unit for INT8; convolutions with few channels run exactly in BF16"
        return Support("native", fmt, reason)
    if not cpu_multiplies_integers():
        reason = "this CPU has no INT8 unit (VNNI): exact values are computed in FP32"
        if native_integer_products():
            reason += ", and multiplied by the native module's AVX2 instructions"
        return Support("simulated", fmt, reason)
    # Exact sums do not imply a unit: oneDNN is also exact without one.
    if {"vnni", "amx"}.intersection(cpu().features):
        reason = "oneDNN uses an INT8 unit that the native module's ISA variant does not use"
        return Support("native", fmt, f"{reason}; convolutions run exactly in BF16")
    reason = "this CPU has no known INT8 unit: oneDNN multiplies exact values without one"
    return Support("simulated", fmt, reason)


def _cuda(device: torch.device, fmt: Precision, exact: bool) -> Support:
    kernels = Offer.kernels(device)
    values = encoding(fmt)
    since = CUDA_SINCE.get(values.name)
    major, minor = result = kernels.capability or torch.cuda.get_device_capability(device)
    gpu = f"compute capability {major}.{minor}"
    carrier = row_on(device, fmt).carrier
    if fmt.plain and not compiles(device, fmt):
        instead = precision("fp16")
        if exact:
            raise DeviceError(
                f"{fmt} cannot be compiled for {gpu}, and emulate_unsupported=True forbids "
                f"{instead} as a substitute",
                where=f"device {device}",
                do=f"plan {instead} for this device, or set emulate_unsupported=False",
            )
        reason = f"{fmt} runs as {instead}: {fmt} cannot be compiled for {gpu}"
        return Support("substituted", instead, reason)
    if since is None or result < since:
        reason = f"{gpu} has no {values} unit: exact {values} values are computed in {carrier}"
        return Support("simulated", fmt, reason)
    if fmt.plain:
        return Support("native", fmt, f"{gpu} has {fmt} tensor cores")
    if values.name in kernels.formats:
        use = f"use the {values} tensor cores if that is faster"
        return Support("native", fmt, f"CUTLASS kernels for {kernels.arch} {use}")
    why = kernels.reason or f"qsync_fx has no kernel for products of {values} and {values}"
    if fmt.kind == "integer":
        reason = f"cuBLAS multiplies {values}; convolutions run exactly in {carrier}: {why}"
        return Support("native", fmt, reason)
    reason = f"exact {values} values are computed in {carrier}, not by {values} tensor cores: {why}"
    return Support("simulated", fmt, reason)


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
        exact: forbids substitution of the planned format by the device.
        live: format of the result in the model itself, which torch computes in; it is not
            substituted.
        refused: why our operator cannot replace this one; None if it can.
    """
    runs, reasons = planned, []
    # Scaled formats and formats that exist only inside products need an operator of ours, which
    # exists for products with a weight.
    if not runs.plain and (refused is not None or not row.scaled):
        runs = row_on(device, planned).elsewhere
        if live is not None and live.bits < 32:
            runs = live
        why = f"{planned} applies to products with a weight, {row.name}"
        if refused is not None:
            why = f"{refused}, so it"
        elif row.unscaled:
            why = f"{planned} applies to products with a weight, and {row.unscaled}: {row.name}"
        reasons.append(f"{why} runs in {runs}")
    # torch computes in the model's own format, regardless of the unit of the device.
    if runs is not live or not runs.plain:
        result = support(device, runs, exact or runs is live)
        if result.runs_as is not runs:
            runs = result.runs_as
            reasons.append(result.reason)
    return runs, "; ".join(reasons)


def stays(owned: Precision, planned: Precision, automatic: bool) -> bool:
    """Return whether a default precision leaves a format of the model unchanged.

    This is the case for FP64, for a narrow float that the default would widen, and for any narrow
    float if the precision was chosen automatically. `planned` is the default's row on the device.
    """
    wide = planned.output
    widened = not planned.scaled and owned.dtype is not wide.dtype and promoted(owned, wide) is wide
    return owned.name == "fp64" or widened or (automatic and owned.bits < 32)


def is_gpu(device: torch.device) -> bool:
    """Return whether a device is a GPU, or represents one."""
    return device.type != "cpu" or capability(device) != ANY


class _Targets(Mapping[str, tuple[int, int]]):
    """GPUs of the catalog and of user files, by name or by path of the file."""

    def __getitem__(self, name: str) -> tuple[int, int]:
        capability = get(name).capability if is_path(name) or canonical(name) else None
        if capability is None:
            raise KeyError(name)
        return capability

    def __iter__(self) -> Iterator[str]:
        """Yield the names of GPUs and of invalid files, whose errors are raised by `get`."""
        for name in names():
            with contextlib.suppress(DeviceError):
                if get(name).kind != "gpu":
                    continue
            yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)


TARGETS: Mapping[str, tuple[int, int]] = _Targets()
"""Available target GPUs and their compute capability."""


@contextlib.contextmanager
def targeted(name: str | None, on: torch.device) -> Iterator[None]:
    """Treat all devices of the type of `on` as the GPU `name` of `TARGETS`; None has no effect."""
    if name is None:
        yield
        return
    token = target.set((on.type, TARGETS[name], name))
    forget()
    try:
        yield
    finally:
        target.reset(token)
        forget()


def check_target(name: str, device: torch.device) -> None:
    """Raise `DeviceError` if the local device is not the GPU that code is to be compiled for."""
    if device.type == "cuda" and capability(device) == TARGETS[name]:
        return
    current = str(device)
    if device.type == "cuda":
        current = f"a GPU of compute capability {'.'.join(map(str, capability(device)))}"
    message = f"the graph runs on {current}, but its target is {name}"
    do = "remove the option to compile; use it only with qsync_fx.explain and qsync inspect"
    raise DeviceError(message, where='option "target"', do=do)
