"""How operands are to lie is heard by Inductor, which asks of an operator that has a tag for it nothing else."""

from __future__ import annotations

import pytest
import torch

from qsync_fx.backend.inductor.tuned import register_with_inductor


@pytest.mark.parametrize("name", ["gemm", "conv2d_product", "quantize", "quantize_transposed"])
def test_inductor_asks_how_the_operands_of_an_operator_are_to_lie(name: str) -> None:
    from torch._inductor.lowering import maybe_layout_constraints

    register_with_inductor()
    asked = maybe_layout_constraints(getattr(torch.ops.qsync, name).default)
    assert asked is not None and asked.__module__ == "qsync_fx.backend.inductor.tuned"


def test_inductor_is_free_with_operators_that_take_any_layout() -> None:
    from torch._inductor.lowering import maybe_layout_constraints

    register_with_inductor()
    assert maybe_layout_constraints(torch.ops.qsync.integer_convolution.default) is None
