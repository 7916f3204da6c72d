"""What running a model changes, put back.

Invariant: the tensors are the same objects afterwards, with the values of before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


@contextlib.contextmanager
def unchanged(written: Sequence[Tensor], every: Sequence[Tensor]) -> Iterator[None]:
    """Puts back the values of tensors, and torch's random number generators.

    Args:
        written: the tensors that may be written to.
        every: all of the model's, whose devices have generators.
    """
    kept = [t.detach().clone() for t in written]
    devices = sorted({t.device.index or 0 for t in every if t.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(written, kept, strict=True):
                tensor.copy_(value)
