"""Pages docs/claims.md and docs/mechanisms.md: claims and mechanisms of the papers.

`make docs-figures` writes them from claims.toml and mechanisms.toml. A figure of a claim is a
selection of a column of a result file, so new results change the page. A limit of a selection is
the size that the claim states: the verdict "reproduced" needs all limits to be met, "refuted" one
that is not.
"""

from __future__ import annotations

import statistics
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.benchmarks_page import ROOT, Row, Run, runs_of

SOURCES: Final = ROOT / "benchmarks" / "support"
PAGES: Final = {name: ROOT / "docs" / f"{name}.md" for name in ("claims", "mechanisms")}
PAPERS: Final = {
    "A": "QSync",
    "B": "Low-precision communication study",
    "C": "AQGB",
    "D": "DUO",
}
"""Title of each paper, by the first letter of its rows."""
REPRODUCED, REFUTED = "reproduced", "refuted"
VERDICTS: Final = (REPRODUCED, REFUTED, "not measurable here")
STATES: Final = ("as in the paper", "differs", "partly", "not built", "addition")


@dataclass(frozen=True)
class Selection:
    """Values of a column of a result file.

    Attributes:
        result: name of a result file.
        column: name of the column.
        where: values of other columns; a list allows each of its values.
        threads: threads of the run, where the file has several; without it, the first run.
        peer, keys: with them, a value is compared with the row that has the values of `peer` and
            equal `keys`.
        points: difference to the peer in percentage points, instead of the ratio.
        least, most: the size that the claim states, as a limit of each value.
        reaches: the size that the claim states with "up to": the largest value must reach it.
    """

    result: str
    column: str
    where: Mapping[str, Any] = field(default_factory=dict)
    threads: int | None = None
    peer: Mapping[str, Any] | None = None
    keys: Sequence[str] = ()
    points: bool = False
    least: float | None = None
    most: float | None = None
    reaches: float | None = None

    def values(self) -> list[float]:
        """Return the values, at least one.

        Raises:
            LookupError: no row has the column and these values, or a peer is not unique.
        """
        rows = self.run()["rows"]
        values = [self._value(row, rows) for row in rows if _matches(row, self.where)]
        result = [value for value in values if value is not None]
        if not result:
            raise LookupError(f"{self.result} has no {self.column!r} where {self.where}")
        return result

    def met(self) -> bool | None:
        """Return whether the values meet the size of the claim; None if it has none."""
        if self.least is self.most is self.reaches is None:
            return None
        values = self.values()
        return (
            (self.least is None or min(values) >= self.least)
            and (self.most is None or max(values) <= self.most)
            and (self.reaches is None or max(values) >= self.reaches)
        )

    def run(self) -> Run:
        """Return the run that has the rows."""
        runs = runs_of(self.result)
        return next(run for run in runs if self.threads in (None, run["machine"].get("threads")))

    def _value(self, row: Row, rows: Sequence[Row]) -> float | None:
        value = row.get(self.column)
        if value is None or self.peer is None:
            return value
        expected = {**self.peer, **{key: row[key] for key in self.keys}}
        peers = [peer[self.column] for peer in rows if _matches(peer, expected)]
        if len(peers) != 1:
            raise LookupError(f"{self.result} has {len(peers)} rows with {expected}")
        return float(100 * (value - peers[0]) if self.points else value / peers[0])


def _matches(row: Row, where: Mapping[str, Any]) -> bool:
    return all(
        row.get(name) in value if isinstance(value, list) else row.get(name) == value
        for name, value in where.items()
    )


@dataclass(frozen=True)
class Numbers:
    """Summary of the values of a selection, for the fields of a claim's figure."""

    values: Sequence[float]

    def __getattr__(self, name: str) -> float:
        summaries = {"min": min, "max": max, "median": statistics.median, "count": len}
        if name == "value" and len(self.values) == 1:
            return self.values[0]
        if name not in summaries:
            raise LookupError(f"{len(self.values)} values have no {name!r}")
        return summaries[name](self.values)  # type: ignore[operator, no-any-return]


def entries(name: str) -> list[dict[str, Any]]:
    """Return the entries of claims.toml or mechanisms.toml, in the order of the file."""
    result: list[dict[str, Any]] = tomllib.loads((SOURCES / f"{name}.toml").read_text())["row"]
    return result


def selections(claim: Mapping[str, Any]) -> dict[str, Selection]:
    """Return the selections of a claim, by the name that its figure uses."""
    return {name: Selection(**fields) for name, fields in claim.get("numbers", {}).items()}


def figure(claim: Mapping[str, Any]) -> str:
    """Return the text of a claim's figure, with links to the results and their dates.

    Raises:
        ValueError: the verdict contradicts the limits of the selections.
        LookupError: a selection does not resolve.
    """
    every = selections(claim)
    numbers = {name: Numbers(selection.values()) for name, selection in every.items()}
    met = {selection.met() for selection in every.values()} - {None}
    if met and claim["verdict"] in (REPRODUCED, REFUTED):
        verdict = REFUTED if False in met else REPRODUCED
        if verdict != claim["verdict"]:
            raise ValueError(f"{claim['id']} is {claim['verdict']}, and by its limits {verdict}")
    text = " ".join(claim["figure"].split()).format(**numbers)
    runs = {selection.result: selection.run()["date"][:10] for selection in every.values()}
    links = (f"[{name}](../benchmarks/results/{name}.json) {day}" for name, day in runs.items())
    return f"{text} ({', '.join(links)})" if runs else text


def code(text: str) -> str:
    """Return lines of code as a cell of a table."""
    return "<br>".join(f"`{line}`" for line in text.strip().splitlines())


def page(name: str) -> str:
    """Return the text of docs/claims.md or docs/mechanisms.md."""
    source = tomllib.loads((SOURCES / f"{name}.toml").read_text())
    rows = source["row"]
    kind, values = ("verdict", VERDICTS) if name == "claims" else ("state", STATES)
    counts = Counter((row["id"][0], row[kind]) for row in rows)
    lines = [source["introduction"], f"| paper | {' | '.join(values)} |"]
    lines.append(f"| --- |{' --: |' * len(values)}")
    for letter, title in PAPERS.items():
        lines.append(f"| {title} | {' | '.join(str(counts[letter, value]) for value in values)} |")
    for letter, title in PAPERS.items():
        lines += ["", f"## {title}", "", *_table(name, [r for r in rows if r["id"][0] == letter])]
    return "\n".join(lines) + "\n"


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    heads = ("", "claim", "verdict", "figure", "command")
    if name == "mechanisms":
        heads = ("", "mechanism", "state", "code", "tests")
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    for row in rows:
        text = " ".join(row[heads[1]].split())
        if name == "claims":
            cells = [row["id"], text, row["verdict"], figure(row), code(row.get("command", ""))]
        else:
            text += f": {' '.join(row['note'].split())}" if "note" in row else ""
            cells = [row["id"], text, row["state"], code(row["code"]), code(row["tests"])]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    for name, path in PAGES.items():
        path.write_text(page(name))


if __name__ == "__main__":
    main()
