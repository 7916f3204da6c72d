"""The option "activation_recompute": packed masks, memory of saved tensors, and gradients equal to
those without the option.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from hypothesis import given, strategies as st
from torch import Tensor, fx, nn
from torch.nn.functional import scaled_dot_product_attention

import qsync_fx
from qsync_fx import _C
from qsync_fx.backend.inductor import recompute_policy
from qsync_fx.backend.inductor.decompositions import for_inductor
from qsync_fx.backend.inductor.recompute_policy import pack_bits, unpack_bits
from tests.support import tiers


@given(st.integers(0, 300), st.integers(0, 2**32 - 1), st.integers(0, 7), st.integers(1, 3))
def test_packed_bits_equal_the_mask(n: int, seed: int, offset: int, threads: int) -> None:
    every = torch.rand(n + offset, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask = every[offset:]  # the offset makes the address unaligned
    wanted = [
        sum(int(bit) << place for place, bit in enumerate(mask[i : i + 8])) for i in range(0, n, 8)
    ]
    packed = torch.full(((n + 7) // 8 + 1,), 0xAA, dtype=torch.uint8)
    _C.pack_bits(mask.data_ptr(), packed.data_ptr(), n, threads)
    assert packed.tolist() == [*wanted, 0xAA]
    unpacked = torch.ones(n + 1, dtype=torch.uint8) * 7
    _C.unpack_bits(packed.data_ptr(), unpacked.data_ptr(), n, threads)
    assert unpacked.tolist() == [*map(int, mask), 7]


@pytest.mark.parametrize("size", [(), (0, 3), (5, 7), (2, 3, 65_537)])
def test_the_operators_take_masks_of_any_shape_and_strides(size: tuple[int, ...]) -> None:
    mask = torch.rand(size) < 0.3
    bits = pack_bits(mask)
    assert bits.dtype == torch.uint8
    assert bits.shape == ((mask.numel() + 7) // 8,)
    assert torch.equal(unpack_bits(bits, size), mask)
    if mask.dim() > 1:
        transposed = mask.transpose(0, 1)
        assert torch.equal(unpack_bits(pack_bits(transposed), transposed.shape), transposed)
    torch.library.opcheck(torch.ops.qsync.pack_bits.default, (mask,))
    torch.library.opcheck(torch.ops.qsync.unpack_bits.default, (bits, size))


def test_wrong_threads_and_null_pointers_raise() -> None:
    with pytest.raises(ValueError, match="null pointer"):
        _C.pack_bits(0, 0, 1)
    with pytest.raises(ValueError, match="threads"):
        _C.unpack_bits(0, 0, 0, 0)


class Block(nn.Module):
    """Transformer layer: norms, attention, GELU, and dropout."""

    def __init__(self, p: float = 0.25) -> None:
        super().__init__()
        self.p = p
        self.first, self.last = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.up, self.down = nn.Linear(32, 96), nn.Linear(32, 128), nn.Linear(128, 32)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        attended = (
            scaled_dot_product_attention(q, k, v, dropout_p=self.p).transpose(1, 2).reshape(x.shape)
        )
        x = self.first(x + self.dropout(attended))
        result: Tensor = self.last(
            x + self.dropout(self.down(torch.nn.functional.gelu(self.up(x))))
        )
        return result


def differentiated(
    block: nn.Module, x: Tensor, precision: str, less: bool, fast: bool
) -> tuple[int, list[Tensor]]:
    """Return the bytes saved for backward without the inputs, and the gradients.

    Traces as Inductor does and runs the graphs in eager mode.
    """
    saved: dict[int, int] = {}
    lowered = qsync_fx.explain(block, x, options={"precision": precision}).graph_module("lower")

    def forward(graph: fx.GraphModule, inputs: object) -> Any:
        outputs = next(iter(graph.graph.find_nodes(op="output"))).args[0][1:]
        for node in outputs:
            value = node.meta["val"]
            if node.op != "placeholder" and isinstance(value, Tensor):
                saved[id(value.untyped_storage())] = value.numel() * value.dtype.itemsize
        return make_boxed_func(graph.forward)

    def partition(graph: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        if less:
            recompute_policy.Repeatable()(graph.graph)
        return min_cut_rematerialization_partition(graph, inputs, **kwargs)

    def backward(graph: fx.GraphModule, inputs: object) -> Any:
        return make_boxed_func(graph.forward)

    table = for_inductor(torch.device("cpu"), fast, less)
    parameters = {name.replace(".", "_"): value for name, value in block.named_parameters()}
    arguments = [
        {"x": x, **parameters}[node.name]
        for node in lowered.graph.nodes
        if node.op == "placeholder"
    ]
    with recompute_policy.settings() if less else nullcontext():
        step = aot_function(lowered, forward, backward, partition, decompositions=table)
        torch.manual_seed(3)
        (output,) = step(*arguments)
    gradients = torch.autograd.grad(output.square().sum(), [x, *block.parameters()])
    return sum(saved.values()), list(gradients)


@pytest.mark.parametrize(
    ("precision", "fast", "most"),
    [
        ("bf16", False, 0.75),
        # INT8 weights, a large part of this small block, are saved in either case.
        pytest.param("int8", False, 0.85, marks=tiers.ALL),
        pytest.param("int8_grad", True, 0.85, marks=tiers.ALL),
        pytest.param("fp32", False, 0.75, marks=tiers.ALL),
    ],
)
def test_recomputation_saves_memory_with_bit_equal_gradients(
    precision: str, fast: bool, most: float
) -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(4, 24, 32, requires_grad=True)
    plain, expected = differentiated(block, x, precision, False, fast)
    less, actual = differentiated(block, x, precision, True, fast)
    assert all(map(torch.equal, actual, expected))
    assert less <= most * plain


@tiers.ALL
@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=tiers.EVERY), "int8"])
def test_a_compiled_model_trains_with_it(precision: str) -> None:
    """Gradients differ by the format's error: fused kernels omit roundings, and recomputed values
    are quantized again.
    """
    x = torch.randn(8, 24, 32)
    gradients = {}
    for less in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        block = Block()
        options = {"precision": precision, "activation_recompute": less}
        compiled: Callable[..., Any] = torch.compile(block, backend="qsync", options=options)  # type: ignore[arg-type]
        torch.manual_seed(1)
        (compiled(x) - x.sin()).square().mean().backward()
        gradients[less] = torch.cat(
            [p.grad.flatten() for p in block.parameters() if p.grad is not None]
        )
    torch._dynamo.reset()
    difference = (gradients[True] - gradients[False]).norm() / gradients[False].norm()
    assert difference < (0.02 if precision == "bf16" else 0.05)


@tiers.ALL
def test_checkpoint_in_the_graph_is_preserved() -> None:
    """The user's checkpoint is recomputed, with dropout from torch's generator."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(
                nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Dropout(0.25)
            )
            self.last = nn.Linear(48, 32)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.last(checkpoint(self.block, x, use_reentrant=False))
            return result

    x, result = torch.randn(4, 24, 32), {}
    for less in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Checkpointed()
        compiled = torch.compile(
            model, backend="qsync", options={"precision": "fp32", "activation_recompute": less}
        )
        torch.manual_seed(1)
        compiled(x).square().mean().backward()
        result[less] = torch.cat(
            [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        )
    torch._dynamo.reset()
    torch.testing.assert_close(result[True], result[False], rtol=1e-4, atol=1e-6)
