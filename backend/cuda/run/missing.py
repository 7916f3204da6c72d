"""What a CUDA device lacks to run kernels of ours, told once a process: what is missing, what that costs, and what mends it.

Invariant: nothing here decides; `device` does, and this is what it has found. What a user has switched off is not missing.
"""

from __future__ import annotations

import warnings
from typing import Final

import torch

from qsync_fx.backend.cuda.run import quantizing
from qsync_fx.backend.cuda.run.device import Known, known_of
from qsync_fx.devices import row_on
from qsync_fx.devices.counted import capability
from qsync_fx.errors import PlanWarning
from qsync_fx.precision import FORMATS

QUANTIZING: Final = (
    "values are quantized by code that the compiler fuses, which draws eight times as often as a kernel of ours"
)
ONE_BY_ONE: Final = (
    "but to FP8 operator by operator, in some two hundred launches a tensor, since the compiler converts to no floats of one byte for "
    "compute capability {capability}"
)
PRODUCTS: Final = "INT8 is multiplied by cuBLAS where it takes the sizes, all else of INT8, FP8 and TF32 in {carrier}, no faster than that"

_told: set[str] = set()


def tell(device: torch.device) -> None:
    """Warns once a process of each thing that a device's kernels lack."""
    text = told(device)
    if text and text not in _told:
        _told.add(text)
        warnings.warn(text, PlanWarning, stacklevel=2)


def told(device: torch.device) -> str:
    """Returns what `tell` says of a device; "" where nothing is missing."""
    found = known_of(device)
    if found.mend is None or found.lacks is None:
        return ""
    name = "the GPU" if device.index is None else str(device)
    return f"{name} runs without kernels of ours: {found.lacks}. Numbers are the same. {costs(found, device)}. To mend it: {found.mend}"


def costs(found: Known, device: torch.device) -> str:
    """Returns what it costs that something is missing, a sentence without its full stop."""
    carriers = {str(row_on(device, row).carrier) for row in FORMATS.values() if row.kind == "integer"}
    products = PRODUCTS.format(carrier=" and ".join(sorted(carriers)))
    if found.arch is not None and found.compiles:
        return f"Only products are missing, and no kernel that was compiled elsewhere: {products}"
    both = f"{products}; {_quantizing(device)}"
    return both if found.arch is None else f"There are those that were compiled before, and no others: else {both}"


def _quantizing(device: torch.device) -> str:
    """Returns how values are quantized where no kernel of ours does it: a clause."""
    if all(quantizing.compiles(row, device) for row in FORMATS.values() if row.scaled):
        return QUANTIZING
    at = ".".join(map(str, capability(device)))
    return f"{QUANTIZING}, {ONE_BY_ONE.format(capability=at)}"
