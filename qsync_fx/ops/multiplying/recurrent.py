"""Recurrent networks, each of which torch keeps as one operator."""

from __future__ import annotations

from qsync_fx.ops.row import fixed

ROWS = fixed(
    "a recurrent network carries its state from step to step, and its rounding errors with it",
    "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
)
