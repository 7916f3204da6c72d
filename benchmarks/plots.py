"""Charts of the documentation from benchmarks/results: `make docs-figures`.

Each chart is an SVG in docs/images that depends on its JSON files alone. The background is
transparent, and text is grey enough for light and dark pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
# Colours that remain distinct with colour blindness (Okabe and Ito).
BLUE, ORANGE, GREEN, SKY, PURPLE, RED = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#56b4e9",
    "#cc79a7",
    "#d55e00",
)
GREY, TEXT = "#8b949e", "#767e87"
PALETTE = (GREY, ORANGE, BLUE, GREEN, PURPLE, RED, SKY)
plt.rcParams.update(
    {
        "svg.hashsalt": "qsync_fx",
        "svg.fonttype": "none",
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "figure.constrained_layout.use": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 10,
        "legend.frameon": False,
        "text.color": TEXT,
        "axes.labelcolor": TEXT,
        "axes.edgecolor": GREY,
        "xtick.color": TEXT,
        "ytick.color": TEXT,
    }
)

Row = Mapping[str, Any]


def main() -> None:
    for draw in CHARTS:
        save(draw(), IMAGES / f"{draw.__name__}.svg")


def save(figure: Any, path: Path) -> None:
    """Write an SVG that is the same in every run."""
    figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
    plt.close(figure)


def rows_of(name: str, threads: int | None = None) -> Sequence[Row]:
    """Return the rows of a result file: its first run's, or those of a run with `threads`."""
    results = json.loads((RESULTS / f"{name}.json").read_text())
    runs = [results, *results.get("others", [])]
    rows: Sequence[Row] = next(
        run["rows"] for run in runs if threads in (None, run["machine"]["threads"])
    )
    return rows


def speed() -> Any:
    """Draw the speed of training steps relative to the fastest autocast, on one core."""
    cases = ("BERT 4", "GPT-2", "ViT 2", "ResNet-18, 32", "VGG-16", "ResNet-50")
    speeds = {
        (row["case"], row["variant"]): 1 / row["to_peer"]
        for row in rows_of("step_time", threads=1)
        if "to_peer" in row
    }
    names = [next(case for case, _ in speeds if case.startswith(begin)) for begin in cases]
    figure, axes = plt.subplots(figsize=(8, 3.4))
    grouped_bars(
        axes,
        [name.partition(",")[0] for name in names],
        {
            name: [speeds[case, f"qsync {name}"] for case in names]
            for name in ("bf16", "int8", "int8_grad")
        },
    )
    axes.set_ylabel("speed / fastest autocast")
    axes.set_ylim(0, 2.2)
    return figure


def memory() -> Any:
    """Draw the peak memory of training steps relative to autocast in BF16."""
    peaks = {
        (row["case"], row["variant"]): row["peak_to_peer"]
        for row in rows_of("saved_memory", threads=2)
    }
    cases = list(dict.fromkeys(case for case, _ in peaks))
    variants = ("bf16", "int8", "bf16, activation_recompute", "int8, activation_recompute")
    figure, axes = plt.subplots(figsize=(8, 3.4))
    grouped_bars(
        axes,
        [case.partition(",")[0] for case in cases],
        {name: [peaks[case, f"qsync {name}"] for case in cases] for name in variants},
    )
    axes.set_ylabel("peak memory / autocast in BF16")
    axes.set_ylim(0, 1.5)
    return figure


def codecs() -> Any:
    """Draw the speed of all-reduces relative to torch's FP16 hook, by codec and link."""
    rows = rows_of("compressed_links")
    names = ("qsgd8", "qsgd4", "qsgd2", "1bit*", "1bit", "aqgb", "fp16", "bf16", "fp32")
    links = {"100mbit": "100 Mbps", "1gbit": "1 Gbps", "loopback": "loopback"}
    speeds = {
        (row["rate"], row["method"]): row["to_half"]
        for row in rows
        if row["transport"] in (None, "point_to_point")
    }
    figure, axes = plt.subplots(figsize=(8, 3.4))
    grouped_bars(
        axes,
        names,
        {label: [speeds.get((rate, name), 0) for name in names] for rate, label in links.items()},
        fmt="%.1f",
    )
    axes.set_ylabel("speed / torch's FP16 hook")
    axes.set_yscale("log")
    axes.set_ylim(0.4, 30)
    axes.yaxis.set_major_formatter("{x:g}")
    return figure


def grouped_bars(
    axes: Any, groups: Sequence[str], bars: Mapping[str, Sequence[float]], fmt: str = "%.2f"
) -> None:
    """Draw a bar per group and series, with a dashed line at the peer's 1."""
    width = 0.85 / len(bars)
    for index, (label, heights) in enumerate(bars.items()):
        offset = (index - (len(bars) - 1) / 2) * width
        places = [group + offset for group in range(len(groups))]
        drawn = axes.bar(places, heights, 0.92 * width, color=PALETTE[index], label=label)
        axes.bar_label(drawn, fmt=fmt, fontsize=7, padding=2)
    axes.axhline(1, color=GREY, linewidth=1, linestyle="--", zorder=0)
    axes.set_xticks(range(len(groups)), groups)
    axes.legend(ncols=len(bars), loc="upper right")


def accuracy() -> Any:
    """Draw the accuracy of a ResNet on Fashion-MNIST by format, with each seed."""
    rows = {row["format"]: row["each"] for row in rows_of("convergence")}
    formats = ("fp32", "bf16", "int8", "int8_grad")
    figure, axes = plt.subplots(figsize=(4.2, 3.4))
    dots(axes, {name: [100 * seed for seed in rows[name]] for name in formats}, mean=True)
    axes.set_ylabel("test accuracy, %")
    axes.set_ylim(88, 92)
    return figure


def kernels() -> Any:
    """Draw the speed of INT8 products with quantization relative to oneDNN in BF16, one thread."""
    speeds: dict[str, list[float]] = {}
    for row in rows_of("cpu_kernels", threads=1):
        if row["name"] == "int8" and "product alone" not in row["what"]:
            kind = "convolution" if "stride" in row["case"] else "linear"
            speeds.setdefault(f"{kind}\n{row['what']}", []).append(row["faster_than_bf16"])
    figure, axes = plt.subplots(figsize=(8, 3.4))
    dots(axes, speeds)
    axes.axhline(1, color=GREY, linewidth=1, linestyle="--", zorder=0)
    axes.set_ylabel("speed / oneDNN in BF16")
    axes.set_ylim(0)
    return figure


def prediction() -> Any:
    """Draw the signed errors of predicted step times and peak memory of mixed plans."""
    steps: dict[str, list[float]] = {}
    for row in rows_of("replay_accuracy"):
        if row["method"] == "mapper" and "clock" not in row["case"]:
            steps[f"{_model(row)}\none device"] = list(row["each_%"].values())
    for row in rows_of("ddp_accuracy", threads=1):
        if row["method"] == "replayed":
            steps[f"{_model(row)}\ntwo ranks"] = row["each_%"]
    peaks: dict[str, list[float]] = {}
    for row in rows_of("memory_accuracy"):
        if row["of"] == "step" and "real_mb" in row:
            peaks.setdefault(_model(row), []).append(row["error"])
    figure, panels = plt.subplots(2, figsize=(8, 5.4), sharey=True)
    for axes, errors, title in zip(panels, (steps, peaks), ("step time", "memory"), strict=True):
        dots(axes, errors)
        axes.axhline(0, color=GREY, linewidth=1, linestyle="--", zorder=0)
        axes.set_ylabel("error, %")
        axes.set_title(f"predicted {title}, a dot per plan")
    return figure


def _model(row: Row) -> str:
    return str(row["case"]).partition(",")[0]


def dots(axes: Any, groups: Mapping[str, Sequence[float]], mean: bool = False) -> None:
    """Draw a column of dots per group, and the mean as a line if `mean`."""
    for place, values in enumerate(groups.values()):
        axes.scatter([place] * len(values), values, color=BLUE, s=18, alpha=0.75, linewidth=0)
        if mean:
            axes.hlines(sum(values) / len(values), place - 0.3, place + 0.3, color=ORANGE)
    axes.set_xticks(range(len(groups)), list(groups))


def duo_curves() -> Any:
    """Draw the training loss of rank 0 in FP32, with qsgd2 and with DUO."""
    panels: dict[str, dict[str, Sequence[tuple[float, float]]]] = {}
    for row in rows_of("codec_accuracy"):
        if row["method"] in ("fp32", "qsgd2", "duo0", "duo1", "duo2", "duo4"):
            part = 100 / len(row["loss"])
            panels.setdefault(row["task"], {})[row["method"]] = [
                ((index + 0.5) * part, loss) for index, loss in enumerate(row["loss"])
            ]
    compared = {task: lines for task, lines in panels.items() if len(lines) > 1}
    return curves(compared, "share of the training, %", "loss")


def slow_links() -> Any:
    """Draw accuracy against seconds of training, by link and codec."""
    panels: dict[str, dict[str, Sequence[tuple[float, float]]]] = {}
    for row in rows_of("slow_links"):
        points = [(seconds, 100 * reached) for seconds, reached in row["curve"]]
        panels.setdefault(row["link"], {})[row["method"]] = points
    return curves(panels, "training time, s", "accuracy, %")


def curves(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], across: str, up: str
) -> Any:
    """Draw panels (title to series) next to each other; a series has one colour in all panels."""
    figure, grid = plt.subplots(1, len(panels), figsize=(8, 3.4), squeeze=False)
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    for axes, (title, series) in zip(grid[0], panels.items(), strict=True):
        for name, points in series.items():
            axes.plot(*zip(*points, strict=True), color=PALETTE[names.index(name)], label=name)
        axes.set(title=title, xlabel=across, ylabel=up)
        axes.legend()
    return figure


def indicators() -> Any:
    """Draw the variance of each operator by three indicators against Monte Carlo."""
    figure, panels = plt.subplots(1, 3, figsize=(8, 3.2), sharex=True, sharey=True)
    for axes, method in zip(panels, ("second_order", "injected", "paper"), strict=True):
        for precision, color in {"bf16": ORANGE, "int8": BLUE}.items():
            points = [
                point
                for row in rows_of("sensitivity")
                if row["precision"] == precision and "each" in row
                for point in zip(row["each"]["monte_carlo"], row["each"][method], strict=True)
                if all(point)
            ]
            axes.scatter(
                *zip(*points, strict=True),
                s=8,
                color=color,
                alpha=0.6,
                linewidth=0,
                label=precision,
            )
        axes.axline((1, 1), (10, 10), color=GREY, linewidth=1, linestyle="--", zorder=0)
        axes.set(xscale="log", yscale="log", title=method, xlabel="variance, Monte Carlo")
    panels[0].set_ylabel("variance, predicted")
    panels[0].legend()
    return figure


CHARTS: tuple[Callable[[], Any], ...] = (
    speed,
    accuracy,
    kernels,
    memory,
    codecs,
    prediction,
    duo_curves,
    slow_links,
    indicators,
)


if __name__ == "__main__":
    main()
