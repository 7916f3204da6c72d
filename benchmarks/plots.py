"""Charts of the documentation from benchmarks/results: `python benchmarks/plots.py`.

Each chart is an SVG in docs/images that depends on its JSON file alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
# Colours that remain distinct with colour blindness (Okabe and Ito).
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#e69f00", "#009e73", "#8b949e"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "qsync_fx",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": "#57606a",
    "axes.labelcolor": "#57606a",
    "axes.edgecolor": GREY,
    "xtick.color": "#57606a",
    "ytick.color": "#57606a",
}


def main() -> None:
    with plt.rc_context(STYLE):
        for name, draw in {"speed": speed, "accuracy": accuracy}.items():
            figure = draw()
            figure.savefig(IMAGES / f"{name}.svg", transparent=True, metadata={"Date": None})
            plt.close(figure)


def speed() -> Any:
    """Draw the speed of training steps relative to the fastest autocast, on one core."""
    results = json.loads((RESULTS / "step_time.json").read_text())
    runs = [results, *results["others"]]
    rows = next(run["rows"] for run in runs if run["machine"]["threads"] == 1)
    variants = {"qsync bf16": "bf16", "qsync int8": "int8", "qsync int8_grad": "int8_grad"}
    cases = ("BERT 4", "GPT-2", "ViT 2", "ResNet-18, 32", "VGG-16", "ResNet-50")
    speeds = {(row["case"], row["variant"]): 1 / row["to_peer"] for row in rows if "to_peer" in row}
    names = {begin: next(case for case, _ in speeds if case.startswith(begin)) for begin in cases}
    figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
    for offset, (variant, label), colour in zip(
        (-0.27, 0, 0.27), variants.items(), (GREY, ORANGE, BLUE), strict=True
    ):
        heights = [speeds[names[begin], variant] for begin in cases]
        places = [index + offset for index in range(len(cases))]
        bars = axes.bar(places, heights, width=0.25, color=colour, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    axes.axhline(1, color=GREY, linewidth=1, linestyle="--")
    axes.set_xticks(range(len(cases)), [names[begin].partition(",")[0] for begin in cases])
    axes.set_ylabel("speed / fastest autocast")
    axes.legend(frameon=False, ncols=3, loc="upper right")
    axes.set_ylim(0, 2.2)
    return figure


def accuracy() -> Any:
    """Draw the accuracy of a ResNet on Fashion-MNIST by format, with each seed."""
    rows = json.loads((RESULTS / "convergence.json").read_text())["rows"]
    figure, axes = plt.subplots(figsize=(4.2, 3.4), layout="constrained")
    colours = {"fp32": GREEN, "bf16": GREY, "int8": ORANGE, "int8_grad": BLUE}
    rows = sorted(rows, key=lambda row: list(colours).index(row["format"]))
    for place, row in enumerate(rows):
        axes.scatter(
            [place] * len(row["each"]),
            [100 * seed for seed in row["each"]],
            color=colours[row["format"]],
            s=18,
        )
        axes.hlines(100 * row["accuracy"], place - 0.3, place + 0.3, color=colours[row["format"]])
    axes.set_xticks(range(len(rows)), [row["format"] for row in rows])
    axes.set_ylabel("test accuracy, %")
    axes.set_ylim(88, 92)
    return figure


if __name__ == "__main__":
    main()
