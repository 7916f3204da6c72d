"""Optimizers of torch.optim whose step on the CPU is one pass over memory: same arguments, same state_dict, same numbers.

    optimizer = qsync_fx.optim.AdamW(model.parameters(), lr=1e-3)

Invariant: each is a subclass of the one of torch that has its name, and differs from it in `step` alone.
"""

from __future__ import annotations

from qsync_fx.optim.adam import Adam, AdamW
from qsync_fx.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW"]
