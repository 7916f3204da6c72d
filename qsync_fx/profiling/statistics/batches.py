"""Parts of batches: half of one tells as much of how operators rank, in half the memory (QSync, section IV).

Invariant: a batch is whatever a user's `step` takes; what is no tensor of one entry a sample goes through as it is.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from qsync_fx.errors import ProfileError


def samples(batch: Any) -> int:
    """Returns the number of samples of a batch: the first size that most of its tensors have; 1 where there are none."""
    sizes: Counter[int] = Counter()

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sizes.update(tensor.shape[:1])
        return tensor

    _map(batch, count)
    return max(1, sizes.most_common(1)[0][0]) if sizes else 1


def part_of(batch: Any, fraction: float) -> Any:
    """Returns the first samples of a batch, as many as `fraction` says, at least one."""
    whole = samples(batch)
    kept = max(1, math.ceil(whole * fraction))
    return _map(batch, lambda t: t[:kept] if t.dim() and t.shape[0] == whole else t)


def stepped(batches: Iterable[Any], steps: int, fraction: float) -> Iterator[Any]:
    """Yields a part of a batch for each step; a list that is too short starts again, an iterator ends.

    Raises:
        ProfileError: there is no batch.
    """
    again = itertools.cycle(batches) if isinstance(batches, Sequence) else batches
    none = True
    for batch in itertools.islice(again, steps):
        none = False
        yield part_of(batch, fraction)
    if none:
        raise ProfileError("there are no batches to look at", do="give at least one batch, and at least one step")


def _map(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        # Classes of batches (BatchEncoding) are mappings with more to them.
        found: Any = copy.copy(value)
        for key, item in value.items():
            found[key] = _map(item, change)
        return found
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, change) for item in value)
    return value
