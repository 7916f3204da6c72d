"""Numbers in reports, formatted for text and for JSON."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qsync_fx.cli.commands.inspect import operator_as_json
from qsync_fx.diagnostics import explain
from qsync_fx.formatting import number, short


@pytest.mark.parametrize(
    ("size", "expected_text", "expected_number"),
    [
        (0, "-", 0),
        (999, "999", 999),
        (1536000, "1.54M", 1536000),
        (sympy.Integer(1536000), "1.54M", 1536000),
        (sympy.Rational(5, 2), "2.5", 2.5),
        (10 * sympy.Symbol("s0"), "10*s0", None),
    ],
)
def test_known_sizes_are_numbers(
    size: object, expected_text: str, expected_number: float | None
) -> None:
    assert short(size) == expected_text
    value = number(size)
    assert value == expected_number and type(value) is type(expected_number)


def test_operations_of_attention_are_a_number() -> None:
    """FLOPs of the gradients are fractions of the total, which sympy sums."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            heads = self.heads(x).view(2, 8, 4, 4).transpose(1, 2)
            return F.scaled_dot_product_attention(heads, heads, heads)

    explanation = explain(Attention(), torch.randn(2, 8, 16), options={"precision": "bf16"})
    attention = next(
        operator
        for operator in explanation.operators
        if "scaled_dot_product" in str(operator.note.id)
    )
    operations = operator_as_json(attention)["flops"]
    assert type(operations) is int
    line = next(line for line in str(explanation).splitlines() if "scaled_dot_product" in line)
    assert short(operations) in line.split()
