"""Tables of docs/experiments.md and docs/predictor.md, generated from benchmark results.

Invariant: each number is a rounded number of the result file that is named above the table.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.pages import markdown

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
Row = Mapping[str, Any]


def table2() -> str:
    columns: dict[str, Callable[[Row], str]] = {
        "network": lambda row: row["network"],
        "indicator": lambda row: row["indicator"],
        "accuracy": accuracy_of,
        "variance": lambda row: f"{row['variance']:.3g}",
        "memory": lambda row: f"{row['peak_mb']:.2f} of {row['allowed_mb']:.2f} MB",
        "T4": _operators,
    }
    return table_of("table2", columns)


def table3() -> str:
    """Return the errors of predicted step times, or a note if there is no result file."""
    if not (RESULTS / "table3.json").exists():
        return "Not measured at size."

    def off(view: str) -> Callable[[Row], str]:
        return lambda row: (
            f"{row[f'{view}, error_%']:.1f}% "
            f"({', '.join(f'{error:+.1f}' for error in row[f'{view}, each_%'])})"
        )

    columns: dict[str, Callable[[Row], str]] = {
        "plan": lambda row: row["plan"],
        "step": lambda row: f"{row['step_ms']:.0f} ms",
        "cost mapper (each)": off("cost mapper"),
        "without casts and propagation (each)": off("dPRO's view"),
    }
    return table_of("table3", columns)


def table4() -> str:
    return table_of("table4", {"network": lambda row: row["network"], **_ways("table4")})


def table4_unscaled() -> str:
    return table_of("table4_unscaled", _ways("table4_unscaled"))


def table6() -> str:
    return table_of("table6", _ways("table6"))


def fig6() -> str:
    columns: dict[str, Callable[[Row], str]] = {
        "plan": lambda row: row["plan"],
        "step": lambda row: f"{row['step_ms']:.1f} ms",
        "V100 waits": lambda row: f"{row['waiting_v100_ms']:.1f} ms",
        "T4 waits": lambda row: f"{row['waiting_t4_ms']:.1f} ms",
        "variance": lambda row: f"{row['variance']:.3g}",
        "T4": _operators,
    }
    return table_of("fig6", columns)


def fleets() -> str:
    """Return steps per second and variance of each allocator on 16 V100 and 16 T4."""
    by_case: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows_of("fleets"):
        if row["devices"] == 32 and row["allocator"] != "orderings":
            memory = {"A": "all", "B": "little"}[row["cluster"]]
            by_case.setdefault((row["model"], memory), {})[row["allocator"]] = row
    columns = ["uniform", "milp", "paper", "dynamic-batches", "full-precision"]
    rows = (
        [*case, *(_speed(by_allocator[name]) for name in columns)]
        for case, by_allocator in by_case.items()
    )
    return f"{source('fleets')}\n\n{markdown(['model', 'memory of a T4', *columns], rows)}"


def _speed(row: Row) -> str:
    if "steps_per_second" not in row or "memory" in (row["why not"] or ""):
        return "does not fit"
    variance = row["variance"]
    return f"{row['steps_per_second']:.2f}, {variance:{',.0f' if variance >= 100 else '.2g'}}"


def gpu_linear_missed() -> str:
    """Return the GPU matrix products and linear layers that miss their target speed."""
    columns: dict[str, Callable[[Row], str]] = {
        "shape": lambda row: row["case"].replace("^3", " cubed"),
        "step": lambda row: row["what"],
        "kernel or layer": lambda row: f"`{row['name']}`",
        "speed, of `F.linear` in BF16": lambda row: f"{row['to_bf16']:.2f}",
        "goal": lambda row: row["target"],
    }
    rows = [row for row in rows_of("gpu_linear") if row.get("met") is False]
    return markdown(list(columns), ([cell(row) for cell in columns.values()] for row in rows))


def zero_point() -> str:
    """Return the gradient error of INT8 with and without a zero point."""
    columns: dict[str, Callable[[Row], str]] = {
        "seed": lambda row: str(row["seed"]),
        "symmetric": lambda row: f"{row['symmetric']:.4f}",
        "with a zero point": lambda row: f"{row['zero point']:.4f}",
        "of symmetric": lambda row: f"{row['ratio, zero point']:.2f}",
        "symmetric, per channel": lambda row: f"{row['symmetric, per channel']:.4f}",
        "of symmetric per tensor": lambda row: f"{row['ratio, symmetric, per channel']:.2f}",
        "variance between batches": lambda row: f"{row['noise']:.2f}",
    }
    return table_of("zero_point", columns, lambda row: row["what"] == "model")


def fig8() -> str:
    columns: dict[str, Callable[[Row], str]] = {
        "network": lambda row: row["case"],
        "indicator": lambda row: row["method"],
        "updates": lambda row: str(row["updates"]),
        "from one update to the next": lambda row: f"{row['kept']:.2f}",
        "first ten to last ten": lambda row: f"{row['early']:.2f}",
    }
    return table_of("fig8", columns, lambda row: "kept" in row)


def convergence() -> str:
    columns: dict[str, Callable[[Row], str]] = {
        "format": lambda row: f"`{row['format']}`",
        "accuracy": accuracy_of,
        "per seed": lambda row: ", ".join(f"{100 * accuracy:.2f}" for accuracy in row["each"]),
        "points above FP32": lambda row: (
            "" if row["format"] == "fp32" else f"{row['points']:+.2f} ± {row['error']:.2f}"
        ),
    }
    return table_of("convergence", columns)


def hybrid() -> str:
    columns: dict[str, Callable[[Row], str]] = {
        "seed": lambda row: str(row["seed"]),
        "step": lambda row: f"{row['step_ms']:.1f} ms",
        "slower than uniform (goal 2%)": lambda row: f"{row['longer']:+.1%}",
        "prediction error (goal 5%)": lambda row: f"{row['off']:+.1%}",
        "less variance (goal 30%)": lambda row: f"{row['less']:.0%}",
        "additional waiting of rank 0": lambda row: f"{row['waits']:+.1%}",
        "memory, of the cap": lambda row: f"{row['peak_to_cap']:.0%}",
        "operators recovered to FP32": lambda row: str(row["recovered"]),
        "accuracy": lambda row: f"{row['accuracy']:.2%}",
        "uniform's": lambda row: f"{row['uniform_accuracy']:.2%}",
    }
    return table_of("hybrid", columns)


def hybrid_batches() -> str:
    columns: dict[str, Callable[[Row], str]] = {
        "seed": lambda row: str(row["seed"]),
        "images": lambda row: row["batches"],
        "step": lambda row: f"{row['step_ms']:.1f} ms",
        "longer than uniform": lambda row: f"{row['longer']:+.1%}",
        "prediction error (goal 5%)": lambda row: f"{row['off']:+.1%}",
        "less variance (goal 50%)": lambda row: f"{row['less']:.0%}",
        "idle (goal 3%)": lambda row: f"{row['idle']:.1%}",
        "memory, of the cap": lambda row: f"{row['peak_to_cap']:.0%}",
        "accuracy": lambda row: f"{row['accuracy']:.2%}",
        "uniform's": lambda row: f"{row['uniform_accuracy']:.2%}",
    }
    return table_of("hybrid_batches", columns)


def contributions() -> str:
    """Return predicted speed and variance of `hybrid_batches` plans relative to uniform BF16."""
    runs = [row["predicted"] for row in rows_of("hybrid_batches")]
    uniform = next(iter(runs[0]))

    def cells(choice: str) -> list[str]:
        pairs = [(run[choice], run[uniform]) for run in runs if run[choice] is not None]
        speed, variance = (
            [mine[column] / other[column] for mine, other in pairs]
            for column in ("images per second", "variance")
        )
        return [
            choice,
            f"{statistics.fmean(speed):.2f} ({min(speed):.2f} to {max(speed):.2f})",
            f"{statistics.fmean(variance):.3f}",
            f"{len(pairs)} of {len(runs)}",
        ]

    head = ["plan", "images per second / uniform", "variance / uniform", "runs with such a plan"]
    return f"{source('hybrid_batches')}\n\n{markdown(head, map(cells, runs[0]))}"


def joint_fleets() -> str:
    """Return a row per model and fleet: throughput and variance of plans relative to "uniform"."""
    plans: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows_of("joint_fleets"):
        if row["plan"] != "gains" and ("variance" not in row or row["why not"]):
            continue
        plans.setdefault((row["model"], row["fleet"]), {})[row["plan"]] = row
    names = {
        "formats": "qsync",
        "batches": "dynamic-batches",
        "recomputation": "checkpointing",
        "joint, least variance": "joint at its time",
        "joint, fastest": "joint at its variance",
    }

    def cells(key: tuple[str, str], rows_by_plan: Mapping[str, Row]) -> list[str]:
        base = rows_by_plan["uniform"]
        joint = [row for plan, row in rows_by_plan.items() if "joint" in plan]
        gap, took = (max(row[column] for row in joint) for column in ("gap", "found_in"))
        compared = [
            ", ".join(
                f"{rows_by_plan[plan][column] / base[column]:{form}}"
                for column, form in (("samples_per_second", ".2f"), ("variance", ".2g"))
            )
            if plan in rows_by_plan
            else "does not fit"
            for plan in names.values()
        ]
        free = rows_by_plan["gains"].get("free speed")
        return [
            *key,
            *compared,
            "" if free is None else f"{free:.2f}",
            f"{gap:.1%}, {took:.0f} s",
        ]

    head = ["model", "GPUs, 16 each", *names, "free", "largest gap, longest search"]
    table = markdown(head, [cells(key, rows_by_plan) for key, rows_by_plan in plans.items()])
    return f"{source('joint_fleets')}\n\n{table}"


def ddp_accuracy() -> str:
    columns: dict[str, Callable[[Row], str]] = {
        "model": lambda row: row["case"],
        "prediction": lambda row: row["method"],
        "pairs": lambda row: str(row.get("pairs", "")),
        "mean error": lambda row: f"{row['mean_%']:.1f}%",
        "maximum error": lambda row: f"{row['worst_%']:.1f}%",
        "bias": lambda row: f"{row['bias_%']:+.1f}%" if "bias_%" in row else "",
    }
    return table_of("ddp_accuracy", columns)


def replay_accuracy() -> str:
    """Return the mean and maximum error of predicted pass times of mixed plans by model."""
    by_way = {(row["case"], row["method"]): row for row in rows_of("replay_accuracy")}

    def off(method: str) -> Callable[[Row], str]:
        return lambda row: "{passes_mean_%:.1f}%, {passes_worst_%:.1f}%".format(
            **by_way[row["case"], method]
        )

    columns: dict[str, Callable[[Row], str]] = {
        "model": lambda row: row["case"],
        "plans": lambda row: str(row["plans"]),
        "step": lambda row: f"{row['step_ms']:.0f} ms",
        "predicted": off("mapper"),
        "from uniform plans only": off("mapper, uniform runs alone"),
        "sum of operators, without casts and propagation": off("additive, no casts or cascades"),
        "odd against even rounds": off("floor: odd against even rounds"),
    }
    return table_of("replay_accuracy", columns, lambda row: row["method"] == "mapper")


def huge_pages() -> str:
    columns: dict[str, Callable[[Row], str]] = {
        "step": lambda row: row["case"],
        "method": lambda row: row["method"],
        "without": lambda row: f"{row['without_ms']:.1f} ms",
        "with huge pages": lambda row: f"{row['huge_pages_ms']:.1f} ms",
        "ratio": lambda row: f"{row['ratio']:.2f}",
    }
    return table_of("huge_pages", columns)


TABLES = {
    made.__name__: made
    for made in (
        table2,
        table3,
        table4,
        table4_unscaled,
        table6,
        fig6,
        fig8,
        zero_point,
        convergence,
        hybrid,
        hybrid_batches,
        contributions,
        joint_fleets,
        ddp_accuracy,
        replay_accuracy,
        huge_pages,
        fleets,
        gpu_linear_missed,
    )
}


def table_of(
    name: str, columns: Mapping[str, Callable[[Row], str]], shown: Callable[[Row], bool] = bool
) -> str:
    rows = ([cell(row) for cell in columns.values()] for row in rows_of(name) if shown(row))
    return f"{source(name)}\n\n{markdown(list(columns), rows)}"


def source(name: str) -> str:
    """Return the machine, versions, date and path of a result file."""
    result = json.loads((RESULTS / f"{name}.json").read_text())
    machine = result["machine"]
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    versions = f"{machine['kernels']} kernels, torch {result['versions']['torch']}"
    file = f"{result['date'][:10]}, `benchmarks/results/{name}.json`"
    return f"{machine['cpu']}, {threads}, {versions}, {file}:"


def rows_of(name: str) -> Sequence[Row]:
    rows: Sequence[Row] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return rows


def accuracy_of(row: Row) -> str:
    return f"{100 * row['accuracy']:.2f} ± {100 * row['deviation']:.2f}%"


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _operators(row: Row) -> str:
    return ", ".join(f"{count} {fmt}" for fmt, count in sorted(row["operators"].items()))


def _ways(name: str) -> Mapping[str, Callable[[Row], str]]:
    """Return columns that compare methods with uniform precision by cluster and seed."""
    uniform = {_cluster(row): row["each"] for row in rows_of(name) if row["method"] == "uniform"}

    def more(row: Row) -> str:
        if row["method"] == "uniform":
            return ""
        points = [
            100 * (accuracy - other)
            for accuracy, other in zip(row["each"], uniform[_cluster(row)], strict=True)
        ]
        error = statistics.stdev(points) / math.sqrt(len(points)) if len(points) > 1 else 0.0
        return f"{statistics.fmean(points):+.2f} ± {error:.2f}"

    return {
        "cluster": lambda row: row["cluster"],
        "": lambda row: row["method"],
        "accuracy": accuracy_of,
        "points above uniform": more,
        "steps/s": lambda row: (
            "" if row["steps_per_second"] is None else f"{row['steps_per_second']:.4g}"
        ),
        "variance": lambda row: f"{row['variance']:.3g}",
        "memory of the T4": lambda row: (
            f"{row['peak_mb']:.1f}"
            + ("" if row["allowed_mb"] is None else f" of {row['allowed_mb']:.1f}")
            + " MB"
        ),
        "T4": _operators,
        "batches": lambda row: " + ".join(map(str, row["batches"])),
    }


def _cluster(row: Row) -> tuple[str, str]:
    return row["network"], row["cluster"]
