"""Softmax, whose outputs lie in [0, 1] and survive a narrow float, and its logarithm, whose outputs do not."""

from __future__ import annotations

from qsync_fx.ops.row import Kind, OperatorRow, fixed

ROWS = (
    OperatorRow(
        "softmax",
        ("aten::softmax", "aten::_softmax", "aten::_safe_softmax", "aten::special_softmax"),
        Kind.ADJUSTABLE,
        "a softmax: the plan chooses among the float precisions",
        operands=(0,),
    ),
    *fixed(
        "a logarithm of probabilities feeds a loss, and stays in FP32 with it",
        "log_softmax _log_softmax special_log_softmax log_sigmoid log_sigmoid_forward logsumexp special_logsumexp "
        "logaddexp logaddexp2 _masked_softmax",
        loss=True,
    ),
)
