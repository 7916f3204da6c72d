"""Parts of batches."""

from __future__ import annotations

from collections import namedtuple

import torch

from qsync_fx.profiler.sensitivity.gradient_step import part_of, samples, stepped

Point = namedtuple("Point", "x y")


def test_parts_of_batches() -> None:
    x, mask = torch.arange(10), torch.ones(4, 4)
    batch = {"x": x, "y": [torch.zeros(10, 2), Point(torch.ones(10), 3)], "mask": mask, "name": "a"}
    half = part_of(batch, 0.45)
    assert (samples(batch), samples("nothing"), samples(half)) == (10, 1, 5)
    assert half["x"].tolist() == [0, 1, 2, 3, 4] and len(half["y"][0]) == len(half["y"][1].x) == 5
    assert (
        half["mask"] is mask
        and half["name"] == "a"
        and half["y"][1].y == 3
        and len(batch["x"]) == 10
    )
    assert len(part_of(x, 0.01)) == 1
    assert [len(one) for one in stepped([x], 3, 0.5)] == [5, 5, 5]
    assert len(list(stepped(iter([x, x]), 3, 1.0))) == 2
