"""Error of step times predicted for compressed gradients from steps with FP32 gradients.
The data are samples per second of six networks on 2 to 16 GPUs, with MPI and NCCL, and gradients in
32 bits or compressed by QSGD to 16, 8, 4 or 2 bits or by 1bitSGD (Grubic et al., EDBT 2018,
data/communication_study.csv). For each primitive and number of GPUs, the two coefficients of
`Exchange` are fitted to the QSGD rows of all networks but one, and predict that
network's compressed steps from its 32-bit step. Columns: "median", "mean" and "worst" are the
relative errors of these predictions; "all" is the median error of `EXCHANGES`,
fitted to all networks; "without" is the median error of using the 32-bit step time
unchanged. 1bitSGD* has the bytes of its buckets, the seconds per byte of QSGD, and seconds per
element that are the median of the other networks. Rows with "speed" are the printed samples per
second of a codec, divided by the number with 32 bits, and "scaling" by the number of one GPU;
"predicted scaling" uses the coefficients of the other networks. Rows with "price" are the dollars
of a training on the cheapest of the study's EC2 instances, with the epochs of its Fig. 3. Rows with
"parameters" predict the speed of 8 bits with NCCL on 8 GPUs for a network with AlexNet's
computation and more parameters, as Fig. 16 does.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from qsync_fx.communication.codecs.onebit import Reshaped
from qsync_fx.communication.codecs.qsgd import Qsgd
from qsync_fx.errors import ProfileError
from qsync_fx.predictor.replayer.device_timeline import Array

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.harness import Row, arguments, finish

TABLE = Path(__file__).parent / "data" / "communication_study.csv"

FULL: Final = 4.0
"""Bytes of an uncompressed element."""


@dataclass(frozen=True)
class CollectiveSample:
    """Step measured with and without compression.

    Attributes:
        elements: number of elements of all gradients.
        element_bytes: bytes of a compressed element, including scales.
        without, seconds: duration of the step without and with compression.
    """

    elements: float
    element_bytes: float
    without: float
    seconds: float


@dataclass(frozen=True)
class Exchange:
    """Cost model of a gradient exchange for a number of devices.

        seconds = without - travel * (full bytes - bytes) + coding * elements

    Two coefficients describe an exchange: the exposed transfer time of a byte, which overlap with
    computation does not hide, and the additional time of an element for compression, independent
    of its width. The uncompressed step supplies all other times.

    Attributes:
        travel: seconds per byte.
        coding: seconds per element. It is negative if full-precision gradients use a slower path,
            as in the MPI results of the study, which send compressed gradients double-buffered.
    """

    travel: float
    coding: float

    def seconds(self, elements: float, element_bytes: float, without: float) -> float:
        """Return the duration of a step with compression, given its duration `without`."""
        return without - self.travel * elements * (FULL - element_bytes) + self.coding * elements

    def of(self, sample: CollectiveSample) -> float:
        """Return the predicted duration of a measured step."""
        return self.seconds(sample.elements, sample.element_bytes, sample.without)

    @classmethod
    def fit(cls, samples: Sequence[CollectiveSample]) -> Exchange:
        """Return the least-absolute-deviations fit to samples of several networks or widths.

        It minimises the mean relative error, so a misprint in a table has little influence.

        Raises:
            ProfileError: the samples do not determine both coefficients.
        """
        elements = np.array([item.elements for item in samples])
        saved = elements * (FULL - np.array([item.element_bytes for item in samples]))
        weights = 1 / np.array([item.seconds for item in samples])
        unknowns = np.stack([-saved, elements], axis=-1) * weights[:, None]
        gained = np.array([item.seconds - item.without for item in samples]) * weights
        scale = np.abs(unknowns).max(axis=0, initial=0.0)
        if len(samples) < 2 or np.linalg.matrix_rank(unknowns / np.where(scale > 0, scale, 1)) < 2:
            do = "give steps with gradients of several widths"
            raise ProfileError(
                f"{len(samples)} samples do not tell travelling from coding", where="samples", do=do
            )
        travel, coding = _least_deviations(unknowns / scale, gained) / scale
        return cls(float(travel), float(coding))


EXCHANGES: Final = {
    ("mpi", 2): Exchange(7.05e-10, -1.892e-09),
    ("mpi", 4): Exchange(8.164e-10, -2.841e-09),
    ("mpi", 8): Exchange(2.673e-09, -1.353e-09),
    ("mpi", 16): Exchange(4.457e-09, -2.785e-10),
    ("nccl", 2): Exchange(2.053e-10, 4.395e-10),
    ("nccl", 4): Exchange(1.812e-10, 2.881e-10),
    ("nccl", 8): Exchange(2.287e-10, 3.968e-10),
}
"""Coefficients by primitive and number of GPUs, fitted to all networks of the study.

The study is D. Grubic et al., "Synchronous Multi-GPU Deep Learning with Low-Precision
Communication: An Experimental Study", EDBT 2018: K80 GPUs of Amazon EC2 (p2), Fig. 10 and 11, QSGD
rows. The benchmark fits them and reports the error for other networks."""

_TURNS: Final = 200
_SMALLEST: Final = 1e-6


def _least_deviations(unknowns: Array, wanted: Array) -> Array:
    """Return the least-absolute-deviations solution by iteratively reweighted least squares."""
    result: Array = np.linalg.lstsq(unknowns, wanted, rcond=None)[0]
    for _ in range(_TURNS):
        trust = 1 / np.sqrt(np.abs(wanted - unknowns @ result) + _SMALLEST)
        result = np.linalg.lstsq(unknowns * trust[:, None], wanted * trust, rcond=None)[0]
    return result


@dataclass(frozen=True)
class Cell:
    """Entry of the study's tables, with the times of a step with and without compression."""

    network: str
    primitive: str
    gpus: int
    bits: int
    sample: CollectiveSample


def table() -> list[dict[str, str]]:
    """Return the rows of the study's tables."""
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def cells(codec: str = "qsgd") -> list[Cell]:
    """Return the rows of "qsgd" or "1bit*"; the bytes of "1bit" depend on shapes of matrices."""
    full = {_place(row): _seconds(row) for row in table() if row["codec"] == "none"}
    return [
        Cell(
            row["network"],
            row["primitive"],
            int(row["gpus"]),
            int(row["bits"]),
            CollectiveSample(
                float(row["parameters"]),
                _codec(row).theory(1),
                full[_place(row)],
                _seconds(row),
            ),
        )
        for row in table()
        if row["codec"] == codec
    ]


def _codec(row: dict[str, str]) -> Qsgd | Reshaped:
    bucket = int(row["bucket"])
    return Qsgd(int(row["bits"]), bucket) if row["codec"] == "qsgd" else Reshaped(bucket)


def errors(result: Iterable[Cell], exchange: Exchange) -> list[float]:
    """Return the relative errors of predicted step times."""
    return [abs(exchange.of(cell.sample) / cell.sample.seconds - 1) for cell in result]


def left_out(every: Sequence[Cell]) -> dict[Cell, Exchange]:
    """Return the coefficients for each cell, fitted to the other networks."""
    result: dict[Cell, Exchange] = {}
    for place in {(cell.primitive, cell.gpus) for cell in every}:
        current = [cell for cell in every if (cell.primitive, cell.gpus) == place]
        for network in {cell.network for cell in current}:
            exchange = Exchange.fit([cell.sample for cell in current if cell.network != network])
            result |= dict.fromkeys((c for c in current if c.network == network), exchange)
    return result


def one_bit_left_out() -> dict[Cell, float]:
    """Return the error of each cell of 1bitSGD*, predicted from the other networks."""
    quantized, every = cells(), cells("1bit*")
    result: dict[Cell, float] = {}
    for cell in every:
        others = [
            [
                other.sample
                for other in group
                if (other.primitive, other.gpus) == (cell.primitive, cell.gpus)
                and other.network != cell.network
            ]
            for group in (quantized, every)
        ]
        travel = Exchange.fit(others[0]).travel
        coding = statistics.median(
            (other.seconds - other.without) / other.elements + travel * (FULL - other.element_bytes)
            for other in others[1]
        )
        (result[cell],) = errors([cell], Exchange(travel, coding))
    return result


def speeds(fitted: Mapping[Cell, Exchange]) -> list[Row]:
    """Return the printed speed of each codec relative to 32 bits and to one GPU."""
    full = {_place(row): _seconds(row) for row in table() if row["codec"] == "none"}
    single = {
        row["network"]: float(row["samples_per_second"]) for row in table() if row["gpus"] == "1"
    }
    predicted = {
        (cell.network, cell.primitive, cell.gpus, cell.bits): exchange.of(cell.sample)
        for cell, exchange in fitted.items()
    }
    made: list[Row] = []
    for row in table():
        gpus, bits, batch = int(row["gpus"]), int(row["bits"]), int(row["batch"])
        if gpus == 1:
            continue
        named: dict[str, Any] = {
            "case": row["network"],
            "primitive": row["primitive"],
            "gpus": gpus,
            "codec": row["codec"],
            "bits": bits,
        }
        if row["codec"] != "none":
            named["speed"] = full[_place(row)] / _seconds(row)
        named["scaling"] = float(row["samples_per_second"]) / single[row["network"]]
        if row["codec"] == "qsgd":
            seconds = predicted[row["network"], row["primitive"], gpus, bits]
            named["predicted scaling"] = batch / seconds / single[row["network"]]
        made.append(named | {"target": None})
    return made


PRICES: Final = {1: 0.9, 2: 7.2, 4: 7.2, 8: 7.2, 16: 14.4}
"""Dollars per hour of the smallest EC2 instance with so many GPUs (Fig. 2)."""
SAMPLES: Final = {"ResNet110": 50_000}
IMAGENET: Final = 1_300_000
EPOCHS: Final = {
    "AlexNet": 112,
    "BN-Inception": 300,
    "ResNet50": 120,
    "ResNet110": 160,
    "ResNet152": 120,
    "VGG19": 80,
}
"""Samples of the data sets and epochs of the trainings (Fig. 1 and 3)."""


def prices() -> list[Row]:
    """Return the price of each training on its cheapest instance, with 8 and with 32 bits."""
    made: list[Row] = []
    for network, epochs in EPOCHS.items():
        for bits in (8, 32):
            options = []
            for row in table():
                # A single GPU sends no gradients.
                if row["network"] == network and (row["gpus"] == "1" or int(row["bits"]) == bits):
                    hours = SAMPLES.get(network, IMAGENET) * epochs / 3600
                    hours /= float(row["samples_per_second"])
                    gpus = int(row["gpus"])
                    options.append((hours * PRICES[gpus], hours, gpus, row["primitive"]))
            price, hours, gpus, primitive = min(options)
            named: dict[str, Any] = {
                "case": network,
                "primitive": primitive,
                "gpus": gpus,
                "bits": bits,
            }
            made.append(named | {"price": price, "hours": hours, "target": None})
    return made


def larger_models() -> list[Row]:
    """Return the predicted speed of 8 bits relative to 32 for multiples of AlexNet's parameters."""
    exchange = EXCHANGES["nccl", 8]
    (cell,) = (
        cell
        for cell in cells()
        if (cell.network, cell.primitive, cell.gpus, cell.bits) == ("AlexNet", "NCCL", 8, 8)
    )
    sample, made = cell.sample, list[Row]()
    for factor in (1, 3, 10, 30, 100, 1000):
        elements = factor * sample.elements
        full = sample.without + exchange.travel * FULL * (elements - sample.elements)
        seconds = exchange.seconds(elements, sample.element_bytes, full)
        named: dict[str, Any] = {
            "case": "AlexNet, larger",
            "primitive": "NCCL",
            "gpus": 8,
            "bits": 8,
        }
        made.append(
            named | {"parameters": elements, "predicted speed": full / seconds, "target": None}
        )
    return made


def rows() -> list[Row]:
    """Return rows by primitive and number of GPUs, by network, by primitive, and for all cells."""
    every = cells()
    out = left_out(every)
    places = sorted({(cell.primitive, cell.gpus) for cell in every})
    groups: list[tuple[str, list[Cell]]] = [
        (
            f"{primitive}, {gpus} GPUs",
            [cell for cell in every if (cell.primitive, cell.gpus) == (primitive, gpus)],
        )
        for primitive, gpus in places
    ]
    groups += [
        (name, [cell for cell in every if cell.network == name])
        for name in sorted({c.network for c in every})
    ]
    groups += [
        (name, [cell for cell in every if cell.primitive == name]) for name in ("MPI", "NCCL")
    ]
    groups.append(("all", every))
    made: list[Row] = []
    for name, group in groups:
        fitted = [
            error
            for cell in group
            for error in errors([cell], EXCHANGES[cell.primitive.lower(), cell.gpus])
        ]
        predicted = [error for cell in group for error in errors([cell], out[cell])]
        made.append(
            {
                "case": name,
                "rows": len(group),
                "median": statistics.median(predicted),
                "mean": statistics.mean(predicted),
                "worst": max(predicted),
                "all": statistics.median(fitted),
                "without": _unchanged(group),
                "target": 0.035 if name in ("all", "MPI", "NCCL") else None,
            }
        )
    one_bit = one_bit_left_out()
    predicted = list(one_bit.values())
    made.append(
        {
            "case": "1bitSGD*, MPI",
            "rows": len(one_bit),
            "median": statistics.median(predicted),
            "mean": statistics.mean(predicted),
            "worst": max(predicted),
            "without": _unchanged(one_bit),
            "target": None,
        }
    )
    return made + speeds(out) + prices() + larger_models()


def _unchanged(group: Iterable[Cell]) -> float:
    """Return the median error of the 32-bit step time, used as the prediction."""
    samples = [cell.sample for cell in group]
    return statistics.median(abs(sample.without / sample.seconds - 1) for sample in samples)


def _place(row: dict[str, str]) -> tuple[str, str, str]:
    return row["network"], row["primitive"], row["gpus"]


def _seconds(row: dict[str, str]) -> float:
    return int(row["batch"]) / float(row["samples_per_second"])


if __name__ == "__main__":
    finish(arguments(__doc__), rows())
