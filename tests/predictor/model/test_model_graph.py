"""The predictor's model graph: parameters, values, symbolic sizes, and its file."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import qsync_fx
from qsync_fx import Plan, ProfileError
from qsync_fx.predictor.cost_mapper import CostMapper, states
from qsync_fx.predictor.model import ModelGraph
from qsync_fx.predictor.model.model_file import FILE, restored, stored
from qsync_fx.profiler.model_graph_builder import build_model_graph
from tests.support.planning.predicted_models import DrawnTimes, cost_of, explained, graph_of
from tests.support.tiers import ALL

torch.set_num_threads(1)
NAMES = [
    "mlp",
    "broken",
    "checkpointed",
    "odd",
    *(pytest.param(n, marks=ALL) for n in ("bert2", "resnet", "gpt2")),
]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(11, 16), nn.Linear(16, 48), nn.Linear(16, 3)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.table(ids)).chunk(3, -1)
        return torch.relu(self.out(nn.functional.scaled_dot_product_attention(q, k, v)))


def of(model: nn.Module, *inputs: Tensor, dynamic: bool = False) -> ModelGraph:
    torch._dynamo.reset()
    for tensor in inputs if dynamic else ():
        torch._dynamo.mark_dynamic(tensor, 0, min=2, max=64)
        torch._dynamo.mark_dynamic(tensor, 1, min=2, max=64)
    return build_model_graph(qsync_fx.explain(model, *inputs, options={"precision": "int8"}))


def test_parameters_stand_as_the_model_registers_them() -> None:
    for name in ("broken", "tied", "odd"):
        graph = graph_of(name)
        assert [(p.path, p.numel, p.dtype_bytes, p.trained) for p in graph.parameters] == [
            (p.path, p.numel, p.dtype_bytes, p.trained) for p in explained(name).parameters
        ]
        for parameter in graph.parameters:
            for reader in parameter.readers:
                assert parameter.path.rpartition(".")[0] in (
                    graph.operators[reader].id.partition("/")[0],
                    "table",
                )
    assert [p.path for p in graph_of("broken").parameters] == [
        "second.weight",
        "second.bias",
        "first.weight",
        "first.bias",
    ]


class Halves(nn.Module):
    """Two linear layers with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        result: Tensor = self.second(x)
        return result


def test_parameters_of_layers_that_are_compiled_alone_have_their_path_in_the_model() -> None:
    graph = of(nn.Sequential(Halves(), Halves()), torch.randn(2, 8))
    assert {
        p.path: [graph.operators[index].id for index in p.readers] for p in graph.parameters
    } == {
        f"{layer}.{name}": [f"{layer}/linear"]
        for layer in ("0.first", "0.second", "1.first", "1.second")
        for name in ("weight", "bias")
    }


def test_frozen_parameters_get_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    graph = of(model, torch.randn(2, 8))
    assert [parameter.trained for parameter in graph.parameters] == [False, False, True, True]
    schedule = CostMapper(graph, DrawnTimes(), Plan.uniform("bf16")).schedule()
    assert [parameter.path for parameter in schedule.parameters] == ["1.weight", "1.bias"]


def test_values_record_their_source() -> None:
    graph = graph_of("tied")
    values = {value.name: value for value in graph.values}
    assert (values["ids"].source, values["ids"].own, values["ids"].numel, values["ids"].fixed) == (
        "input",
        None,
        0,
        6 * 8,
    )
    (table,) = (value for value in graph.values if value.source == "parameter")
    assert (table.own, table.numel, table.operator) == ("fp32", 128, None)
    linear = graph.operator("head/linear")
    assert graph.values[linear.result].operator == graph.place("head/linear")
    assert [read.role for read in linear.reads] == ["input", "weight"]


def test_other_sizes_take_no_other_trace() -> None:
    symbolic = of(Attending(), torch.zeros(4, 6, dtype=torch.long), dynamic=True)
    assert symbolic.symbols == {"batch", "sequence"}
    traced = of(Attending(), torch.zeros(5, 9, dtype=torch.long))
    sized = symbolic.at(batch=5, sequence=9)
    assert not sized.symbols
    assert (
        symbolic.at(batch=5).symbols == {"sequence"}
        and symbolic.at(batch=5).at(sequence=9) == sized
    )
    for precision in ("int8", "bf16", "fp32"):
        plan = Plan.uniform(precision)
        first, second = states(sized, plan), states(traced, plan)
        assert first.names == second.names
        for operator in traced.operators:
            ours, theirs = cost_of(first, operator.id), cost_of(second, operator.id)
            assert (ours.work, ours.saved_bytes) == (theirs.work, theirs.saved_bytes), operator.id
        assert (
            CostMapper(sized, DrawnTimes(), plan).totals
            == CostMapper(traced, DrawnTimes(), plan).totals
        )
    with pytest.raises(ProfileError, match="no symbolic size 'bach'"):
        symbolic.at(bach=3)
    with pytest.raises(ProfileError, match="whole number"):
        symbolic.at(batch=0)
    with pytest.raises(ProfileError, match=r"elements is not known") as caught:
        CostMapper(symbolic, DrawnTimes(), Plan.uniform("int8"))
    assert "graph.at(batch=...)" in str(caught.value)


def test_costs_cover_the_requested_formats() -> None:
    narrow = build_model_graph(explained("mlp"), ("fp32", "int8"))
    assert {state for operator in narrow.operators for state in operator.costs} <= {
        (p, o) for p in ("fp32", "int8", "bf16") for o in ("fp32", "bf16")
    }
    assert (
        states(narrow, Plan.uniform("int8")).names
        == states(graph_of("mlp"), Plan.uniform("int8")).names
    )
    with pytest.raises(qsync_fx.PlanError, match="was not made for plans with 'bf16'"):
        states(narrow, Plan.uniform("bf16"))


@pytest.mark.parametrize("name", NAMES)
def test_model_graph_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    graph = graph_of(name)
    graph.save(tmp_path / "graph.json")
    again = ModelGraph.load(tmp_path / "graph.json")
    assert again == graph
    plan = Plan.uniform("int8")
    assert states(again, plan).casts == states(graph, plan).casts


def test_symbolic_sizes_are_saved_and_loaded(tmp_path: Path) -> None:
    graph = of(Attending(), torch.zeros(4, 6, dtype=torch.long), dynamic=True)
    graph.save(tmp_path / "graph.json")
    assert ModelGraph.load(tmp_path / "graph.json") == graph


def spoilt(tree: Any, data: st.DataObject) -> None:
    """Replace or delete a drawn value of a JSON tree in place."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        key = data.draw(st.sampled_from(keys))
        inside = tree[key]
        if isinstance(inside, (dict, list)) and inside and data.draw(st.integers(0, 9)):
            tree = inside
            continue
        others = st.sampled_from(
            [
                None,
                -1,
                10**9,
                0,
                1,
                "",
                "x",
                "int9",
                "fp64",
                1.5,
                [],
                {},
                True,
                "batch**9**9",
                "1/0",
            ]
        )
        if data.draw(st.booleans()) and isinstance(tree, list):
            del tree[key]
        else:
            tree[key] = data.draw(others)
        return


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_spoilt_file_is_an_error_or_a_graph_that_any_plan_fits(data: st.DataObject) -> None:
    tree = json.loads(FILE.encode(stored(graph_of("mlp"))))
    spoilt(tree, data)
    try:
        graph = restored(FILE.decode(json.dumps(tree)))
    except ProfileError:
        return
    for precision in graph.formats:
        chosen = {op.id: precision for op in graph.operators if op.kind == "adjustable"}
        planned = states(graph, chosen)
        planned.saved()
        assert all(
            names in operator.costs
            for names, operator in zip(planned.names, graph.operators, strict=True)
        )
        with contextlib.suppress(ProfileError):  # a size may now be symbolic
            assert CostMapper(graph, DrawnTimes(), chosen).states() == planned


def test_model_without_a_graph_is_an_error() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return x

    with pytest.raises(ProfileError, match="compiled no part"):
        of(Plain(), torch.randn(2))
