"""What the formats cost in accuracy: the demo's network, trained in each as uniform precision, beside FP32.

The demo's own network, optimizer, rate and global batch, over four times the images and one epoch more, as seeds of so short a training as
the demo's are points apart. Of one seed all formats begin from the
same weights and see the same images in the same order. `points` is what the accuracy is more than FP32's, in points of a hundred, as the
mean over seeds with the standard error of that; the network is tested in FP32, on all test images.
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

from benchmarks.paper.support.experiment import OPTIONS, Experiment, beside
from benchmarks.paper.support.images import QUICK, Images, Network, Size, Trainer
from benchmarks.support.harness import arguments, selected, show

SIZE = Size(samples=40_000, tests=10_000, epochs=3, batch=192)
DEMO = Network(ResNet, 0.2)
WIDE = "fp32"
FORMATS = {name: Plan.uniform(name) for name in (WIDE, "int8_grad", "int8", "bf16")}


def main() -> None:
    options = arguments(
        __doc__, None, **{**OPTIONS, "only": {"help": "formats that begin so, beside fp32"}}
    )
    images = Images(QUICK if options.quick else SIZE, "digits" if options.quick else None)
    experiment = Experiment(
        options, "convergence", images.size.epochs, images=images.name, size=asdict(images.size)
    )
    whole: list[float] = []
    for name, plan in ({WIDE: FORMATS[WIDE]} | selected(options, FORMATS)).items():
        settings = {"images": images.name, "size": asdict(images.size), "plan": plan.to_json()}
        found = experiment.accuracy(
            name, settings, partial(Trainer, DEMO, images, [plan], [images.size.batch])
        )
        whole = whole or found["each"]
        experiment.add({"format": name, **found, **beside(found["each"], whole)})
    show(experiment.rows)


if __name__ == "__main__":
    main()
