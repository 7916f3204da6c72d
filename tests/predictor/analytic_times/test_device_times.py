"""Operator times on a device of the catalog, with product shapes inferred from tensor sizes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import example, given, strategies as st
from torch import nn

import qsync_fx
from qsync_fx import Plan
from qsync_fx.devices import get
from qsync_fx.errors import ProfileError
from qsync_fx.formats import FORMATS
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.predictor.analytic_times import (
    ConvolutionShape,
    DeviceTimes,
    ProductShape,
    convolution,
    product,
)
from qsync_fx.predictor.cost_mapper import scheduled, states
from qsync_fx.predictor.model import ModelGraph
from qsync_fx.predictor.model.model_graph import state_named
from qsync_fx.profiler.model_graph_builder import build_model_graph
from tests.support.models.zoo_torch import resnet
from tests.support.planning.predicted_models import OWN

T4 = get("t4")


class Wide(nn.Module):
    """A model whose layers take much longer than their launch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.transpose(-1, -2), -1) @ self.down(torch.relu(self.up(x)))


MODELS: dict[str, Any] = {
    **OWN,
    "resnet": resnet,
    "wide": lambda: (Wide(), {"x": torch.randn(8, 128, 1024)}),
}


@functools.cache
def graph_of(name: str, target: str | None = "t4") -> ModelGraph:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return build_model_graph(
        qsync_fx.explain(
            model.train(),
            **inputs,
            options={"precision": "int8", "target": target, "skip_unprofitable": False},
        )
    )


def test_convolution_shapes_equal_the_layers() -> None:
    model = dict(resnet()[0].named_modules())
    times = DeviceTimes(T4, graph_of("resnet"))
    shapes = {op.id: times.sides(op.id) for op in times.graph.operators if op.row == "conv2d"}
    assert len(shapes) == 7
    for name, sides in shapes.items():
        layer = model[name.partition("/")[0]]
        assert isinstance(layer, nn.Conv2d)
        assert isinstance(sides, ConvolutionShape)
        assert (sides.c, sides.k, sides.r) == (
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size[0],
        )
        assert (sides.stride, sides.padding) == (layer.stride[0], layer.padding[0])


def test_product_shapes_equal_the_factors() -> None:
    times = DeviceTimes(T4, graph_of("wide"))
    shapes = {
        op.id: times.sides(op.id) for op in times.graph.operators if times.sides(op.id) is not None
    }
    assert list(shapes.values()) == [
        ProductShape(8, 128, 128, 1024),
        ProductShape(1, 1024, 4096, 1024),
        ProductShape(1, 1024, 1024, 4096),
        ProductShape(8, 128, 1024, 128),
    ]


@given(st.tuples(*[st.integers(1, 4096)] * 4))
@example((1, 1, 2, 1))
def test_four_numbers_give_the_four_sides_of_a_product(sides: tuple[int, ...]) -> None:
    b, m, n, k = sides
    assert product(b * m * k, b * k * n, b * m * n, 2 * b * m * n * k) == ProductShape(b, m, n, k)
    # Changed sizes may fit another shape: (2, 2, 2) is a batch of two products of (1, 1, 1).
    sizes = b * m * k + 1, b * k * n, b * m * n
    other = product(*sizes, 2 * b * m * n * k)
    if other is not None:
        assert sizes == (
            other.batch * other.m * other.k,
            other.batch * other.k * other.n,
            other.batch * other.m * other.n,
        )


@given(
    st.sampled_from([(1, 1, 0), (1, 2, 0), (3, 1, 1), (3, 2, 1), (5, 1, 2), (7, 2, 3)]),
    st.sampled_from([(8, 8), (17, 23), (32, 40)]),
    st.integers(1, 5),
    st.sampled_from([3, 8, 64]),
    st.sampled_from([8, 65]),
)
def test_convolution_shape_matches_its_bytes(
    window: tuple[int, int, int], size: tuple[int, int], n: int, c: int, k: int
) -> None:
    r, stride, padding = window
    layer = nn.Conv2d(c, k, r, stride, padding, device="meta")
    result = layer(torch.empty(n, c, *size, device="meta"))
    shape = convolution(n * c * size[0] * size[1], layer.weight.numel(), tuple(result.shape))
    assert shape is not None
    other = nn.Conv2d(shape.c, shape.k, shape.r, shape.stride, shape.padding, device="meta")
    assert other.weight.numel() == layer.weight.numel()
    assert (
        other(torch.empty(shape.n, shape.c, shape.h, shape.w, device="meta")).shape == result.shape
    )
    assert shape.n * shape.c * shape.h * shape.w == n * c * size[0] * size[1]


def test_layer_time_is_the_sum_of_its_three_products() -> None:
    graph, fp16 = graph_of("wide"), FORMATS["fp16"]
    times = DeviceTimes(T4, graph)
    seconds = times.operator("up/linear", OperandState(fp16, fp16))
    assert seconds.interpolated
    assert seconds.forward == T4.gemm_seconds(4096, 1024, 1024, "fp16", "tn")
    # The input of the first layer requires no gradient.
    assert seconds.backward == T4.gemm_seconds(1024, 4096, 1024, "fp16", "nt")
    both = times.operator("down/linear", OperandState(fp16, fp16)).backward
    assert both == T4.gemm_seconds(4096, 1024, 1024, "fp16", "nn") + T4.gemm_seconds(
        4096, 1024, 1024, "fp16", "nt"
    )


def test_int8_gradients_are_computed_in_their_rounded_format() -> None:
    times = DeviceTimes(T4, graph_of("wide"))
    int8, fp16, fp32 = (
        times.operator("down/linear", OperandState(FORMATS[name], FORMATS[output]))
        for name, output in (("int8", "fp16"), ("fp16", "fp16"), ("fp32", "fp32"))
    )
    assert int8.backward == fp16.backward < fp32.backward
    assert int8.forward != fp16.forward < fp32.forward
    a100 = DeviceTimes(get("a100"), graph_of("wide", "a100"))
    assert (
        a100.operator("down/linear", OperandState(FORMATS["bf16"], FORMATS["bf16"])).forward
        < fp16.forward
    )


@pytest.mark.parametrize("name", [*OWN, "resnet"])
def test_every_state_of_every_operator_has_a_time_and_a_plan_a_schedule(name: str) -> None:
    graph = graph_of(name)
    times = DeviceTimes(T4, graph)
    for operator in graph.operators:
        for precision, output in operator.costs:
            state = OperandState(
                FORMATS[precision] if precision else None, FORMATS[output] if output else None
            )
            seconds = times.operator(operator.id, state)
            assert 0 <= seconds.forward < 1
            assert 0 <= seconds.backward < 1
    for fmt in ("fp32", "fp16", "int8"):
        schedule = scheduled(states(graph, Plan.uniform(fmt)), times)
        assert schedule.seconds > 0
        assert schedule.optimizer == times.optimizer() > 0


def test_recomputation_time_is_counted() -> None:
    graph, fp32 = graph_of("checkpointed"), FORMATS["fp32"]
    times = DeviceTimes(T4, graph)
    inside = [op for op in graph.operators if op.repeated and times.sides(op.id)]
    assert inside
    outside = next(op for op in graph.operators if not op.repeated and times.sides(op.id))
    for operator in inside:
        state = next(OperandState(FORMATS[a or ""], FORMATS[b or ""]) for a, b in operator.costs)
        seconds = times.operator(operator.id, state)
        assert seconds.backward > 2 * seconds.forward * 0.9
    assert times.operator(outside.id, OperandState(fp32, fp32)).forward > 0


def test_cast_time_follows_from_bytes() -> None:
    times = DeviceTimes(T4, graph_of("wide"))
    cast = times.cast("up/linear", "fp32", "fp16", 10**7, True)
    assert cast.forward == cast.backward == T4.cast_seconds("fp32", "fp16", 10**7)
    assert times.cast("up/linear", "fp32", "fp16", 10**7, False).backward == 0
    quantized = times.cast("up/linear", "fp32", "int8", 10**7, True)
    assert quantized.backward == 0 < cast.forward < quantized.forward
    assert times.cast("up/linear", "fp16", "fp16", 10**7, True).forward == 0
    assert times.outside().forward == times.outside().backward == 0


def test_unknown_shape_is_named_in_the_error() -> None:
    graph = graph_of("wide")
    times = DeviceTimes(T4, graph)
    with pytest.raises(ProfileError, match="no operator 'up/linaer'") as raised:
        times.operator("up/linaer", OperandState(FORMATS["fp16"], FORMATS["fp16"]))
    assert "up/linear" in str(raised.value)
    with pytest.raises(ProfileError, match="no cost of the state bf16->bf16"):
        times.operator("up/linear", OperandState(FORMATS["bf16"], FORMATS["bf16"]))
    with pytest.raises(ProfileError, match="explained for t4") as raised:
        DeviceTimes(get("a100"), graph)
    assert 'options={"target": "a100"}' in str(raised.value)
    with pytest.raises(ProfileError, match="explained for cpu"):
        DeviceTimes(T4, graph_of("wide", None))
    assert DeviceTimes(get("epyc-9004"), graph_of("wide", None)).optimizer() > 0


def test_symbolic_sizes_are_an_error_with_a_remedy() -> None:
    model, x = Wide(), torch.randn(8, 128, 1024)
    torch._dynamo.mark_dynamic(x, 0)
    graph = build_model_graph(
        qsync_fx.explain(model, x, options={"target": "t4"}), ["fp32", "fp16"]
    )
    with pytest.raises(ProfileError, match="is not known") as raised:
        DeviceTimes(T4, graph).operator("up/linear", OperandState(FORMATS["fp16"], FORMATS["fp16"]))
    assert "give sizes first" in str(raised.value)


def test_convolution_time_is_found_for_another_batch() -> None:
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1)
    )
    graphs = []
    for batch, dynamic in ((4, True), (8, False)):
        torch._dynamo.reset()
        x = torch.randn(batch, 16, 24, 24)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        graphs.append(
            build_model_graph(
                qsync_fx.explain(model, x, options={"target": "t4"}), ["fp32", "fp16"]
            )
        )
    symbolic, static = graphs
    sized = symbolic.at(batch=8)
    assert [op.shape for op in sized.operators] == [op.shape for op in static.operators]
    ours, theirs = DeviceTimes(T4, sized), DeviceTimes(T4, static)
    for operator in static.operators:
        assert ours.sides(operator.id) == theirs.sides(operator.id)
        assert ("conv" in operator.row) == isinstance(theirs.sides(operator.id), ConvolutionShape)
        for names in operator.costs:
            assert ours.operator(operator.id, state_named(names)) == theirs.operator(
                operator.id, state_named(names)
            )
