"""Accuracy of uniform plans in each format, compared with FP32, on the network of examples/demo.py.
Network, optimizer, learning rate and global batch are the demo's, with four times its images and
one more epoch: seeds of the demo's short training differ by several percentage points. With the
same seed, all formats start from the same weights and read the same images in the same order. The
test uses all test images, in FP32. Columns: mean "accuracy" over seeds with its standard
"deviation", and "points", the difference to FP32 at equal seeds in percentage points, with its
standard "error". INT8 rounds stochastically by default, and to the nearest or down (QSync, section
VIII) in rows that say so.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from qsync_fx import Plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from models import ResNet

from benchmarks.paper.support.experiment import OPTIONS, Experiment, points_above
from benchmarks.paper.support.images import QUICK, Images, Network, Size, Trainer
from benchmarks.support.harness import arguments, by_size, selected, show

SIZE = Size(samples=40_000, tests=10_000, epochs=3, batch=192)
DEMO = Network(ResNet, 0.2)
WIDE = "fp32"
FORMATS = {
    **{name: (Plan.uniform(name), {}) for name in (WIDE, "int8_grad", "int8", "bf16")},
    **{
        f"int8, {name}": (Plan.uniform("int8"), {"rounding": name}) for name in ("nearest", "floor")
    },
}
"""Plan and options of the backend."""


def main() -> None:
    options = arguments(
        __doc__, None, **{**OPTIONS, "only": {"help": "prefix of formats to compare with fp32"}}
    )
    images = Images(by_size(options.quick, QUICK, SIZE), by_size(options.quick, "digits", None))
    experiment = Experiment(
        options, "convergence", images.size.epochs, images=images.name, size=asdict(images.size)
    )
    baseline: list[float] = []
    for name, (plan, rounding) in ({WIDE: FORMATS[WIDE]} | selected(options, FORMATS)).items():
        settings = {"images": images.name, "size": asdict(images.size), "plan": plan.to_json()}
        accuracies = experiment.accuracy(
            name,
            {**settings, **rounding},
            partial(Trainer, DEMO, images, [plan], [images.size.batch], **rounding),
        )
        baseline = baseline or accuracies["each"]
        experiment.add({"format": name, **accuracies, **points_above(accuracies["each"], baseline)})
    show(experiment.rows)


if __name__ == "__main__":
    main()
