"""Page docs/benchmarks.md from benchmarks/results: `make docs-figures`.

Each number summarizes a column of a result file. The last column of a table counts the cases that
miss their goal, with the name of the worst one.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks.md"

Row = Mapping[str, Any]
Run = Mapping[str, Any]
Value = str | Callable[[Row], float]

INTRODUCTION = """\
# Benchmarks

`make docs-figures` writes this page from `benchmarks/results`. Each row of a table summarizes a
column of a result file over all its cases. Speeds and times are ratios to the peer that the row
names, and the goal of such a ratio is 1. The last column counts the cases that miss the goal and
names one. Below each table is the origin of each file, with the command, whose `--threads` sets the
number of threads. Rows that name no number of threads come from the first run of the origin.
Results are as old as their date: the code may have changed since. Methods and causes are in
[experiments](experiments.md), [communication benchmarks](communication-benchmarks.md),
[CPU kernels](kernels-cpu.md) and [GPU tests](gpu-testing.md).
"""


@dataclass(frozen=True)
class Figure:
    """A row of a table.

    Attributes:
        result: name of the result file.
        label: what is summarized, with its unit.
        value: name of a column, or a function of a row.
        where: the rows that count; without it, all that have the column.
        form: format of a value.
        least, most: goal, as a lower or an upper limit of the values.
        met: name of the column that says whether a row meets the goal of its own.
        threads: threads of the run, where the file has several.
    """

    result: str
    label: str
    value: Value
    where: Callable[[Row], bool] = bool
    form: str = "{:.2f}"
    least: float | None = None
    most: float | None = None
    met: str | None = None
    threads: int | None = None


def having(**columns: object) -> Callable[[Row], bool]:
    """Return a predicate of rows with these values."""
    return lambda row: all(row.get(name) == value for name, value in columns.items())


def has(column: str) -> Callable[[Row], bool]:
    """Return a predicate of rows with a column."""
    return lambda row: column in row


def magnitude(column: str) -> Callable[[Row], float]:
    return lambda row: abs(row[column])


def ratio(name: str, column: str, peer: Mapping[str, str], *keys: str) -> Callable[[Row], float]:
    """Return the ratio of a row's `column` to that of the peer with the same `keys`."""
    value_of = _peers(name, column, peer, keys)
    return lambda row: float(row[column] / value_of(row))


def points(name: str, peer: Mapping[str, str], *keys: str) -> Callable[[Row], float]:
    """Return the percentage points of a row's accuracy above that of the peer."""
    value_of = _peers(name, "accuracy", peer, keys)
    return lambda row: float(100 * (row["accuracy"] - value_of(row)))


def _peers(
    name: str, column: str, peer: Mapping[str, str], keys: Sequence[str]
) -> Callable[[Row], float]:
    rows = filter(having(**peer), runs_of(name)[0]["rows"])
    values = {tuple(row[key] for key in keys): row[column] for row in rows}
    return lambda row: float(values[tuple(row[key] for key in keys)])


def runs_of(name: str) -> list[Run]:
    """Return the runs of a result file, one per machine and number of threads."""
    results = json.loads((RESULTS / f"{name}.json").read_text())
    return [results, *results.get("others", [])]


def page() -> str:
    """Return the text of the page."""
    parts = [INTRODUCTION]
    for title, figures in SUBJECTS.items():
        parts.append(f"## {title}\n")
        parts += [
            f"![{text}](images/{chart}.svg)\n" for chart, text in CHARTS.get(title, {}).items()
        ]
        parts.append("\n".join([*table(figures), ""]))
        parts.append("\n".join([*map(origin, results(figures)), ""]))
    return "\n".join(parts)


def results(figures: Iterable[Figure]) -> list[str]:
    """Return the names of the result files, each once."""
    return list(dict.fromkeys(figure.result for figure in figures))


def table(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield "| result | figure | cases | min | median | max | goal | missed |"
    yield "| --- | --- | --: | --: | --: | --: | --- | --- |"
    for result, group in itertools.groupby(figures, lambda figure: figure.result):
        labels = itertools.chain([f"`{result}`"], itertools.repeat(""))
        for label, figure in zip(labels, group, strict=False):
            yield f"| {' | '.join([label, figure.label, *summary(figure)])} |"


def summary(figure: Figure) -> list[str]:
    """Return the number of cases, the minimum, median, maximum, the goal and what misses it."""
    run = next(
        run
        for run in runs_of(figure.result)
        if figure.threads in (None, run["machine"].get("threads"))
    )
    values: list[tuple[float, Row]] = []
    for row in run["rows"]:
        if figure.where(row) and (callable(figure.value) or row.get(figure.value) is not None):
            values.append((_value(figure, row), row))
    numbers = [value for value, _ in values]
    middle = (min(numbers), statistics.median(numbers), max(numbers))
    cells = [str(len(numbers)), *map(figure.form.format, middle)]
    if len(numbers) == 1:
        cells[1] = cells[3] = ""
    return [*cells, *goal(figure, values)]


def _value(figure: Figure, row: Row) -> float:
    if callable(figure.value):
        return figure.value(row)
    return float(row[figure.value])


def goal(figure: Figure, values: Sequence[tuple[float, Row]]) -> tuple[str, str]:
    """Return the goal in words, and how many values miss it, with the worst case's name."""
    met = figure.met
    if met is not None:
        values = [(value, row) for value, row in values if met in row]
        missed = [(value, row) for value, row in values if not row[met]]
        text, worst = "of each case", "such as"
    elif figure.least is not None:
        missed = [(value, row) for value, row in values if value < figure.least]
        missed.sort(key=lambda item: item[0])
        text, worst = f"≥\u00a0{_limit(figure.least, figure.form)}", "worst:"
    elif figure.most is not None:
        missed = [(value, row) for value, row in values if value > figure.most]
        missed.sort(key=lambda item: -item[0])
        text, worst = f"≤\u00a0{_limit(figure.most, figure.form)}", "worst:"
    else:
        return "", ""
    if not missed:
        return text, "none"
    return text, f"{len(missed)} of {len(values)}, {worst} {case_of(missed[0][1])}"


def _limit(value: float, form: str) -> str:
    return re.sub(r"\.0+(?=%|$)", "", form.format(value)).removeprefix("+")


def case_of(row: Row) -> str:
    """Return the name of a row: its first columns with text, or its seed."""
    texts = [value for name, value in row.items() if name in _NAMES and isinstance(value, str)]
    return ", ".join(filter(None, texts[:3])) or f"seed {row['seed']}"


_NAMES = (
    "case",
    "model",
    "network",
    "task",
    "device",
    "cluster",
    "fleet",
    "rate",
    "link",
    "codec",
    "isa",
    "what",
    "method",
    "name",
    "product",
    "gradients",
)


def origin(name: str) -> str:
    """Return an item of a list: what a result file measures, its command, machines and dates."""
    first, command = _origin(name)
    runs = runs_of(name)
    notes = [f" Note: {run['note'].rstrip('.')}." for run in runs[:1] if "note" in run]
    rows = sum(len(run["rows"]) for run in runs)
    link = f"[{rows} rows](../benchmarks/results/{name}.json)"
    return f"- **{name}**: {first} `{command}`; {_machines(runs)}; {link}.{''.join(notes)}"


def _origin(name: str) -> tuple[str, str]:
    """Return the first sentence of a benchmark's docstring, and the command that runs it."""
    if name in OTHERS:
        return OTHERS[name]
    kind, _, rest = name.partition("_")
    pattern = {True: f"gpu/{rest}.py", False: f"[!g]*/{name}.py"}[kind == "gpu"]
    (path,) = (ROOT / "benchmarks").glob(pattern)
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n")[0], f"python {path.relative_to(ROOT)}"


def _machines(runs: Sequence[Run]) -> str:
    """Return machine, kernels and torch of the runs, each with its threads and dates."""
    result: dict[str, list[str]] = {}
    for run in runs:
        machine, torch = run["machine"], run["versions"]["torch"]
        days = sorted({run["date"][:10], *(row["date"] for row in run["rows"] if "date" in row)})
        when = " to ".join(dict.fromkeys((days[0], days[-1])))
        if machine["cuda"]:
            result[f"{machine['cuda']}, torch {torch}"] = [when]
            continue
        where = f"{machine['cpu']}, {machine['kernels']} kernels, torch {torch}"
        result.setdefault(where, []).append(f"{_threads(machine['threads'])} {when}")
    return "; ".join(f"{where}, {', '.join(when)}" for where, when in result.items())


def _threads(threads: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}"


OTHERS = {
    "cuda_compile": (
        "Compilation of all CUDA kernels for each architecture, without a GPU.",
        "make test-cuda-compile",
    ),
    "hybrid_batches": (
        "Hybrid training on two ranks, whose images are planned, too.",
        "python benchmarks/plans/hybrid.py --plan-batches --runs 5",
    ),
    "resnet_codecs": (
        "ResNet-8 with the gradient codecs of claims, 14 seeds.",
        'python benchmarks/paper/codec_accuracy.py --only "ResNet-8, i" --seeds 14 --method qsgd16 '
        "--method qsgd8 --method qsgd4 --method qsgd2 --method 1bit --method '1bit*' "
        "--method aqgb12 --method duo4 --method duo0",
    ),
    "one_bit": (
        "ResNet-8 with two-level reductions in 8 bits and 1 bit, and DUO in 1 bit, 12 seeds.",
        "python benchmarks/paper/two_level_accuracy.py --only ResNet --seeds 12 --method duo1 "
        '--method "8 and 1 bits"',
    ),
    "gpu_tests": ("Tests of kernels, training and models on a GPU.", "make test-gpu"),
    "gpu_tune": (
        "Products by the kernels that `qsync tune` selects, compared with torch's.",
        "make bench-gpu GPU_BENCHES=tune",
    ),
}
"""Results without a script of their name: what they are, and their command."""


def _step_speed(
    variant: str, label: str, threads: int, peer: str = "autocast", least: float | None = 1
) -> Figure:
    return Figure(
        "step_time",
        f"{label}, {_threads(threads)}: speed / fastest {peer}",
        lambda row: 1 / row["to_peer"],
        having(variant=variant),
        least=least,
        threads=threads,
    )


def _peak(variant: str) -> Figure:
    label, where = (
        f"`{variant}`: peak memory / autocast in BF16",
        having(variant=f"qsync {variant}"),
    )
    return Figure("saved_memory", label, "peak_to_peer", where, most=1)


def _hybrid(name: str, less: float) -> list[Figure]:
    return [
        Figure(name, "step longer than uniform", "longer", form="{:+.1%}", most=0.02),
        Figure(name, "error of the predicted step", magnitude("off"), form="{:.1%}", most=0.05),
        Figure(name, "variance removed, compared with uniform", "less", form="{:.0%}", least=less),
        Figure(
            name,
            "accuracy above uniform, points",
            lambda row: 100 * (row["accuracy"] - row["uniform_accuracy"]),
            form="{:+.2f}",
            least=0,
        ),
    ]


def _kernel_speed(label: str, threads: int = 1, kind: str = "", **columns: object) -> Figure:
    return Figure(
        "cpu_kernels",
        f"{label}: speed / oneDNN in BF16",
        "faster_than_bf16",
        lambda row: kind in row["case"] and having(**columns)(row),
        least=1,
        threads=threads,
    )


def _quantized(scale: str, threads: int, most: float) -> Figure:
    return Figure(
        "quantize",
        f"FP32 to INT8, scale {scale}, {_threads(threads)}: time / copy",
        "to_copy",
        lambda row: row["name"] == "native stochastic" and f"float32 {scale}" in row["case"],
        most=most,
        threads=threads,
    )


def _to_copy(part: str, label: str, **columns: object) -> Figure:
    column = f"{part}_to_copy"
    text, met = f"{label}: speed / memcpy", f"{column} reached"
    return Figure("gradient_codecs", text, column, having(**columns), met=met)


def _more_accurate(result: str, plan: str, peer: Mapping[str, str], *keys: str) -> Figure:
    (column,) = peer
    text = f"`{plan}`: accuracy above {peer[column]}, points"
    value, where = points(result, peer, *keys), having(**{column: plan})
    return Figure(result, text, value, where, "{:+.2f}", least=0)


def _less(result: str, plan: str, peer: Mapping[str, str], *keys: str) -> Figure:
    (column,) = peer
    text = f"`{plan}`: variance / {peer[column]}"
    value, where = ratio(result, "variance", peer, *keys), having(**{column: plan})
    return Figure(result, text, value, where, most=1)


def _qsync(row: Row) -> bool:
    return str(row["name"]).startswith("qsync")


UNIFORM = {"method": "uniform"}
FLEET = ("model", "cluster", "devices")
CHARTS = {
    "Training steps on the CPU": {
        "speed": "Speed relative to the fastest autocast, by model and format",
        "memory": "Peak memory relative to autocast in BF16, by model and format",
    },
    "CPU kernels": {"kernels": "Speed of INT8 products relative to oneDNN in BF16, by product"},
    "Communication": {
        "codecs": "Speed of an all-reduce relative to torch's FP16 hook, by codec and link"
    },
    "Predictions": {
        "prediction": "Errors of predicted step times and memory, by model, a dot per plan"
    },
    "Experiments of the papers": {
        "accuracy": "Test accuracy of a ResNet by format, with each seed"
    },
}
STEPS = [
    _step_speed("qsync by default", "no options", 1, "autocast or FP32"),
    _step_speed("qsync fp32", "`fp32`", 1, "Inductor in FP32"),
    _step_speed("qsync bf16", "`bf16`", 1),
    _step_speed("qsync int8", "`int8`", 1),
    _step_speed("qsync int8_grad", "`int8_grad`", 1),
    _step_speed("qsync int8_grad, all", "`int8_grad`, `qsync_fx.optim.SGD`", 1),
    _step_speed("torchao int8", "torchao in INT8, for comparison", 1, least=None),
    _step_speed("qsync by default", "no options", 2, "autocast or FP32"),
    _step_speed("qsync bf16", "`bf16`", 2),
    _step_speed("qsync int8", "`int8`", 2),
    _step_speed("qsync int8_grad", "`int8_grad`", 2),
    _peak("bf16"),
    _peak("bf16, activation_recompute"),
    _peak("int8"),
    _peak("int8, activation_recompute"),
    Figure("small_calls", "qsync: time per call / Inductor", "ratio", _qsync, most=1),
    Figure("optimizers", "qsync: time / fastest of torch.optim", "to_peer", _qsync, most=1),
    Figure(
        "dropout",
        "step with `fast_dropout` / without the option",
        "ratio",
        having(name="qsync bf16, fast_dropout"),
        most=1,
    ),
    Figure(
        "huge_pages",
        "time of a step with huge pages / without",
        "ratio",
        lambda row: "copy" not in row["method"],
        most=1,
    ),
    Figure(
        "native_bf16",
        "time with native products / oneDNN",
        "of_onednn",
        lambda row: row["native products"] > 0,
        most=1,
    ),
    Figure("compile_time", "share of the passes in compile time", "pipeline_share", form="{:.1%}"),
    Figure("monitoring", "share of the monitor in a step", "share", form="{:.2%}"),
    Figure("against", "time of a step / an earlier commit", "to_before", having(what="step")),
    Figure("against", "compile time / an earlier commit", "to_before", having(what="compile")),
]
KERNELS = [
    _kernel_speed("INT8, linear layer", name="int8", what="layer"),
    _kernel_speed("INT8, linear layer, 2 threads", 2, name="int8", what="layer"),
    *(
        _kernel_speed(f"INT8, convolution, {product}", kind="stride", name="int8", what=product)
        for product in ("forward", "input gradient", "weight gradient")
    ),
    _kernel_speed("BF16 product", name="bf16 kernel"),
    Figure(
        "cpu_kernels",
        "activation in the epilogue: time / separate kernel",
        "of_behind",
        lambda row: row["name"].endswith("epilogue"),
        most=1,
        threads=1,
    ),
    _quantized("per row", 1, 1.0),
    _quantized("per tensor", 1, 1.2),
    _quantized("per row", 2, 1.0),
    _quantized("per tensor", 2, 1.2),
    Figure(
        "quantize",
        "time / Inductor, 1 thread",
        "to_inductor",
        having(name="native stochastic"),
        "{:.3f}",
        most=1,
        threads=1,
    ),
    Figure(
        "attention",
        "products in BF16: time / fused kernel",
        "to_fused",
        having(name="products bf16"),
        most=1,
    ),
    Figure("bf16_pays", "BF16: time / FP32, by size (FP32 runs above 1)", "to_fp32", most=1),
    Figure("casts", "casts in BF16", "casts", having(precision="bf16"), "{:.0f}"),
    Figure("casts", "quantizations in INT8", "quantizes", having(precision="int8"), "{:.0f}"),
]
COMMUNICATION = [
    *(
        Figure(
            "compressed_links",
            f"`{codec}`: speed / torch's FP16 hook",
            "to_half",
            having(method=codec),
            least=1,
        )
        for codec in ("qsgd8", "qsgd4", "qsgd2", "1bit*", "aqgb")
    ),
    Figure(
        "compressed_links",
        "all codecs: speed / torch's FP16 hook",
        "to_half",
        lambda row: not row["method"].startswith("torch"),
        least=1,
    ),
    Figure("compressed_links", "time / model of the link", "to_model", met="model reached"),
    Figure(
        "compressed_links",
        "1 Gbps: time of collectives over gloo / point to point",
        "to_pairwise",
        lambda row: row["rate"] == "1gbit" and row["to_pairwise"] is not None,
        most=1.1,
    ),
    Figure(
        "hierarchical_links",
        "1 Gbps: time of collectives over gloo / point to point",
        "to_pairwise",
        lambda row: row["rate"] == "1gbit" and row["to_pairwise"] is not None,
        most=1.1,
    ),
    _to_copy("encode", "encoding, AVX-512", isa="avx512_vnni"),
    _to_copy("read", "decoding, AVX-512", isa="avx512_vnni"),
    _to_copy("decode", "decoding and adding, AVX-512", isa="avx512_vnni"),
    _to_copy("encode", "encoding, all ISAs"),
    _to_copy("read", "decoding, all ISAs"),
    _to_copy("decode", "decoding and adding, all ISAs"),
    Figure("gradient_codecs", "encoding: speed / piquant", "times piquant", met="piquant reached"),
    Figure("hierarchical_links", "speed / torch's FP16 hook", "to_half", least=1),
    Figure("hierarchical_links", "time / prediction", "to_model"),
    Figure("loopback", "error of predicted steps, %", magnitude("error_%"), has("error_%")),
    Figure("loopback", "selected codec: step above the fastest", "regret", form="{:.1%}", most=0),
    *(
        Figure(
            "slow_links",
            f"`{codec}`: time to FP32's accuracy less 0.5 points / FP32",
            ratio("slow_links", "seconds to aim", {"method": "fp32"}, "link"),
            having(method=codec),
            most=1,
        )
        for codec in ("fp16", "qsgd8", "qsgd4", "aqgb")
    ),
    *(
        Figure(
            "codec_accuracy",
            f"`{codec}`: accuracy above FP32, points",
            "points",
            having(method=codec),
            "{:+.2f}",
        )
        for codec in (
            *("fp16", "bf16", "aqgb", "aqgb12", "qsgd16", "qsgd8", "qsgd4", "qsgd4h", "qsgd2"),
            *("1bit*", "1bit", "duo0", "duo1", "duo2", "duo4", "powerSGD_hook"),
        )
        if any(row["method"] == codec for row in runs_of("codec_accuracy")[0]["rows"])
    ),
    *(
        Figure(
            result,
            "accuracy above FP32, points",
            "points",
            lambda row: row["method"] != "fp32",
            "{:+.2f}",
        )
        for result in ("codec_parameters", "resnet_codecs", "one_bit", "two_level_accuracy")
    ),
    Figure(
        "duo_overlap",
        "8 or 16 micro-batches: time of DUO's slow reduction that is hidden / that can be",
        "hidden",
        lambda row: row["hidden"] is not None and row["micro-batches"] >= 8,
        "{:.0%}",
    ),
    Figure(
        "aqgb_fig3",
        "overlap with AQGB, as a share of communication, with the paper's links",
        "overlap",
        lambda row: row["method"] != "fp32" and row["link"] in ("1 Gbps", "650 Mbps and 1 Gbps"),
        "{:.0%}",
    ),
    Figure(
        "communication_study",
        "median error of predicted steps",
        "median",
        lambda row: row["target"] is not None,
        "{:.1%}",
        most=0.035,
    ),
]
PREDICTIONS = [
    Figure("replay_accuracy", "mean error per model, %", "step_mean_%", having(method="mapper")),
    Figure(
        "replay_accuracy", "largest error per model, %", "step_worst_%", having(method="mapper")
    ),
    Figure(
        "replay_accuracy",
        "sum of operators, largest error per model, %",
        "step_worst_%",
        having(method="additive, no casts or cascades"),
    ),
    Figure("ddp_accuracy", "mean error per model, %", "mean_%", having(method="replayed")),
    Figure("ddp_accuracy", "largest error per model, %", "worst_%", having(method="replayed")),
    Figure(
        "ddp_accuracy",
        "without correction for the machine's current speed, largest error, %",
        "worst_%",
        having(method="replayed, without calibration"),
    ),
    Figure(
        "ddp_accuracy", "without overlap, largest error, %", "worst_%", having(method="no overlap")
    ),
    Figure("memory_accuracy", "error of peak memory, %", magnitude("error"), has("real_mb")),
    *(
        Figure(
            result,
            f"`{method}`: rank correlation with quantized passes",
            method,
            has("floor"),
            least=least,
        )
        for result in ("sensitivity", "full_size_sensitivity")
        for method, least in {"second_order": 0.9, "injected": 0.95, "paper": None}.items()
    ),
    Figure(
        "catalog", "error of times on T4 and V100, mean per kind", "held_out_mape", form="{:.1%}"
    ),
    Figure(
        "replay_speed",
        "time of a replay / goal",
        lambda row: row["seconds"] / row["target"],
        lambda row: row["target"] is not None,
        most=1,
    ),
    Figure("profile_cost", "profile of BERT-base, minutes", "minutes", form="{:.1f}"),
]
PLANS = [
    Figure(
        "allocator",
        "`milp`: gap to the optimum / tolerance",
        lambda row: row["gap"] / row["goal"],
        most=1,
    ),
    Figure("allocator", "`milp`: solve time, s", "seconds"),
    Figure("allocator", "`paper`: variance above the optimum", "paper above", form="{:.1%}"),
    Figure("allocator", "uniform: variance above the optimum", "uniform above", form="{:.0%}"),
    Figure(
        "fleets",
        "`milp`: steps per second / uniform",
        ratio("fleets", "steps_per_second", {"allocator": "uniform"}, *FLEET),
        having(allocator="milp"),
        least=1,
    ),
    _less("fleets", "milp", {"allocator": "uniform"}, *FLEET),
    Figure(
        "joint_fleets",
        "batches and formats: throughput / best plan of one of them, at its variance",
        "speed",
        least=1.1,
    ),
    Figure(
        "joint_fleets",
        "batches and formats: variance / `milp` at equal batches, at its step time",
        "variance",
        having(plan="gains"),
        most=0.5,
    ),
    Figure(
        "joint_fleets",
        "batches and formats of all GPUs: throughput / uniform 16 bits, at its variance",
        "free speed",
        least=1.5,
    ),
    Figure(
        "joint_fleets",
        "batches and formats: gap to the lower bound",
        "gap",
        lambda row: "joint" in row["plan"],
        form="{:.1%}",
        most=0.01,
    ),
    Figure(
        "batch_interpolation",
        "batch sizes between measured ones: error of both passes, %",
        magnitude("error_%"),
        having(kind="within"),
        form="{:.1f}",
        most=3,
    ),
    *(
        Figure(
            "batch_move",
            f"first step with another batch, {shapes} shapes, s",
            "move_s",
            having(method=shapes),
            "{:.1f}",
        )
        for shapes in ("static", "automatic", "dynamic")
    ),
    Figure(
        "batch_move",
        "dynamic shapes: time of a step / static",
        "to_static",
        having(method="dynamic"),
    ),
    *_hybrid("hybrid", less=0.3),
    *_hybrid("hybrid_batches", less=0.5),
    Figure("hybrid_batches", "idle time of a rank, of the step", "idle", form="{:.1%}", most=0.03),
]
FLOOR = "int8, floor"
PAPERS = [
    Figure(
        "convergence",
        "low precision: accuracy above FP32, points",
        "points",
        lambda row: row["format"] not in ("fp32", FLOOR),
        "{:+.2f}",
        least=-0.3,
    ),
    Figure(
        "convergence",
        "INT8 rounded down: accuracy above FP32, points",
        "points",
        having(format=FLOOR),
        "{:+.2f}",
    ),
    _more_accurate("table2", "second_order", {"indicator": "random"}, "network"),
    _more_accurate("table2", "second_order, milp", {"indicator": "random"}, "network"),
    Figure("table3", "cost mapper: error of a step, %", "cost mapper, error_%"),
    Figure("table3", "dPRO's model: error of a step, %", "dPRO's view, error_%"),
    _more_accurate("table4", "ours", UNIFORM, "network", "cluster"),
    _less("table4", "ours", UNIFORM, "network", "cluster"),
    *(
        figure(name, plan, UNIFORM, "network", "cluster")
        for name in ("table4_unscaled", "table4_vgg")
        for plan in ("ours", "ours, paper's search")
        for figure in (_more_accurate, _less)
    ),
    _more_accurate("table6", "ours", UNIFORM, "network", "cluster"),
    _less("table6", "ours", UNIFORM, "network", "cluster"),
    Figure("fig4", "share of casts in an operator's time, %", "casts_%", form="{:.0f}"),
    _less("fig6", "ours", {"plan": "uniform"}),
    *(
        Figure(
            "zero_point",
            f"{scheme}: squared error of gradients / symmetric INT8 per tensor",
            f"ratio, {scheme}",
        )
        for scheme in ("zero point", "symmetric, per channel")
    ),
    Figure("fig8", "rank correlation of consecutive updates", "kept", has("kept")),
    Figure("fig8", "rank correlation of first and last ten updates", "early", has("early")),
]
GPU = [
    Figure("gpu_linear", "speed / `F.linear` in BF16", "to_bf16", has("met"), met="met"),
    Figure("gpu_tune", "tuned kernel: speed / torch", "ratio", least=1),
    Figure("gpu_quantize", "bandwidth / copy", "of_copy", has("met"), met="met"),
    Figure("gpu_codecs", "encode: bandwidth / copy", "of_copy", having(name="encode")),
    Figure("gpu_codecs", "decode: bandwidth / copy", "of_copy", having(name="decode")),
    Figure("gpu_predicted_steps", "error of predicted steps, %", "time_error", form="{:+.0f}"),
    Figure("gpu_predicted_steps", "error of predicted memory, %", "peak_error", form="{:+.0f}"),
    Figure("gpu_tests", "tests that failed, by part", "failed", form="{:.0f}", most=0),
    Figure("gpu_tests", "tests that passed, by part", "passed", form="{:.0f}"),
    Figure("cuda_compile", "kernels that do not compile", "failed", form="{:.0f}", most=0),
    Figure("cuda_compile", "registers", "registers", form="{:.0f}", most=255),
    Figure(
        "kernel_build",
        "first compilation of a BERT layer, s",
        "value",
        having(what="first compile, s"),
        "{:.0f}",
        met="met",
    ),
    Figure(
        "kernel_build",
        "load from the cache, ms",
        "value",
        having(what="from the cache, ms"),
        "{:.0f}",
        met="met",
    ),
    Figure("launch_path", "Python per kernel call, µs", "microseconds", has("met"), met="met"),
]
SUBJECTS = {
    "Training steps on the CPU": STEPS,
    "CPU kernels": KERNELS,
    "Communication": COMMUNICATION,
    "Predictions": PREDICTIONS,
    "Plans": PLANS,
    "Experiments of the papers": PAPERS,
    "GPU": GPU,
}


def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
