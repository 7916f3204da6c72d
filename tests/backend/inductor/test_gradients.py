"""Weight gradients have the strides of their weights, so that autograd does not copy them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

from qsync_fx.backend.inductor.layouts import AsWeights

prims = torch.ops.prims


def network(memory_format: torch.memory_format) -> nn.Module:
    torch.manual_seed(0)
    first, second = (
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.Conv2d(32, 32, 3, padding=1, bias=False),
    )
    made: nn.Module = nn.Sequential(first, nn.BatchNorm2d(32), nn.ReLU(), second).to(
        memory_format=memory_format
    )  # type: ignore[call-overload]
    return made


def handed_over(model: nn.Module, images: Tensor, **compile_kwargs: Any) -> dict[str, Tensor]:
    """Return the gradients that the compiled code passes to autograd."""
    gradients: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        weight.register_hook(lambda gradient, name=name: gradients.__setitem__(name, gradient))
    torch.compile(model, dynamic=False, **compile_kwargs)(images).square().mean().backward()
    return gradients


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_have_the_strides_of_their_weights(
    memory_format: torch.memory_format, precision: str
) -> None:
    model, images = network(memory_format), torch.randn(4, 16, 8, 8)
    expected = handed_over(copy.deepcopy(model), images, backend="eager")
    gradients = handed_over(model, images, backend="qsync", options={"precision": precision})
    weights = dict(model.named_parameters())
    for name, gradient in gradients.items():
        assert gradient.stride() == weights[name].stride(), name
        atol = {"fp32": 1e-5, "bf16": 8e-2}[precision] * expected[name].abs().max().item()
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=atol)


def joint() -> tuple[fx.Graph, Tensor]:
    """Return a joint graph with one result, a weight gradient, and no gradient for a scale."""
    graph, value = fx.Graph(), torch.empty(8, 4, 3, 3)
    weight, scale, tangent = (
        graph.placeholder(name) for name in ("primals_1", "primals_2", "tangents_1")
    )
    weight.meta["val"], scale.meta["val"] = value, torch.empty(())
    tangent.meta["val"] = torch.empty_like(value, memory_format=torch.channels_last)
    result, gradient = (
        graph.call_function(torch.ops.aten.neg.default, (of,)) for of in (weight, tangent)
    )
    result.meta["val"], gradient.meta["val"] = value, tangent.meta["val"]
    graph.output((result, gradient, None))
    return graph, value


def test_joint_graph_has_the_strides_of_gradients() -> None:
    graph, value = joint()
    AsWeights()(graph)
    graph.lint()
    result, gradient, none = graph.output_node().args[0]  # type: ignore[misc, union-attr]
    assert result.target is torch.ops.aten.neg.default  # type: ignore[union-attr]
    assert none is None
    assert gradient.target is prims.inductor_force_stride_order.default  # type: ignore[union-attr]
    assert tuple(gradient.args[1]) == value.stride() == gradient.meta["val"].stride()  # type: ignore[union-attr, arg-type]


def test_a_graph_for_inference_stays_as_it_is() -> None:
    graph, _ = joint()
    (tangent,) = (node for node in graph.find_nodes(op="placeholder") if node.name == "tangents_1")
    tangent.name = "primals_3"
    before = str(graph)
    AsWeights()(graph)
    assert str(graph) == before


def test_another_pass_runs_first_and_is_part_of_the_name() -> None:
    class Before(CustomGraphPass):
        ran = False

        def __call__(self, graph: fx.Graph) -> None:
            self.ran = not graph.find_nodes(
                op="call_function", target=prims.inductor_force_stride_order.default
            )

        def uuid(self) -> Any:
            return "before"

    before = Before()
    AsWeights(before)(joint()[0])
    assert before.ran
    assert AsWeights(before).uuid() != AsWeights().uuid()
