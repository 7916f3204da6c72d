"""Helpers for tests of products with a weight."""

from __future__ import annotations

import torch

import qsync_fx

SEED = torch.tensor([0])


def adjustable(explanation: qsync_fx.Explanation) -> list[tuple[str, str, str]]:
    return [
        (str(op.id), str(op.precision), op.reason)
        for op in explanation.operators
        if op.kind == "adjustable"
    ]
