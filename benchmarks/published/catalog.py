"""Prediction error of the device catalog on published times of T4 and V100.
The times are of matrix products, convolutions and all-reduces. Each row is a device, format and
product; the last rows pool all products, of each device and format and of all, and give the
all-reduces. "points" is the number of measured times. "held_out_mape" and "held_out_median" are the
mean and median absolute relative error on shapes that the constants were not fitted to (10 folds by
shape; with --by-layer a convolution is held out at all batch sizes). "catalog_mape" is the mean
error of the catalog's constants on all shapes. --data names a folder with deepbench_gemm.csv and
deepbench_conv.csv (Baidu's DeepBench) and allreduce_v100_gpu*.csv.gz (nccl-tests); --measured names
a result of benchmarks/gpu/products.py to use instead. Without either option the script prints a
hint and ends. --write fits the constants to all shapes and writes them to the catalog.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qsync_fx import devices
from qsync_fx.devices.roofline import ConvolutionSpec, Tiles, interpolated
from qsync_fx.serialization.atomic_files import write_text

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.published.calibration import Point, fit
from benchmarks.published.fitting import Numbers
from benchmarks.support.harness import arguments, by_size, finish

CATALOG = Path(devices.__file__).with_name("catalog")
MARK = "# Fitted by benchmarks/published/catalog.py; what is above is written by hand."
FORMATS = {"fp32": "fp32", "fp16_mixed": "fp16", "int8": "int8"}
PRODUCTS = {
    "output": "fwd_ms",
    "input_gradient": "bwd_input_ms",
    "weight_gradient": "bwd_weight_ms",
}
SIZES = ("N", "C", "H", "W", "K", "R", "S", "stride_h", "stride_w", "pad_h", "pad_w")
FOLDS = 10
SOURCE = "fitted to the times of {} that DeepBench publishes; errors: docs/device-catalog.md"
AT_HAND = (
    "fitted to the times of {} in benchmarks/results/gpu_products.json, with their errors in "
    "docs/device-catalog.md"
)

Write = Callable[[str, Mapping[tuple[str, str], Mapping[str, Any]]], None]


def gemms(folder: Path) -> list[Point]:
    with open(folder / "deepbench_gemm.csv") as file:
        return [
            Point(
                row["device"].lower(),
                FORMATS[row["precision"]],
                "gemm",
                (int(row["M"]), int(row["N"]), int(row["K"])),
                (row["transA"] + row["transB"]).lower(),
                float(row["time_ms"]) * 1e-3,
            )
            for row in csv.DictReader(file)
        ]


def convolutions(folder: Path) -> list[Point]:
    with open(folder / "deepbench_conv.csv") as file:
        return [
            Point(
                row["device"].lower(),
                FORMATS[row["precision"]],
                product,
                tuple(int(row[size]) for size in SIZES),
                "",
                float(row[column]) * 1e-3,
            )
            for row in csv.DictReader(file)
            for product, column in PRODUCTS.items()
            if row[column]
        ]


def measured(file: Path) -> list[Point]:
    """Return the times in a result of gpu/products.py; a GPU's last word names its device."""
    records = json.loads(file.read_text())
    return [
        Point(
            run["machine"]["cuda"].split()[-1].lower(),
            row["precision"],
            row["case"],
            tuple(row["shape"]),
            row.get("layout", ""),
            row["seconds"],
        )
        for run in (records, *records.get("others", []))
        for row in run["rows"]
        if "precision" in row and "seconds" in row
    ]


def folds(shapes: Sequence[Any]) -> dict[Any, int]:
    distinct = sorted(set(shapes))
    np.random.default_rng(0).shuffle(distinct)
    return {tuple(shape): index % FOLDS for index, shape in enumerate(distinct)}


def held_out(points: Sequence[Point], quick: bool, by_layer: bool) -> Numbers:
    """Return the seconds predicted for each point by constants fitted without its shape.

    With `by_layer`, the fit excludes a convolution's layer at all batch sizes.
    """
    shapes = [
        point.shape[1:] if by_layer and point.product != "gemm" else point.shape for point in points
    ]
    fold = folds(shapes)
    result = np.zeros(len(points))
    for number in range(by_size(quick, 1, FOLDS)):
        outside = np.array([fold[shape] == number for shape in shapes])
        training = [p for p, out in zip(points, outside, strict=True) if not out]
        fitted = fit(training, *_EFFORT[quick])
        result[outside] = fitted.seconds([p for p, out in zip(points, outside, strict=True) if out])
    return result


_EFFORT = {False: (15, 3), True: (3, 0)}
"""(steps, tries) of a fit, by whether it is quick."""


def catalogued(point: Point) -> float:
    device = devices.get(point.device)
    if point.product == "gemm":
        m, n, k = point.shape
        layout: Any = point.layout
        return device.gemm_seconds(m, n, k, point.precision, layout)
    *sizes, down, across, high, wide = point.shape
    product: Any = point.product
    n, c, h, w, k, r, s = sizes
    return device.conv_seconds(
        n, c, h, w, k, r, s, (down, across), (high, wide), point.precision, product
    )


def errors(seconds: Numbers, points: Sequence[Point]) -> Numbers:
    return np.asarray(np.abs(seconds / np.array([point.seconds for point in points]) - 1))


def products(
    points: Sequence[Point], quick: bool, by_layer: bool, only: Sequence[str], write: Write | None
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    result: dict[tuple[str, str, str], dict[str, Any]] = {}
    # All devices share one fit of the convolutions, because few were measured.
    keys = sorted(
        {(p.product, p.precision, p.device if p.product == "gemm" else "") for p in points}
    )
    for product, precision, device in keys:
        if only and product not in only:
            continue
        some = [
            p
            for p in points
            if (p.product, p.precision) == (product, precision) and device in ("", p.device)
        ]
        if write is not None:
            fitted = fit(some, *_EFFORT[quick])
            result |= {
                (device_name, precision, product): fitted.of(device_name)
                for device_name in fitted.problem.devices
            }
            continue
        seconds = held_out(some, quick, by_layer)
        for device_name in sorted({point.device for point in some}):
            indices = np.array(
                [
                    p.device == device_name and done > 0
                    for p, done in zip(some, seconds, strict=True)
                ]
            )
            mine = [p for p, of in zip(some, indices, strict=True) if of]
            out, all_of = (
                errors(seconds[indices], mine),
                errors(np.array([catalogued(p) for p in mine]), mine),
            )
            rows.append(
                {
                    "device": device_name,
                    "precision": precision,
                    "product": product,
                    "points": len(mine),
                    "held_out_mape": float(out.mean()),
                    "held_out_median": float(np.median(out)),
                    "catalog_mape": float(all_of.mean()),
                }
            )
            print(rows[-1], flush=True)
    if write is not None:
        for device_name in sorted({name for name, _, _ in result}):
            write(
                device_name,
                {key[1:]: values for key, values in result.items() if key[0] == device_name},
            )
    return rows


def pooled(
    rows: Sequence[dict[str, Any]], device: str = "all", precision: str = "all"
) -> dict[str, Any]:
    """Return the mean error over all products of these rows; each measured time counts once."""
    points = sum(row["points"] for row in rows)
    means = {
        key: sum(row["points"] * row[key] for row in rows) / points
        for key in ("held_out_mape", "catalog_mape")
    }
    named = {"device": device, "precision": precision, "product": "all products"}
    return {**named, "points": points, **means}


def summaries(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the pooled errors of each device and format, and of all of them."""
    keys = sorted({(row["device"], row["precision"]) for row in rows})
    groups = [[row for row in rows if (row["device"], row["precision"]) == key] for key in keys]
    each = [pooled(group, *key) for key, group in zip(keys, groups, strict=True)]
    return [*each, pooled(rows)]


def reductions(folder: Path) -> dict[int, tuple[Numbers, Numbers]]:
    """Return sizes in bytes and seconds of V100 all-reduces, by number of ranks."""
    result = {}
    for path in sorted(folder.glob("allreduce_v100_gpu*.csv.gz")):
        with gzip.open(path, "rt") as file:
            rows = [line for line in list(csv.reader(file))[1:] if line]
        table = np.array([[float(row[0]), float(row[3]) * 1e-9] for row in rows])
        result[int(path.name.removeprefix("allreduce_v100_gpu").removesuffix(".csv.gz"))] = (
            table[:, 0],
            table[:, 1],
        )
    return result


def knots(size: Numbers, seconds: Numbers) -> tuple[list[float], list[float]]:
    """Return knots, at powers of two, of a piecewise linear fit in log-log space."""
    sizes = [
        float(2**power)
        for power in range(int(math.log2(size.min())), math.ceil(math.log2(size.max())) + 1)
    ]
    basis = np.stack([np.interp(np.log(size), np.log(sizes), row) for row in np.eye(len(sizes))], 1)
    values = np.exp(np.linalg.lstsq(basis, np.log(seconds), rcond=None)[0])
    return sizes, [float(value) for value in np.maximum.accumulate(values)]


def collectives(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for ranks, (size, seconds) in reductions(folder).items():
        out = np.arange(len(size)) % FOLDS
        predicted = np.zeros(len(size))
        for number in range(FOLDS):
            sizes, values = knots(size[out != number], seconds[out != number])
            predicted[out == number] = [
                interpolated(sizes, values, size_bytes) for size_bytes in size[out == number]
            ]
        error = np.abs(predicted / seconds - 1)
        catalog_seconds = np.array(
            [devices.get("v100").allreduce_seconds(float(size_bytes), ranks) for size_bytes in size]
        )
        rows.append(
            {
                "device": "v100",
                "precision": "",
                "product": f"all-reduce of {ranks}",
                "points": len(size),
                "held_out_mape": float(error.mean()),
                "held_out_median": float(np.median(error)),
                "catalog_mape": float(np.abs(catalog_seconds / seconds - 1).mean()),
            }
        )
    return rows


def written(
    device: str,
    constants: Mapping[tuple[str, str], Mapping[str, Any]],
    folder: Path | None,
    source: str = SOURCE,
) -> None:
    """Replace the fitted constants in a device's catalog file."""
    path = CATALOG / f"{device}.toml"
    lines = [path.read_text().partition(MARK)[0].rstrip(), "", MARK]
    for (precision, product), values in sorted(constants.items()):
        gemm = product == "gemm"
        table, noun = f"convolutions.{precision}.{product}", "convolutions"
        usual: Tiles = ConvolutionSpec(1.0, "")
        if gemm:
            table, noun, usual = f"products.{precision}", "matrix products", Tiles(1.0, "")
        lines += ["", f"[{table}]", f'source = "{source.format(noun)}"']
        lines += [
            f"{name} = {_toml(value)}"
            for name, value in values.items()
            if value != getattr(usual, name)
        ]
    if device == "v100" and folder is not None:
        for ranks, measured in reductions(folder).items():
            sizes, seconds = knots(*measured)
            lines += [
                "",
                "[[reductions]]",
                f"ranks = {ranks}",
                f"bytes = {[int(size) for size in sizes]}",
            ]
            lines += [f"seconds = [{', '.join(f'{size:.4g}' for size in seconds)}]"]
            lines += [
                'source = "fitted to the times of nccl-tests on one server with NVLink, 1 MiB to '
                '1 GiB"'
            ]
    write_text(path, "\n".join(lines) + "\n")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(part)}" for name, part in value.items()) + "}"
    return f"{value:.4g}" if isinstance(value, float) else str(value).lower()


def main() -> None:
    options = arguments(
        __doc__,
        data={"type": Path, "metavar": "FOLDER", "help": "where the measured times lie"},
        measured={"type": Path, "metavar": "FILE", "help": "times of benchmarks/gpu/products.py"},
        only={
            "nargs": "+",
            "default": (),
            "metavar": "PRODUCT",
            "help": "of gemm, output, input_gradient, weight_gradient",
        },
        by_layer={
            "action": "store_true",
            "help": "leave a convolution out at all batch sizes instead of one",
        },
        write={
            "action": "store_true",
            "help": "write constants fitted to all of them into the catalog",
        },
    )
    if (options.data is None) == (options.measured is None):
        print("give --data FOLDER or --measured FILE to compare the catalog with measured times")
        return
    if options.data is not None:
        points = [*gemms(options.data), *convolutions(options.data)]
        write: Write = partial(written, folder=options.data)
    else:
        points, write = measured(options.measured), partial(written, folder=None, source=AT_HAND)
    rows = products(
        points, options.quick, options.by_layer, options.only, write if options.write else None
    )
    if options.write:
        rows = []
    elif not options.only:
        rows += summaries(rows)
        if options.data is not None:
            rows += collectives(options.data)
    finish(options, rows)


if __name__ == "__main__":
    main()
