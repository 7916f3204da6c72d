"""Golden text of the graph after every pass.

The text is the specification of a pass. `QSYNC_UPDATE_GOLDEN=1 pytest tests/passes/test_golden.py`
writes it: read the difference before you commit it.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx.backend.operators import lowerings
from qsync_fx.options import Options
from qsync_fx.passes.pass_manager import pipeline

GOLDEN = Path(__file__).parent / "golden"
PASSES = [step.name for step in pipeline(Options(), lowerings())]


class Residual(nn.Module):
    """One case of each decision of a pass: products, norm, shared operand, promotion, autocast, a
    scalar out of range, a loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.wide = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        x = torch.relu_(self.norm(self.conv(x))).mean((2, 3))
        x = self.left(x) + self.wide(x) * torch.tanh(self.right(x))
        with torch.autocast("cpu", enabled=False):
            x = nn.functional.normalize(x)
        x = self.head(x).masked_fill(mask, torch.finfo(torch.float32).min)
        return nn.functional.cross_entropy(x, target)


@functools.cache
def explained() -> qsync_fx.Explanation:
    torch.manual_seed(0)
    plan = (
        qsync_fx.Plan.uniform("int8").with_precision("wide", "fp32").with_precision("right", "bf16")
    )
    inputs = torch.randn(2, 3, 5, 5), torch.zeros(2, 4, dtype=torch.bool), torch.tensor([1, 2])
    return qsync_fx.explain(Residual(), *inputs, options={"plan": plan})


@pytest.mark.parametrize("name", PASSES)
def test_graph_after(name: str) -> None:
    text = explained().graph(name) + "\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("QSYNC_UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.exists(), (
        f"no golden file for the pass {name}: run QSYNC_UPDATE_GOLDEN=1 pytest {__file__}"
    )
    assert text == path.read_text()


def test_every_golden_text_has_its_pass() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(PASSES)
