"""Normalisations: float formats for the activation, FP32 for statistics and parameters."""

from __future__ import annotations

from qsync_fx.ops.row import Kind, OperatorRow, fixed

REASON = "a normalisation: the plan chooses among the float precisions, statistics and parameters stay in FP32"


def row(name: str, *targets: str, alone: tuple[int, int] | None = None, writes: tuple[int, ...] = ()) -> OperatorRow:
    every = tuple(f"aten::{target}" for target in (name, *targets))
    return OperatorRow(name, every, Kind.ADJUSTABLE, REASON, operands=(0,), alone=alone, writes=writes)


ROWS = (
    # On the CPU torch takes an FP32 bias beside a narrow input only where there is an FP32 weight, too.
    row("layer_norm", "native_layer_norm", alone=(3, 2)),
    row("group_norm", "native_group_norm"),
    row(
        "batch_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_no_training",
        "_batch_norm_with_update",
        writes=(3, 4),
    ),
    row("instance_norm", alone=(2, 1), writes=(3, 4)),
    row("rms_norm", "_fused_rms_norm"),
    *fixed(
        "it normalises a weight by its length, a sum of squares that needs FP32",
        "_weight_norm _weight_norm_interface norm_except_dim renorm embedding_renorm",
    ),
)
