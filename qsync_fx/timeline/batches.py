"""Whether devices train the samples that a cluster's file says, which is what samples a second are reckoned from.

Invariant: a profile does not hold which size of its model is the batch, so what is found here is a warning and never an error.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Final

from qsync_fx.predictor.model import ModelGraph
from qsync_fx.predictor.replay.cluster import Cluster

_LEADING: Final = 2
"""Sizes of a tensor among which the batch is: the first, or behind the length of sequences the second."""
_SOME: Final = 8
"""Of which so many are told."""


def tell_of_other_batches(fleet: Cluster, graphs: Mapping[str, ModelGraph]) -> None:
    """Warns of classes of devices whose profile is of other samples in a step than the cluster says: seconds and memory are the profile's.

    Args:
        graphs: by class, the model that its profile is of.
    """
    for name, device in fleet.devices.items():
        leading = _leading_sizes(graphs[name])
        if device.batch is None or not leading or str(device.batch) in leading or not all(map(str.isdigit, leading)):
            continue
        there = ", ".join(sorted(leading, key=int)[:_SOME])
        warnings.warn(
            f"devices.{name}: the cluster says batch = {device.batch}, and no tensor of the model that its profile is of has so many "
            f"samples (first sizes are {there}): seconds and memory are those of the profile's batch, and samples a second are wrong. "
            "Measure with that batch, or say the one that was measured",
            stacklevel=3,
        )


def _leading_sizes(graph: ModelGraph) -> set[str]:
    """Returns the first sizes of what operators make, of two or more; symbols where they are no numbers."""
    found = (re.search(r"\[(.+)\]", operator.shape) for operator in graph.operators)
    sizes = (one.group(1).split(", ") for one in found if one is not None)
    return {size for each in sizes if len(each) > 1 for size in each[:_LEADING]}
