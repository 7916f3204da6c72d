"""Time of BF16 attention on the CPU, forward and backward, by three implementations.
torch's fused kernel is compared with the fused kernel in FP32, and with matrix products and a
softmax in BF16. The last two are compiled by Inductor, conversions included. Query, key and value
are BF16 transposed views [batch, heads, tokens, width] of projections. Runs are interleaved; times
are medians, and "to_fused" is the median ratio to the fused BF16 kernel. With --threads 1 the clock
counts CPU time of the process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attend

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.harness import Row, arguments, by_size, clock_for, finish, measure
from qsync_fx.graph.saved_tensors import products

SHAPES = (
    (8, 4, 64, 16),
    (8, 12, 32, 64),
    (8, 12, 64, 64),
    (8, 12, 128, 64),
    (8, 12, 197, 64),
    (4, 12, 256, 64),
    (2, 12, 512, 64),
    (1, 12, 1024, 64),
)
"""Batch, heads, tokens, width of a head."""
FUSED = "fused bf16"

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend(query, key, value)


def wide(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend(query.float(), key.float(), value.float()).to(query.dtype)


def step(
    function: Attention, batch: int, heads: int, tokens: int, width: int
) -> Callable[[], object]:
    def operand(gradient: bool) -> Tensor:
        rows = torch.randn(batch, tokens, heads * width).bfloat16()
        return rows.view(batch, tokens, heads, width).transpose(1, 2).requires_grad_(gradient)

    operands, back = [operand(True) for _ in range(3)], operand(False)
    return lambda: torch.autograd.grad(function(*operands), operands, back)


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    clock = clock_for(options.threads)
    kernels: dict[str, Attention] = {
        FUSED: fused,
        "fused fp32": torch.compile(wide),
        "products bf16": torch.compile(products),
    }
    rows: list[Row] = []
    for shape in by_size(options.quick, SHAPES[:1], SHAPES):
        torch.compiler.reset()
        times = measure(
            {name: step(kernel, *shape) for name, kernel in kernels.items()},
            by_size(options.quick, 3, 9),
            clock=clock,
        )
        for name in times:
            milliseconds, ratio = times.median(name) * 1e3, times.ratio(name, FUSED)
            case = "x".join(map(str, shape))
            rows.append(
                {"case": case, "name": name, "milliseconds": milliseconds, "to_fused": ratio}
            )
    finish(options, rows)


if __name__ == "__main__":
    main()
