"""Error of step times predicted for compressed gradients from steps with FP32 gradients.
The data are samples per second of six networks on 2 to 16 GPUs, with MPI and NCCL, and gradients in
32 bits or compressed by QSGD to 16, 8, 4 or 2 bits (Grubic et al., EDBT 2018,
data/communication_study.csv). For each primitive and number of GPUs, the two coefficients of
qsync_fx/predictor/replayer/collectives.py are fitted to all networks but one, and predict that
network's compressed steps from its 32-bit step. Columns: "median", "mean" and "worst" are the
relative errors of these predictions; "all" is the median error of the coefficients that qsync_fx
contains, fitted to all networks; "without" is the median error of using the 32-bit step time
unchanged.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qsync_fx.communication.codecs.qsgd import Qsgd
from qsync_fx.predictor.replayer.collectives import EXCHANGES, CollectiveSample, Exchange

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.harness import Row, arguments, finish

TABLE = Path(__file__).parent / "data" / "communication_study.csv"


@dataclass(frozen=True)
class Cell:
    """Entry of the study's tables, with the times of a step with and without compression."""

    network: str
    primitive: str
    gpus: int
    bits: int
    sample: CollectiveSample


def cells() -> list[Cell]:
    """Return the rows of QSGD."""
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    full = {_place(row): _seconds(row) for row in rows if row["bits"] == "32"}
    return [
        Cell(
            row["network"],
            row["primitive"],
            int(row["gpus"]),
            int(row["bits"]),
            CollectiveSample(
                float(row["parameters"]),
                Qsgd(int(row["bits"]), int(row["bucket"])).theory(1),
                full[_place(row)],
                _seconds(row),
            ),
        )
        for row in rows
        if row["bits"] != "32"
    ]


def errors(result: Iterable[Cell], exchange: Exchange) -> list[float]:
    """Return the relative errors of predicted step times."""
    samples = [cell.sample for cell in result]
    return [
        abs(
            exchange.seconds(sample.elements, sample.element_bytes, sample.without) / sample.seconds
            - 1
        )
        for sample in samples
    ]


def left_out(every: Sequence[Cell]) -> dict[Cell, float]:
    """Return the error of each cell, predicted by coefficients fitted to the other networks."""
    result: dict[Cell, float] = {}
    for place in {(cell.primitive, cell.gpus) for cell in every}:
        current = [cell for cell in every if (cell.primitive, cell.gpus) == place]
        for network in {cell.network for cell in current}:
            exchange = Exchange.fit([cell.sample for cell in current if cell.network != network])
            same_network = [cell for cell in current if cell.network == network]
            result |= dict(zip(same_network, errors(same_network, exchange), strict=True))
    return result


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
        predicted = [out[cell] for cell in group]
        made.append(
            {
                "case": name,
                "rows": len(group),
                "median": statistics.median(predicted),
                "mean": statistics.mean(predicted),
                "worst": max(predicted),
                "all": statistics.median(fitted),
                "without": statistics.median(
                    abs(c.sample.without / c.sample.seconds - 1) for c in group
                ),
                "target": 0.035 if name in ("all", "MPI", "NCCL") else None,
            }
        )
    return made


def _place(row: dict[str, str]) -> tuple[str, str, str]:
    return row["network"], row["primitive"], row["gpus"]


def _seconds(row: dict[str, str]) -> float:
    return int(row["batch"]) / float(row["samples_per_second"])


if __name__ == "__main__":
    finish(arguments(__doc__), rows())
