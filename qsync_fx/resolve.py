"""From the precision that a plan asks for to the one that runs.

Invariant: the answer differs from the plan only for a reason that is returned with it, so nothing is lost silently.
"""

from __future__ import annotations

import torch

from qsync_fx.devices import row_on, support
from qsync_fx.ops import OperatorRow
from qsync_fx.precision import Precision, promoted


def resolve(
    row: OperatorRow,
    planned: Precision,
    device: torch.device,
    exact: bool,
    held: Precision | None = None,
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
        runs = held if held is not None and held.bits < 32 else row_on(device, planned).elsewhere
        but = f", and {row.unscaled}:" if row.unscaled else ","
        why = f"{refused}, so it" if refused is not None else f"{planned} is for products with a weight{but} {row.name}"
        reasons.append(f"{why} runs in {runs}")
    # What the model itself holds torch computes in, whatever the device makes of it.
    found = support(device, runs, exact or runs is held) if runs is not held or not runs.plain else None
    if found is not None and found.runs_as is not runs:
        runs = found.runs_as
        reasons.append(found.reason)
    return runs, "; ".join(reasons)


def stays(own: Precision, planned: Precision, automatic: bool) -> bool:
    """Whether a default leaves what the model holds: FP64, a narrow float that it would widen, and any narrow float where nobody asked.

    Args:
        planned: the default's row on the device.
    """
    wide = planned.output
    widened = not planned.scaled and own.dtype is not wide.dtype and promoted(own, wide) is wide
    return own.name == "fp64" or widened or (automatic and own.bits < 32)
