"""What a device offers each number format.

Invariant: one answer per (device, format), with a reason, and everybody asks here: the passes, the lowered operators, the report and
`qsync doctor`. A format that this table does not name is simulated, exactly, so that a new format needs no line here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

from qsync_fx.errors import DeviceError
from qsync_fx.precision import Precision, encoding, precision

_CUDA_SINCE = {"fp16": (7, 0), "int8": (7, 5), "bf16": (8, 0), "tf32": (8, 0), "fp8": (8, 9), "fp8_e5m2": (8, 9)}
"""Compute capability whose tensor cores first have the values of a format, by its `encoding` (NVIDIA's architecture whitepapers)."""

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


class _Offer:
    """Who knows of kernels: the backend, which stands above this module and says so when it is imported."""

    kernels: Callable[[torch.device], Kernels] = staticmethod(_not_loaded)


def offer(kernels: Callable[[torch.device], Kernels]) -> None:
    """Lets `support` ask `kernels` for what there is for a CUDA device; what it has answered before is forgotten."""
    _Offer.kernels = staticmethod(kernels)
    support.cache_clear()


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
    return _cuda(device, fmt) if device.type == "cuda" else _cpu(fmt, exact)


def default_precision(device: torch.device) -> Precision:
    """Returns what runs when the user asks for nothing: BF16 where the device has it, else FP32."""
    bf16 = precision("bf16")
    return bf16 if support(device, bf16).how == "native" else precision("fp32")


@functools.cache
def cpu_multiplies_integers() -> bool:
    """Whether oneDNN's products of INT8 matrices are exact on this CPU.

    Without VNNI (AVX2, and AVX-512 before Cascade Lake) oneDNN adds two products up in 16 bits, saturated, so that eight of 127 by 127
    come out as 1020 (docs/known-issues.md). That is tried, not looked up: what oneDNN uses is narrowed by ONEDNN_MAX_CPU_ISA, which no
    query of torch's knows.
    """
    # Whoever asks may be tracing, where nothing has a value.
    with _disable_current_modes():
        int8 = precision("int8")
        largest = torch.full((4, 8), int(int8.max), dtype=int8.dtype, device="cpu")
        found = [torch._int_mm(largest, sign * largest.t()) * sign for sign in (1, -1)]
        return all(bool((sums == 8 * int8.max**2).all()) for sums in found)


def _cpu(fmt: Precision, exact: bool) -> Support:
    if fmt.name == "bf16":
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return Support("native", fmt, "this CPU computes BF16 through oneDNN")
        return Support("simulated", fmt, "this CPU has no BF16 unit: PyTorch converts to FP32 and back")
    if fmt.name == "fp16":
        if exact:
            return Support("simulated", fmt, "PyTorch computes FP16 on the CPU exactly and slowly")
        return Support(
            "substituted",
            precision("bf16"),
            "FP16 runs as BF16 on the CPU, which has no FP16 unit (exact=True forbids it)",
        )
    if encoding(fmt).name == "int8" and not cpu_multiplies_integers():
        return Support(
            "simulated", fmt, "this CPU's INT8 unit saturates sums (it has no VNNI): exact values are computed in FP32"
        )
    if encoding(fmt).name == "int8":
        return Support("native", fmt, "this CPU multiplies INT8 through oneDNN; convolutions run exactly in BF16")
    return Support("simulated", fmt, f"the CPU has no {fmt} unit: its exact values are computed in {fmt.carrier}")


def _cuda(device: torch.device, fmt: Precision) -> Support:
    kernels = _Offer.kernels(device)
    values = encoding(fmt)
    since = _CUDA_SINCE.get(values.name)
    major, minor = found = kernels.capability or torch.cuda.get_device_capability(device)
    if since is None or found < since:
        return Support(
            "simulated",
            fmt,
            f"compute capability {major}.{minor} has no {values} unit: its exact values are computed in {fmt.carrier}",
        )
    if fmt.plain:
        return Support("native", fmt, f"compute capability {major}.{minor} has {fmt} tensor cores")
    if values.name in kernels.formats:
        return Support(
            "native", fmt, f"CUTLASS kernels for {kernels.arch} use the {values} tensor cores where that is faster"
        )
    reason = kernels.reason or f"there is no kernel of ours that multiplies {values} by {values}"
    if fmt.kind == "integer":
        return Support(
            "native", fmt, f"cuBLAS multiplies {values}; convolutions run exactly in {fmt.carrier}: {reason}"
        )
    return Support(
        "simulated",
        fmt,
        f"its exact values are computed in {fmt.carrier}, not by the {values} tensor cores: {reason}",
    )
