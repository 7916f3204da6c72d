"""Tables of the communication pages, generated from benchmark results.

Invariant: each number is a rounded number of the result file that is named above the table.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.support.experiment_tables import Row, accuracy_of, percent, rows_of, source, table_of
from tests.support.pages import markdown


def codec_accuracy() -> str:
    return _trainings("codec_accuracy")


def codec_parameters() -> str:
    return _trainings("codec_parameters")


def two_level_accuracy() -> str:
    return _trainings("two_level_accuracy")


def _trainings(name: str) -> str:
    columns: dict[str, Callable[[Row], str]] = {
        "network": lambda row: row["task"],
        "gradients": lambda row: f"`{row['method']}`",
        "accuracy": accuracy_of,
        "points above FP32": lambda row: (
            "" if row["method"] == "fp32" else f"{row['points']:+.2f} ± {row['error']:.2f}"
        ),
        "coding error": lambda row: f"{row['noise']:.3g}" if "noise" in row else "",
        "seeds": lambda row: str(len(row["each"])),
        "date": lambda row: row.get("date", ""),
    }
    sizes = dict.fromkeys(f"{row['task']}: {row['size']}" for row in rows_of(name) if "size" in row)
    return "\n".join([table_of(name, columns), "", *(f"{size}." for size in sizes)])


def duo_overlap() -> str:
    """Return step times by number of micro-batches, and the hidden share of the reductions."""
    steps: dict[int, dict[str, Row]] = {}
    for row in rows_of("duo_overlap"):
        steps.setdefault(row["micro-batches"], {})[row["method"]] = row
    codecs = ["none", "1bit*", "duo1", "fp32"]
    rows = (
        [str(count), *(f"{by_codec[codec]['seconds']:.2f} s" for codec in codecs), percent(hidden)]
        for count, by_codec in steps.items()
        if (hidden := by_codec["duo1"]["hidden"]) is not None
    )
    head = ["micro-batches", "no reduction", *(f"`{codec}`" for codec in codecs[1:]), "hidden"]
    return f"{source('duo_overlap')}\n\n{markdown(head, rows)}"


def aqgb_fig3() -> str:
    def with_ideal(row: Row, measured: str, ideal: str) -> str:
        text = percent(row[measured])
        return text if row.get(ideal) is None else f"{text} ({percent(row[ideal])})"

    columns: dict[str, Callable[[Row], str]] = {
        "link": lambda row: row["link"],
        "method": lambda row: row["method"],
        "overlap": lambda row: with_ideal(row, "overlap", "by the rule"),
        "paper": lambda row: "" if row["paper"] is None else f"{row['paper']:.0%}",
        "to 0.68 s": lambda row: with_ideal(row, "overlap_last", "rule_last"),
        "all delivered at": lambda row: f"{row['end']:.3f} s",
        "ratios": lambda row: (
            "" if row["method"] == "fp32" else ", ".join(f"{ratio:.2f}" for ratio in row["ratios"])
        ),
    }
    return table_of("aqgb_fig3", columns)


def gpu_codecs() -> str:
    """Return the time of codecs on a GPU for 100 MB."""
    times: dict[str, dict[str, float]] = {}
    for row in rows_of("gpu_codecs"):
        name, size = row["case"].split(", ")
        if size == "100 MB":
            times.setdefault(name, {})[row["name"]] = row["microseconds"]
    kernels = list(dict.fromkeys(kernel for row_times in times.values() for kernel in row_times))
    rows = (
        [f"`{name}`", *(f"{row_times[kernel]:,.0f}" for kernel in kernels)]
        for name, row_times in times.items()
    )
    return markdown(["codec", *kernels], rows)


def gradient_codecs() -> str:
    """Return the speed of codecs with AVX-512 relative to memcpy."""

    def times(operation: str) -> Callable[[Row], str]:
        return lambda row: f"{row[f'{operation}_to_copy']:.2f}"

    columns: dict[str, Callable[[Row], str]] = {
        "codec": lambda row: f"`{row['codec']}`",
        "bits": lambda row: f"{row['bits']:.4g}",
        "encode": times("encode"),
        "decode into an empty buffer": times("read"),
        "decode and add": times("decode"),
    }
    return table_of("gradient_codecs", columns, lambda row: row["isa"] == "avx512")


def slow_links() -> str:
    plain = {
        row["link"]: row["seconds to aim"]
        for row in rows_of("slow_links")
        if row["method"] == "fp32"
    }
    columns: dict[str, Callable[[Row], str]] = {
        "link": lambda row: row["link"],
        "gradients": lambda row: f"`{row['method']}`",
        "step": lambda row: f"{1e3 * row['seconds a step']:.1f} ms",
        "accuracy": accuracy_of,
        "time to target": lambda row: f"{row['seconds to aim']:.1f} s",
        "speedup over FP32": lambda row: f"{plain[row['link']] / row['seconds to aim']:.2f}",
    }
    return table_of("slow_links", columns)


TABLES = {
    made.__name__: made
    for made in (
        codec_accuracy,
        codec_parameters,
        two_level_accuracy,
        duo_overlap,
        aqgb_fig3,
        slow_links,
        gradient_codecs,
        gpu_codecs,
    )
}
