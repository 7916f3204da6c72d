"""Operator ids: equal on every rank, across graph breaks, and in the kernels of the backward pass.

They rely on semi-private behaviour of torch: AOTAutograd preserves `meta["custom"]`, and Dynamo has
rules for the names of modules and frames. The tests check both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qsync_fx
from qsync_fx import Plan, PlanError
from qsync_fx.backend.compile import rewrite
from qsync_fx.devices.cpu_features import native_integer_products
from qsync_fx.options import Options
from tests.support import tiers
from tests.support.models.small_models import Counting, Perceptron, build, compiled

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def ids(model: Any, *inputs: Any, **options: Any) -> list[str]:
    return [
        str(op.id) for op in qsync_fx.explain(model, *inputs, options=options or None).operators
    ]


def precisions(model: Any, *inputs: Any, **options: Any) -> dict[str, str]:
    operators = qsync_fx.explain(model, *inputs, options=options or None).operators
    return {str(op.id): str(op.precision) for op in operators if op.kind == "adjustable"}


# Through AOTAutograd.


def aten_graphs(model: nn.Module, x: Tensor, precision: str) -> tuple[fx.Graph, fx.Graph]:
    """Return the forward and backward graphs that the inner compiler would get, partitioned as by
    Inductor.
    """
    graphs: list[fx.Graph] = []

    def keep(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        rewritten = rewrite(module, inputs, Options(precision=precision)).module
        compile_aten = aot_autograd(
            fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
        )
        return compile_aten(rewritten, inputs)

    torch.compile(model, backend=backend)(x).sum().backward()
    forward, backward = graphs
    return forward, backward


def operators_of(graph: fx.Graph, *names: str) -> set[str]:
    """Return the operators of the ATen nodes with these names; each node must have one."""
    nodes = [
        node
        for node in graph.nodes
        if node.op == "call_function" and node.target.__name__.split(".")[0] in names
    ]
    return {node.meta["custom"]["qsync"] for node in nodes}


INTEGERS = "gemm" if native_integer_products() else "integer_products"


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Perceptron(), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


@pytest.mark.parametrize(("precision", "product"), [("bf16", "addmm"), ("int8", INTEGERS)])
def test_forward_and_backward_nodes_carry_the_id(precision: str, product: str) -> None:
    forward, backward = aten_graphs(build(Perceptron), torch.randn(4, 16), precision)
    linears = {"layers.0/linear", "layers.3/linear", "head/linear"}
    assert operators_of(forward, product) == linears
    assert operators_of(backward, "mm") == linears
    assert operators_of(backward, "sum") == linears, "bias gradients carry the ids of their layers"
    assert operators_of(backward, "tanh_backward") == {"layers.4/tanh"}
    assert operators_of(backward, "threshold_backward") == {"layers.1/relu"}


@pytest.mark.parametrize(("precision", "product"), [("bf16", "addmm"), ("int8", INTEGERS)])
def test_recomputed_nodes_carry_the_id(precision: str, product: str) -> None:
    _, backward = aten_graphs(build(Checkpointed), torch.randn(4, 16), precision)
    recomputed = operators_of(backward, product)
    assert {"body.layers.0/linear", "body.layers.3/linear"} <= recomputed
    assert "head/linear" not in recomputed
    assert operators_of(backward, "relu") == {"body.layers.1/relu"}


# Paths and numbers in ids.


def test_modules_called_twice_and_operators_outside_modules() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.shared = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(x)
            x = torch.relu(torch.relu(self.stem(x)))
            x = self.shared(torch.tanh(self.shared(x)))
            return F.linear(torch.tanh(x), self.stem.weight)

    assert ids(Model(), torch.randn(4, 16)) == [
        "/relu",
        "stem/linear",
        "/relu@stem",
        "/relu@stem#1",
        "shared/linear",
        "/tanh@shared",
        "shared/linear#1",
        "/tanh@shared#1",
        "/linear@shared",
    ]


def test_operators_inside_a_module_that_is_no_leaf() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.inner(torch.relu(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])
            self.by_name = nn.ModuleDict({"last": Block()})

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.by_name["last"](x)

    assert ids(Model(), torch.randn(4, 16)) == [
        f"{path}{operator}"
        for path in ("blocks.0", "blocks.1", "by_name.last")
        for operator in ("/relu", ".inner/linear", "/relu#1")
    ]


@pytest.mark.parametrize("variant", ["module", "function", "in place", "part of another"])
def test_ids_do_not_depend_on_how_the_model_is_compiled(variant: str) -> None:
    model, x = build(Perceptron), torch.randn(4, 16)
    expected = ids(model, x)
    actual: list[str] = []

    @qsync_fx.graph_pass
    def collect(graph: qsync_fx.PrecisionGraph) -> None:
        actual.extend(str(op.id) for op in graph.operators())

    def step(network: nn.Module, x: Tensor) -> Tensor:
        return network(x)

    if variant == "module":
        compiled(model, passes=[collect])(x)
    elif variant == "function":
        compiled(step, passes=[collect])(model, x)
    elif variant == "part of another":
        compiled(nn.Sequential(model), passes=[collect])(x)
        expected = [f"0.{name}" for name in expected]
    else:
        model.compile(backend="qsync", options={"inner_backend": "aot_eager", "passes": [collect]})
        model(x)
    assert actual == expected


# Across graph breaks.


def _break(where: set[str], name: str) -> None:
    if name in where:
        torch._dynamo.graph_break()


class Layer(nn.Module):
    def __init__(self, breaks: set[str]) -> None:
        super().__init__()
        self.first, self.second, self.breaks = nn.Linear(16, 16), nn.Linear(16, 16), breaks

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        _break(self.breaks, "layer")
        return x + torch.relu(self.second(x))


class Breaking(nn.Module):
    def __init__(self, *breaks: str) -> None:
        super().__init__()
        self.stem, self.shared, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.one, self.two = Layer(set(breaks)), Layer(set(breaks))
        self.breaks = set(breaks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(torch.relu(self.stem(x)))
        _break(self.breaks, "model")
        x = self.shared(torch.relu(x))
        x = self.one(x)
        x = self.two(x)
        _break(self.breaks, "end")
        return self.head(torch.tanh(x) @ self.shared.weight)


@pytest.mark.parametrize(
    "breaks", [("model",), ("end",), ("model", "end"), ("layer",), ("layer", "model")]
)
def test_the_same_ids_with_graph_breaks_as_without(breaks: tuple[str, ...]) -> None:
    x = torch.randn(4, 16)
    unbroken = qsync_fx.explain(Breaking(), x)
    broken = qsync_fx.explain(Breaking(*breaks), x)
    assert len(unbroken.graphs) == 1
    assert len(broken.graphs) > 1
    expected, actual = ([str(op.id) for op in e.operators] for e in (unbroken, broken))
    if "layer" in breaks:
        # An operator outside of modules that follows a module with a graph break has the name of
        # the last module seen before it.
        outside = {name for name in expected if name.startswith("/")}
        assert [name for name in actual if not name.startswith("/")] == [
            name for name in expected if name not in outside
        ]
        assert len(actual) == len(set(actual)) == len(expected)
    else:
        assert actual == expected


def test_layers_with_shared_code_follow_separate_plans() -> None:
    plan = Plan("fp32", patterns=[("one", "int8"), ("two.second", "bf16")])
    x = torch.randn(4, 16)
    formats = precisions(Breaking("layer"), x, plan=plan)
    assert formats["one.first/linear"] == formats["one.second/linear"] == "int8"
    assert formats["two.first/linear"] == "fp32"
    assert formats["two.second/linear"] == "bf16"
    broken = build(lambda: Breaking("layer"))
    error = (compiled(broken, plan=plan, rounding="nearest")(x) - broken(x)).abs().max()
    assert 1e-5 < error < 0.01


def test_layers_with_one_plan_share_code() -> None:
    backend, x = Counting(), torch.randn(4, 16)
    model = backend.compile(build(lambda: Breaking("layer")), precision="int8")
    model(x.requires_grad_()).sum().backward()
    graphs = len(backend.graphs)
    model(x).sum().backward()
    assert len(backend.graphs) == graphs
    each = Counting()
    each.compile(build(lambda: Breaking("layer")), plan=Plan("int8", patterns=[("one", "bf16")]))(x)
    assert graphs < len(each.graphs)


@tiers.ALL
def test_more_layers_than_the_recompile_limit() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer({"layer"}) for _ in range(9))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    plan, x = Plan("int8", patterns=[("layers.8", "fp32")]), torch.randn(4, 16)
    with pytest.raises(
        PlanError, match=r"Layer is compiled separately.* the model has 9 of this class"
    ) as caught:
        compiled(Deep(), plan=plan)(x)
    assert "recompile_limit = 36" in str(caught.value.do)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=36):
        compiled(Deep(), plan=plan)(x).sum().backward()
    assert len(precisions(Deep(), x, plan=plan)) == 18


def test_ids_are_the_same_when_code_is_compiled_again() -> None:
    """Another batch size, or evaluation, retraces a graph and the graph after its break."""
    recorded: list[list[str]] = []

    @qsync_fx.graph_pass
    def collect(graph: qsync_fx.PrecisionGraph) -> None:
        recorded.append([str(op.id) for op in graph.operators()])

    model = compiled(Breaking("model"), passes=[collect])
    for batch in (4, 5):
        model(torch.randn(batch, 16))
    with torch.no_grad():
        model(torch.randn(4, 16))
    assert len(recorded) == 6
    assert recorded[0:2] == recorded[2:4] == recorded[4:6]
