"""`qsync::linear` and `qsync::convolution` in training: computed products, saved tensors,
checkpointing, torch.compile.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from qsync_fx.errors import PrecisionError
from qsync_fx.formats import FORMATS
from tests.support import tiers
from tests.support.computing.lowered_layers import (
    FORMATS_OF_PRODUCTS,
    Geometry,
    Layer,
    every_format,
    leaf,
    recorded,
)


@every_format
def test_unused_products_are_not_computed(fmt: str) -> None:
    x, weight, bias = torch.randn(4, 6), torch.randn(3, 6), torch.randn(3)
    rounded = FORMATS[fmt].gradient
    roundings = None if rounded.plain else "qsync::quantize" if rounded.scaled else "qsync::round"
    for channel, needed in itertools.product(
        (False, True), itertools.product((False, True), repeat=3)
    ):
        if not any(needed):
            continue
        inputs = [
            t.clone().requires_grad_(need)
            for t, need in zip((x, weight, bias), needed, strict=True)
        ]
        layer = Layer(fmt, channel=channel)
        y = layer(*inputs)
        with recorded() as calls:
            y.backward(torch.randn_like(y))
        assert [t.grad is not None for t in inputs] == list(needed)
        products = ("aten::mm", "qsync::gemm", "qsync::integer_products")
        assert sum(map(calls.count, products)) == sum(needed[:2])
        # Both products share one rounding, unless scales per channel are multiplied into each.
        each = channel and FORMATS[fmt].scaled
        expected = sum(needed[:2]) if each else min(1, sum(needed[:2]))
        assert roundings is None or calls.count(roundings) == expected


def test_convolution_gradients_share_one_call() -> None:
    x, weight = leaf(torch.randn(2, 4, 6)), leaf(torch.randn(3, 4, 3))
    formats, each = ("int8", "int8_grad", "fp8"), ((True, True), (True, False), (False, True))
    for fmt, channel, needed in itertools.product(formats, (False, True), each):
        inputs = [
            t.detach().requires_grad_(need) for t, need in zip((x, weight), needed, strict=True)
        ]
        y = Layer(fmt, Geometry([1], [0], [1]), channel)(*inputs)
        with recorded() as calls:
            y.backward(torch.randn_like(y))
        assert [t.grad is not None for t in inputs] == list(needed)
        # With scales per channel, a scaled gradient is rounded for each product, a BF16 gradient
        # is not.
        twice = FORMATS[fmt].gradient.scaled and channel and all(needed)
        backward = ("aten::convolution_backward", "qsync::convolution_backward_in_fp32")
        assert sum(map(calls.count, backward)) == (2 if twice else 1)


def saved_bytes(call: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Return the bytes that `call` saves for backward, and its result."""
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = call()
    return sum(storages.values()), result


@pytest.mark.parametrize("fmt", ["int8", "fp8"])
@pytest.mark.parametrize("partitioner", [None, "aot_eager", "aot_eager_decomp_partition"])
def test_operands_are_saved_in_their_format(fmt: str, partitioner: str | None) -> None:
    """The last backend selects saved tensors as Inductor does."""
    x, weight = leaf(torch.randn(64, 128)), leaf(torch.randn(32, 128))
    image, kernel = leaf(torch.randn(4, 16, 9, 9)), leaf(torch.randn(8, 16, 3, 3))
    small = 128  # bytes for scales and seed
    for layer, a, b in (
        (Layer(fmt), x, weight),
        (Layer(fmt, Geometry([1, 1], [1, 1], [1, 1])), image, kernel),
    ):
        run = (
            torch.compile(layer.__call__, backend=partitioner, fullgraph=True)
            if partitioner
            else layer
        )
        saved, y = saved_bytes(functools.partial(run, a, b))
        assert a.numel() + b.numel() <= saved <= a.numel() + b.numel() + small
        y.sum().backward()
    frozen, _ = saved_bytes(lambda: Layer(fmt)(x, weight.detach()))
    assert frozen <= weight.numel() + small
    frozen, _ = saved_bytes(lambda: Layer(fmt)(x.detach(), weight))
    assert frozen <= x.numel() + small


@every_format
def test_channels_last_stays(fmt: str) -> None:
    x = leaf(torch.randn(2, 8, 7, 5).to(memory_format=torch.channels_last))
    y = Layer(fmt, Geometry([1, 1], [1, 1], [1, 1]))(x, leaf(torch.randn(16, 8, 3, 3)))
    assert y.is_contiguous(memory_format=torch.channels_last)
    (gradient,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert gradient.is_contiguous(memory_format=torch.channels_last)


@every_format
def test_checkpointing_recomputes_the_same_bits(fmt: str) -> None:
    x, weight = leaf(torch.randn(5, 8)), leaf(torch.randn(8, 8))

    def block(x: Tensor) -> Tensor:
        return Layer(fmt)(F.gelu(Layer(fmt)(x, weight)), weight)

    expected = torch.autograd.grad(block(x).float().square().sum(), (x, weight))
    actual = torch.autograd.grad(
        checkpoint(block, x, use_reentrant=False).float().square().sum(), (x, weight)
    )
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@every_format
@pytest.mark.parametrize("geometry", [None, Geometry([1], [0], [1])])
def test_a_second_derivative_is_refused(fmt: str, geometry: Geometry | None) -> None:
    """Also for a sum, whose constant gradient torch would differentiate as a constant."""
    x, weight = (
        leaf(torch.randn(shape)) for shape in ((2, 5, 8), (3, 8) if geometry is None else (3, 5, 4))
    )
    for loss in (Tensor.sum, lambda y: y.float().square().sum()):
        (gradient,) = torch.autograd.grad(
            loss(Layer(fmt, geometry)(x, weight)), x, create_graph=True
        )
        with pytest.raises(PrecisionError, match=f"an operator in {fmt} has no second derivative:"):
            gradient.square().sum().backward()
        assert x.grad is None
        assert weight.grad is None


# torch.compile.

# The schema check compares inputs by `allclose`, which torch does not have for FP8. The schema is
# the same for all formats.
CHECKS = (
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)


@every_format
@pytest.mark.parametrize(
    ("rounding", "channel"), [("stochastic", False), pytest.param("nearest", True, marks=tiers.ALL)]
)
def test_operators_pass_opcheck(fmt: str, rounding: str, channel: bool) -> None:
    checks = (
        CHECKS
        if FORMATS[fmt].dtype.itemsize == 1 and FORMATS[fmt].kind == "float"
        else ("test_schema", *CHECKS)
    )
    transposed = Geometry([2], [1], [1], True, [1], 2)
    cases = (
        (Layer(fmt, None, channel, rounding), (5, 6), (7, 6)),
        (Layer(fmt, None, channel, rounding), (2, 3, 6), (7, 6)),
        (
            Layer(fmt, Geometry([2, 1], [1, 0], [1, 2]), channel, rounding),
            (2, 4, 7, 6),
            (6, 4, 3, 2),
        ),
        (Layer(fmt, transposed, channel, rounding), (3, 4, 5), (4, 3, 3)),
    )
    for layer, shape, weight_shape in cases:
        x, weight, outputs = (
            torch.randn(shape),
            torch.randn(weight_shape),
            7 if layer.geometry is None else 6,
        )
        arguments = layer.arguments(
            x.requires_grad_(), weight.requires_grad_(), torch.randn(outputs, requires_grad=True)
        )
        torch.library.opcheck(layer.operator, arguments, test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_carry_is_a_conversion_that_torch_accepts(dtype: torch.dtype) -> None:
    q = torch.randint(-7, 8, (2, 3, 4, 5)).to(dtype).to(memory_format=torch.channels_last)
    result = torch.ops.qsync.carry.default(q, torch.bfloat16)
    assert torch.equal(result, q.to(torch.bfloat16))
    assert result.stride() == q.stride()
    torch.library.opcheck(torch.ops.qsync.carry.default, (q, torch.bfloat16), test_utils=CHECKS)


def network(
    first: Layer,
    second: Layer,
    x: Tensor,
    kernel: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor,
) -> Tensor:
    return second(F.relu(first(x, kernel, None, seed)).mean((2, 3)), weight, bias, seed)


def step(run: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    y = run(*inputs)
    return [
        y,
        *torch.autograd.grad(y.float().square().sum(), [t for t in inputs if t.requires_grad]),
    ]


@pytest.mark.parametrize(
    ("fmt", "channel", "inner_backend"),
    [
        *((fmt, channel, "aot_eager") for fmt in FORMATS_OF_PRODUCTS for channel in (False, True)),
        pytest.param("int8", False, "inductor", marks=tiers.ALL),
    ],
)
def test_compiled_for_every_batch_size_at_once(fmt: str, channel: bool, inner_backend: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(inner_backend)
    # Created outside of the graph: Dynamo of torch 2.11 cannot create frozen dataclasses.
    layers = Layer(fmt, Geometry([1, 1], [1, 1], [1, 1]), channel), Layer(fmt, None, channel)
    plain = functools.partial(network, *layers)
    run = torch.compile(plain, backend=counter, fullgraph=True)
    parameters = [leaf(torch.randn(shape)) for shape in ((6, 4, 3, 3), (5, 6), (5,))]
    for batch in (4, 7, 2, 9):
        x = leaf(torch.randn(batch, 4, 8, 8).to(memory_format=torch.channels_last))
        torch._dynamo.mark_dynamic(x, 0)
        seed = torch.randint(2**62, [1])
        results, expected = (step(f, (x, *parameters, seed)) for f in (run, plain))
        for actual, wanted in zip(results, expected, strict=True):
            assert actual.dtype == wanted.dtype
            assert actual.stride() == wanted.stride()
            if inner_backend == "aot_eager":
                assert torch.equal(actual, wanted)
            else:
                # Fused code rounds intermediate results less often, so a value near the middle of
                # two levels may round to the other one.
                torch.testing.assert_close(
                    actual.float(),
                    wanted.float(),
                    rtol=2**-6,
                    atol=0.05 * wanted.abs().max().item(),
                )
    assert counter.frame_count == 1
