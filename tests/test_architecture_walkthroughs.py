"""Walkthroughs in docs/architecture.md against the order of real calls."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx.devices.cpu_features import native_integer_products

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
Function = tuple[str, str]
"""Path of a file relative to the root, and the qualified name of a function in it."""


def walk(name: str) -> list[Function]:
    """Return the functions of a walk, in the order of the page."""
    text = PAGE.read_text()
    (table,) = re.findall(rf"<!-- walk: {name} -->(.*?)<!-- end walk -->", text, re.DOTALL)
    rows = re.findall(r"^\| \d+ \| \[(.+?)\]\(\.\./(.+?)\) \|", table, re.MULTILINE)
    return [(path, label.replace("\\", "").partition(".")[2]) for label, path in rows]


@contextmanager
def recorded() -> Iterator[dict[Function, None]]:
    """Yield the functions of the project that are called, in the order of their first calls."""
    calls: dict[Function, None] = {}

    def record(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)):
            path = Path(code.co_filename).relative_to(ROOT)
            if path.parts[0] == "qsync_fx" and path.parts[1] in ("backend", "passes"):
                path = Path(*path.parts[1:])
            calls.setdefault((str(path), code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def check(name: str, calls: dict[Function, None], files: int) -> None:
    expected = walk(name)
    assert [function for function in expected if function not in calls] == []
    in_order = [function for function in calls if function in expected]
    assert in_order == expected
    assert len({path for path, _ in expected}) <= files


@pytest.mark.skipif(not native_integer_products(), reason="products run in BF16 on this CPU")
def test_from_torch_compile_to_the_kernel() -> None:
    model, x = nn.Sequential(nn.Linear(64, 512)), torch.randn(256, 64, requires_grad=True)
    with recorded() as calls:
        compiled = torch.compile(model, backend="qsync", options={"precision": "int8_grad"})
        compiled(x).sum().backward()
    check("compile", calls, files=18)


def test_from_a_measurement_to_a_plan() -> None:
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8))
    batch = torch.randn(256, 64)

    def step(module: Any, inputs: Tensor) -> Tensor:
        loss: Tensor = module(inputs).square().mean()
        return loss

    with recorded() as calls:
        profile = qsync_fx.measure(
            model, step, [batch], ["fp32", "bf16"], repeats=2, progress=False, all_reduce=False
        )
        qsync_fx.find_plan(profile, objective="fastest", budget="bf16")
    check("plan", calls, files=35)
