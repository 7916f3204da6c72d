"""`TORCH_LOGS="qsync"` logs the graph after each pass; without it no graph is logged."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from qsync_fx.passes.printer import LOG

ROOT = Path(__file__).resolve().parents[2]
TRAIN = """
import logging, torch, qsync_fx
logging.basicConfig(level=logging.INFO)
model = torch.nn.Sequential(torch.nn.Linear(8, 4))
options = {"precision": "bf16", "inner_backend": "eager"}
torch.compile(model, backend="qsync", options=options)(torch.randn(2, 8)).sum().backward()
"""


def log_of_a_training(**environment: str) -> str:
    process = subprocess.run(
        [sys.executable, "-c", TRAIN],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return process.stderr


def test_torch_logs_shows_the_graph_after_each_pass() -> None:
    text = log_of_a_training(TORCH_LOGS="qsync")
    assert "after pass normalize" in text
    assert "after pass autocast: unchanged" in text
    assert "aten.linear" in text


def test_other_log_levels_do_not_show_graphs() -> None:
    assert "after pass" not in log_of_a_training()


def test_set_logs_switches_the_log() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    LOG.addHandler(handler)
    try:
        torch._logging.set_logs(modules={"qsync": logging.INFO})
        model = nn.Sequential(nn.Linear(8, 4))
        options = {"precision": "bf16", "inner_backend": "eager"}
        torch.compile(model, backend="qsync", options=options)(torch.randn(2, 8))
    finally:
        LOG.removeHandler(handler)
        torch._logging.set_logs()
    assert any("after pass lower" in line for line in lines)
