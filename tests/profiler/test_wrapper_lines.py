"""Nodes computed by lines of Inductor's wrappers, from Inductor's broader provenance."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from qsync_fx.profiler.timing.inductor_lines import computed_by, watching
from tests.support.tiers import ALL

aten = torch.ops.aten
GRADIENTS = "torch.ops.aten.convolution_backward.default:3"


def backward() -> tuple[fx.Graph, dict[str, fx.Node]]:
    """Return the backward graph of two convolutions with a ReLU between them, and its nodes."""
    graph = fx.Graph()
    incoming = graph.placeholder("incoming")
    nodes = {"gate": graph.call_function(aten.threshold_backward.default, (incoming, incoming, 0))}
    nodes["both"] = graph.call_function(
        aten.convolution_backward.default, (nodes["gate"], incoming, incoming)
    )
    nodes["of_input"] = graph.call_function(operator.getitem, (nodes["both"], 0))
    nodes["narrow"] = graph.call_function(aten._to_copy.default, (nodes["of_input"],))
    nodes["second"] = graph.call_function(
        aten.convolution_backward.default, (nodes["narrow"], incoming, incoming)
    )
    return graph, nodes


def test_library_calls_own_their_node_and_fused_kernels_do_not() -> None:
    graph, nodes = backward()
    gate, both, narrow, second = (nodes[name] for name in ("gate", "both", "narrow", "second"))
    reported = [
        ("cpp_fused_convolution_backward_threshold_backward_0", [gate, both]),
        # The order of reported nodes is arbitrary.
        (GRADIENTS, [both, gate]),
        ("cpp_fused__to_copy_convolution_backward_1", [second, narrow]),
        (GRADIENTS, [narrow, second]),
        ("extern_kernels.mm", []),
    ]
    assert computed_by(graph, reported) == [[gate], [both], [narrow], [second], []]


def test_transposition_counts_to_its_consumer() -> None:
    graph, nodes = backward()
    reported = [("cpp_fused_convolution_backward_0", [nodes["both"]]), (GRADIENTS, [nodes["both"]])]
    assert computed_by(graph, reported) == [[nodes["both"]], [nodes["both"]]]


@ALL
def test_convolution_gradients_are_one_call() -> None:
    """Pin Inductor's provenance of a call with two results: all nodes of its operands, then it."""
    model = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 3), nn.ReLU())
    with watching() as files:
        compiled = torch.compile(
            model, backend="qsync", options={"precision": "fp32"}, dynamic=False
        )
        compiled(torch.randn(2, 3, 8, 8, requires_grad=True)).square().sum().backward()
    kernels = [kernel for lines in files.values() for kernel in lines.values()]
    calls = [kernel for kernel in kernels if kernel.library]
    assert ["convolution" in node.target for call in calls for node in call.nodes] == [True, True]
    assert {node.owner for call in calls for node in call.nodes if node.owner is not None} == {
        "1/conv2d"
    }
    for kernel in kernels:
        turns = ["convolution" in node.target for node in kernel.nodes]
        assert kernel.library or all(turns) or not any(turns), kernel.name
