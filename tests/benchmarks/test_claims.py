"""Pages of the papers' claims and mechanisms: up to date, complete, with existing references."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support import claims_page
from qsync_fx.cli import commands

ROOT = Path(__file__).resolve().parents[2]
CLAIMS, MECHANISMS = claims_page.entries("claims"), claims_page.entries("mechanisms")


@pytest.mark.parametrize("name", claims_page.PAGES)
def test_page_is_current(name: str) -> None:
    text = claims_page.PAGES[name].read_text()
    assert text == claims_page.page(name), f"{name}.md is out of date: make docs-figures"


def test_every_number_of_a_paper_has_a_row() -> None:
    numbers = defaultdict(set)
    for row in [*CLAIMS, *MECHANISMS]:
        letter, number = re.fullmatch(r"([A-D])(\d+)[a-z]?", row["id"]).groups()  # type: ignore[union-attr]
        numbers[letter].add(int(number))
    assert numbers.keys() == claims_page.PAPERS.keys()
    for letter, values in numbers.items():
        assert values == set(range(1, max(values) + 1)), letter
    ids = [row["id"] for row in [*CLAIMS, *MECHANISMS]]
    assert len(ids) == len(set(ids))


def test_states_are_those_of_the_page() -> None:
    assert {row["state"] for row in MECHANISMS} <= set(claims_page.STATES)
    assert {row["verdict"] for row in CLAIMS} <= set(claims_page.VERDICTS)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: str(claim["id"]))
def test_verdict_has_evidence(claim: dict[str, Any]) -> None:
    """A reproduced or refuted claim has a command; the text uses each selection."""
    if claim["verdict"] in (claims_page.REPRODUCED, claims_page.REFUTED):
        assert claim.get("command")
    for name in claims_page.selections(claim):
        assert f"{{{name}." in claim["figure"]


@pytest.mark.parametrize("row", [*CLAIMS, *MECHANISMS], ids=lambda row: str(row["id"]))
def test_references_exist(row: dict[str, Any]) -> None:
    lines = [row.get("command", ""), row.get("code", ""), row.get("tests", "")]
    assert [line for line in "\n".join(lines).split("\n") if line and not exists(line)] == []


def exists(line: str) -> bool:
    """Return whether a command's script, verb or test, or a path exists."""
    words = line.split()
    if words[0] == "qsync":
        return words[1] in commands.names()
    target = words[1] if words[0] in ("python", "pytest") else words[0]
    path, _, name = target.partition("::")
    file = ROOT / path
    return file.is_file() and (not name or f"def {name}(" in file.read_text())


@pytest.mark.parametrize(
    ("verdict", "least"), [(claims_page.REPRODUCED, 1e9), (claims_page.REFUTED, -1e9)]
)
def test_verdict_that_contradicts_its_figure_is_an_error(verdict: str, least: float) -> None:
    selection = {"result": "convergence", "column": "points", "least": least}
    claim = {"id": "A1", "verdict": verdict, "figure": "{x.min}", "numbers": {"x": selection}}
    with pytest.raises(ValueError, match="A1 is "):
        claims_page.figure(claim)


def test_selection_without_rows_is_an_error() -> None:
    selection = claims_page.Selection("convergence", "points", where={"format": "int3"})
    with pytest.raises(LookupError, match="no 'points' where"):
        selection.values()


def test_value_of_several_rows_is_an_error() -> None:
    numbers = claims_page.Numbers([1.0, 2.0])
    assert (numbers.min, numbers.median, numbers.count) == (1, 1.5, 2)
    with pytest.raises(LookupError, match="2 values"):
        _ = numbers.value
