"""Runs of the command line in this process, and models for its arguments."""

from __future__ import annotations

from qsync_fx.cli import main

MODELS = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, scale=1.0):
        return self.head(self.dropout(torch.relu(self.body(x)))) * scale

def small():
    return Small(), (torch.randn(3, 8),)

def evaluated():
    return Small().eval(), [torch.randn(3, 8)], {"scale": 2.0}

class Factory:
    @staticmethod
    def make(batch=3):
        return Small(), (torch.randn(batch, 8),)

def function():
    return (lambda x: torch.relu(x)), (torch.randn(3),)

def broken():
    raise RuntimeError("from the user's function")

def needs(batch, *, width):
    return small()

number = 3
alone = lambda: Small()
four = lambda: (Small(), (), {}, None)
tensor = lambda: (Small(), torch.randn(3, 8))
text = lambda: (Small(), "x")
swapped = lambda: ((torch.randn(3, 8),), Small())
keywords = lambda: (Small(), (), {1: 2})
nothing = lambda: ((lambda: 3), ())
"""


def run(*arguments: str) -> int:
    """Run `qsync` in this process and return its exit status; argparse raises SystemExit."""
    try:
        return main(arguments)
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else -1
