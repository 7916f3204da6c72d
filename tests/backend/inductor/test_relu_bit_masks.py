"""Packed ReLU masks under "activation_recompute": byte masks give bit-equal gradients."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition

from qsync_fx.backend.inductor import inductor_config, recompute_policy
from qsync_fx.backend.inductor.decompositions import for_inductor
from tests.support import tiers
from tests.support.compiling.early_bytes import Graphs


class Residual(nn.Module):
    """Sums whose ReLU mask cannot be derived from the saved, quantized activations."""

    def __init__(self, layer: type[nn.Module], *layer_args: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(5, 5, *layer_args) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x) + x)
        return x


NETWORKS = {
    "rows": (lambda: Residual(nn.Linear), (7, 5)),
    "images": (lambda: Residual(nn.Conv2d, 3, 1, 1), (3, 5, 9, 7)),
    "volumes": (lambda: Residual(nn.Conv3d, 3, 1, 1), (2, 5, 3, 5, 4)),
}


@pytest.fixture
def settings() -> Iterator[Graphs]:
    graphs = Graphs()
    with torch._inductor.config.patch(post_grad_custom_pre_pass=graphs):
        yield graphs
    torch._dynamo.reset()


def gradients_of(network: str, x: Tensor) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = NETWORKS[network][0]()
    step: Any = torch.compile(
        model, backend="qsync", options={"precision": "int8", "activation_recompute": True}
    )
    x = x.clone().requires_grad_()
    step(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item, misc]


@pytest.mark.parametrize(
    "network",
    [pytest.param("rows", marks=tiers.ALL), "images", pytest.param("volumes", marks=tiers.ALL)],
)
def test_packed_masks_give_bit_equal_gradients(
    network: str, settings: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(NETWORKS[network][1])
    actual = gradients_of(network, x)
    forward, backward = settings.seen[:2]
    saved = [node for node in forward.output_node().all_input_nodes if node.op == "call_function"]
    bits = [node for node in saved if node.target is torch.ops.qsync.pack_bits.default]
    masks = [
        node
        for node in saved
        if node.meta["val"].dtype in (torch.bool, torch.int8) and node not in bits
    ]
    assert bits
    assert all(node.target is operator.getitem for node in masks), (
        "only outputs of quantizers are saved as bytes"
    )
    order = {node: index for index, node in enumerate(forward.nodes)}
    for node in bits:
        source: Any = node
        while source.target is not torch.ops.aten.relu.default:
            source = source.args[0]
        assert order[node] - order[source] <= 5, "a mask is packed right after its ReLU"
    assert len(
        backward.find_nodes(op="call_function", target=torch.ops.qsync.unpack_bits.default)
    ) == len(bits)

    monkeypatch.setattr(
        recompute_policy.InBits,
        "__call__",
        lambda _, *args, **kwargs: min_cut_rematerialization_partition(*args, **kwargs),
    )
    expected = gradients_of(network, x)
    assert not settings.seen[2].find_nodes(
        op="call_function", target=torch.ops.qsync.pack_bits.default
    )
    assert all(map(torch.equal, actual, expected))


def test_custom_partitioner_runs_first() -> None:
    graphs = []

    class Theirs(recompute_policy.InBits):
        def __call__(
            self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            graphs.append(gm)
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)  # type: ignore[no-untyped-call]

    with torch._inductor.config.patch(custom_partitioner_fn=Theirs()):
        ours = inductor_config.inductor(torch.device("cpu"), activation_recompute=True)[
            "custom_partitioner_fn"
        ]
        assert isinstance(ours.partition, Theirs)
        assert ours.uuid() != recompute_policy.InBits().uuid()
        assert "custom_partitioner_fn" not in inductor_config.inductor(torch.device("cpu"))
    joint = fx.symbolic_trace(lambda primals_1, tangents_1: (primals_1 * 2, tangents_1 * 2))
    for node in joint.graph.nodes:
        node.meta["val"] = torch.empty(2)
    forward, _ = ours(joint, ([torch.empty(2)], [torch.empty(2)]), num_fwd_outputs=1)
    assert graphs == [joint]
    assert torch.equal(forward(torch.ones(2))[0], torch.full((2,), 2.0))


def test_cached_graph_is_loaded_under_its_compile_settings() -> None:
    """With `fallback_random`, Inductor's table has no dropout decomposition to wrap."""
    table = for_inductor(torch.device("cpu"), activation_recompute=True)
    with torch._inductor.config.patch(fallback_random=True):
        assert pickle.loads(pickle.dumps(table))
