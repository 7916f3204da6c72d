"""Errors name the custom pass that corrupts a graph, at every position in the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import qsync_fx
from qsync_fx.errors import PassError

Graph = qsync_fx.PrecisionGraph
Damage = Callable[[Graph], None]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def call_of(graph: Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.op == "call_function")


def erase_the_output(graph: Graph) -> None:
    graph.graph.erase_node(graph.nodes[-1])


def erase_all_nodes(graph: Graph) -> None:
    for node in reversed(graph.nodes):
        graph.graph.erase_node(node)


def add_an_output(graph: Graph) -> None:
    graph.graph.output(graph.nodes[0])


def empty_the_output(graph: Graph) -> None:
    graph.nodes[-1].args = ()


def set_no_module(graph: Graph) -> None:
    graph.module = None  # type: ignore[assignment]


def set_another_module(graph: Graph) -> None:
    graph.module = nn.Linear(2, 2)  # type: ignore[assignment]


def delete_the_module(graph: Graph) -> None:
    del graph.module


def set_an_empty_graph(graph: Graph) -> None:
    graph.module = fx.GraphModule({}, fx.Graph())


def set_no_inputs(graph: Graph) -> None:
    graph.inputs = None  # type: ignore[assignment]


def set_no_outputs(graph: Graph) -> None:
    graph.outputs = None  # type: ignore[assignment]


def set_no_context(graph: Graph) -> None:
    graph.context = None  # type: ignore[assignment]


def set_no_numbers(graph: Graph) -> None:
    graph.numbers = None  # type: ignore[assignment]


def set_metadata_to_none(graph: Graph) -> None:
    for node in graph.nodes:
        node.meta = None  # type: ignore[assignment]


def delete_metadata(graph: Graph) -> None:
    for node in graph.nodes:
        del node.meta


def set_notes_to_text(graph: Graph) -> None:
    for node in graph.nodes:
        node.meta["qsync"] = "text"


def set_bodies_to_a_number(graph: Graph) -> None:
    for node in graph.nodes:
        node.meta["qsync_bodies"] = 3


def set_an_unknown_operation(graph: Graph) -> None:
    call_of(graph).op = "nonsense"


def set_an_unhashable_target(graph: Graph) -> None:
    call_of(graph).target = []  # type: ignore[assignment]


def set_a_number_as_target(graph: Graph) -> None:
    call_of(graph).target = 5  # type: ignore[assignment]


def set_a_name_as_target(graph: Graph) -> None:
    call_of(graph).target = "relu"


def insert_a_number(graph: Graph) -> None:
    with graph.graph.inserting_before(graph.nodes[-1]):
        graph.graph.call_function(5, (graph.nodes[-2],))  # type: ignore[arg-type]


def insert_an_unknown_method(graph: Graph) -> None:
    with graph.graph.inserting_before(graph.nodes[-1]):
        graph.graph.call_method("nonsense", (graph.nodes[-2],))


def return_the_graph(graph: Graph) -> Any:
    return graph


def delete_values(graph: Graph) -> None:
    for node in graph.nodes:
        node.meta.clear()


def set_values_to_text(graph: Graph) -> None:
    for node in graph.nodes:
        node.meta["val"] = "text"


def delete_notes(graph: Graph) -> None:
    for node in graph.nodes:
        node.meta.pop("qsync", None)


def set_a_kind_to_text(graph: Graph) -> None:
    for operator in graph.operators():
        operator.update(kind="text")


def take_arguments_away(graph: Graph) -> None:
    call_of(graph).args = ()


def give_an_argument_of_another_type(graph: Graph) -> None:
    node = call_of(graph)
    node.args = ({}, *node.args)


ANYWHERE = (
    erase_the_output,
    erase_all_nodes,
    add_an_output,
    empty_the_output,
    set_no_module,
    set_another_module,
    delete_the_module,
    set_an_empty_graph,
    set_no_inputs,
    set_no_outputs,
    set_no_context,
    set_no_numbers,
    set_metadata_to_none,
    delete_metadata,
    set_notes_to_text,
    set_bodies_to_a_number,
    set_an_unknown_operation,
    set_an_unhashable_target,
    set_a_number_as_target,
    set_a_name_as_target,
    insert_a_number,
    insert_an_unknown_method,
    return_the_graph,
)
AFTER_NORMALIZE = (
    delete_values,
    set_values_to_text,
    delete_notes,
    set_a_kind_to_text,
    take_arguments_away,
    give_an_argument_of_another_type,
)
PLACES = [
    {"before": "normalize"},
    {"after": "assign"},
    {"after": "insert_casts"},
    {"after": "annotate_cost"},
]
CASES = [
    pytest.param(damage, place, id=f"{damage.__name__}-{'-'.join(*place.items())}")
    for damages, places in ((ANYWHERE, PLACES), (AFTER_NORMALIZE, PLACES[1:]))
    for damage in damages
    for place in places
]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def run(damage: Damage, place: dict[str, str], inner: str = "eager") -> Tensor:
    step = qsync_fx.graph_pass(**place, name="faulty")(damage)
    options = {"inner_backend": inner, "precision": "bf16", "passes": [step]}
    result: Tensor = torch.compile(net(), backend="qsync", options=options)(torch.randn(4, 8))
    return result


@pytest.mark.parametrize(("damage", "place"), CASES)
def test_an_error_names_the_pass_that_damages_a_graph(
    damage: Damage, place: dict[str, str]
) -> None:
    with pytest.raises(PassError) as caught:
        run(damage, place)
    assert "'faulty'" in str(caught.value)
    assert caught.value.where
    assert caught.value.do


def test_error_names_the_damage() -> None:
    with pytest.raises(PassError) as caught:
        run(erase_the_output, {"after": "assign"})
    assert str(caught.value) == (
        "pass 'faulty' has corrupted the graph: it does not end with its only output node\n"
        "  where: pass 'faulty'\n"
        "  do:    keep the output node, and set its args to (values,) to return other values"
    )
    with pytest.raises(PassError, match=r"graph\.module is NoneType, not GraphModule"):
        run(set_no_module, {"after": "assign"})


def test_explaining_names_the_pass_too() -> None:
    step = qsync_fx.graph_pass(after="assign", name="faulty")(set_no_module)
    with pytest.raises(PassError, match="pass 'faulty' has corrupted the graph"):
        qsync_fx.explain(net(), torch.randn(4, 8), options={"passes": [step]})


@pytest.mark.parametrize("place", PLACES, ids=lambda place: "-".join(*place.items()))
def test_modes_that_a_pass_leaves_on_end_with_it(place: dict[str, str]) -> None:
    def leave_modes(graph: Graph) -> None:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)

    assert run(leave_modes, place, "aot_eager").requires_grad
    assert torch.get_default_dtype() is torch.float32


def test_a_pass_on_the_graph_of_dynamo_changes_a_copy() -> None:
    """Dynamo prints and cleans up its own graph after it has called a backend."""

    def clear_metadata(graph: Graph) -> None:
        for node in graph.nodes:
            node.meta = {key: value for key, value in node.meta.items() if key != "grapharg"}

    run(clear_metadata, {"before": "normalize"}).sum().backward()
