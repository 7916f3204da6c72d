"""How well steps with compressed gradients are predicted from steps without: samples a second of a published study, one network left out.

The tables are those of Grubic et al., EDBT 2018 (data/communication_study.csv): six networks on 2 to 16 GPUs, with MPI and with
NCCL, gradients in 32 bits and by QSGD in 16, 8, 4 and 2. For each primitive and number of GPUs two numbers are fitted to all networks but
one (qsync_fx/predictor/replayer/collectives.py); what they make of that one's 32-bit row is compared with its other rows. `without` is the
error
of taking the 32-bit row itself, `all` that of numbers fitted to all networks, which are the ones that qsync_fx has.
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
    """A number of the study: samples a second with compression, and without."""

    network: str
    primitive: str
    gpus: int
    bits: int
    sample: CollectiveSample


def cells() -> list[Cell]:
    """Returns the rows of QSGD."""
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


def errors(found: Iterable[Cell], exchange: Exchange) -> list[float]:
    """Returns relative errors of the seconds of a step."""
    samples = [cell.sample for cell in found]
    return [
        abs(exchange.seconds(one.elements, one.element_bytes, one.without) / one.seconds - 1)
        for one in samples
    ]


def left_out(every: Sequence[Cell]) -> dict[Cell, float]:
    """Returns the error of each cell, by numbers that were fitted to the other networks."""
    found: dict[Cell, float] = {}
    for place in {(cell.primitive, cell.gpus) for cell in every}:
        here = [cell for cell in every if (cell.primitive, cell.gpus) == place]
        for network in {cell.network for cell in here}:
            exchange = Exchange.fit([cell.sample for cell in here if cell.network != network])
            own = [cell for cell in here if cell.network == network]
            found |= dict(zip(own, errors(own, exchange), strict=True))
    return found


def rows() -> list[Row]:
    """Returns the errors by primitive and number of GPUs, of each network, and of all rows."""
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
        own = [out[cell] for cell in group]
        made.append(
            {
                "case": name,
                "rows": len(group),
                "median": statistics.median(own),
                "mean": statistics.mean(own),
                "worst": max(own),
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
