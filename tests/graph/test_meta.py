"""Node metadata: one file defines its keys, and each kernel's time is charged to an operator of the
model.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

import qsync_fx
from benchmarks.support.unbuilt import without_kernels
from qsync_fx.devices.cpu_features import multiplied_in_fp32
from qsync_fx.graph import node_metadata
from qsync_fx.graph.fx_utils import tensors
from qsync_fx.graph.node_metadata import Part, charges, computes
from tests.support import tiers
from tests.test_architecture import SOURCES

aten = torch.ops.aten


def test_no_other_file_names_keys() -> None:
    names = {key.name for key in node_metadata.OURS}
    for name, path in SOURCES.items():
        if name == "qsync_fx/graph/node_metadata.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            keys = (
                {node.value}
                if isinstance(node, ast.Constant)
                else {node.arg}
                if isinstance(node, ast.keyword)
                else set()
            )
            # NOTE's name is also the name of the backend and of the command.
            assert not keys & (names - {node_metadata.NOTE.name}), f"{name} names {keys}"
            for key in _keys(node):
                assert key != "custom" and not str(key).startswith("qsync"), (
                    f"{name} accesses the metadata {key!r} of a node"
                )


def _keys(node: ast.AST) -> Iterator[object]:
    """Yield the keys of `x.meta` that a node uses: by index, a method such as `get`, or `in`."""
    match node:
        case ast.Subscript(value=ast.Attribute(attr="meta"), slice=ast.Constant(value=key)):
            yield key
        case ast.Call(
            func=ast.Attribute(value=ast.Attribute(attr="meta")), args=[ast.Constant(value=key), *_]
        ):
            yield key
        case ast.Compare(left=ast.Constant(value=key), comparators=[ast.Attribute(attr="meta")]):
            yield key


class _Graphs(CustomGraphPass):
    """Inductor's graphs after all of its passes: forward, then backward."""

    def __init__(self) -> None:
        self.seen: list[fx.Graph] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.seen.append(graph)

    def uuid(self) -> Any:
        return None  # disables Inductor's cache


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = (nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.pool = (
            nn.Conv2d(3, 16, 3, 2),
            nn.BatchNorm2d(16),
            nn.MaxPool2d(3, 2, 1),
        )
        self.block = Block(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.block(self.pool(torch.relu(self.norm(self.stem(x)))))
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


class Attention(nn.Module):
    """Attention in the form that Inductor's pattern matcher expects."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(2, 16, 2, 16).permute(0, 2, 1, 3) for layer in (self.q, self.k, self.v)
        )
        weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)).div(4.0), dim=-1)
        return self.out(weights.matmul(v).permute(0, 2, 1, 3).reshape(2, 16, 32)).sum()


def bert() -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    config = transformers.BertConfig(vocab_size=64, max_position_embeddings=16, **sizes)
    ids = torch.randint(0, 64, (2, 16))
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.tensor([0, 1]),
    }
    return transformers.BertForSequenceClassification(config), inputs


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "n_positions": 16,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    ids = torch.randint(0, 64, (2, 16))
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, **sizes)), {
        "input_ids": ids,
        "labels": ids,
    }


def residual() -> tuple[nn.Module, dict[str, Any]]:
    return Residual(), {"x": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}


def bert_base() -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(0, 1000, (2, 128))
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.tensor([0, 1]),
    }
    return transformers.BertForSequenceClassification(transformers.BertConfig()), inputs


def resnet50() -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    images = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.tensor([0, 1])}
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(num_labels=2)
    ), images


def attention() -> tuple[nn.Module, dict[str, Any]]:
    return Attention(), {"x": torch.randn(2, 16, 32, requires_grad=True)}


@functools.cache
def trained(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]], precision: str
) -> tuple[tuple[fx.Graph, ...], Any]:
    """Return Inductor's graphs of a training step, without building kernels, and the explanation of
    the model.
    """
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, inputs = make()
    explanation = qsync_fx.explain(model, options={"precision": precision}, **inputs)
    graphs = _Graphs()
    with torch._inductor.config.patch(post_grad_custom_post_pass=graphs), without_kernels():
        output = torch.compile(model, backend="qsync", options={"precision": precision})(**inputs)
        (output if isinstance(output, Tensor) else output.loss).backward()
    return tuple(graphs.seen), explanation


CASES = [
    (attention, "int8"),
    *(pytest.param(*case, marks=tiers.ALL) for case in ((bert, "int8"), (residual, "bf16"))),
    *(
        pytest.param(*case, marks=tiers.EVERY)
        for case in ((gpt2, "int8"), (bert, "bf16"), (residual, "int8"))
    ),
]
# Models of their usual size: twelve layers interact in more ways than one.
WHOLE = [
    pytest.param(make, precision, marks=[tiers.EVERY, pytest.mark.timeout(600)])
    for make in (bert_base, resnet50)
    for precision in ("bf16", "int8")
]


@pytest.mark.parametrize(("make", "precision"), [*CASES, *WHOLE])
def test_every_node_of_inductors_graphs_is_charged_to_an_operator_of_the_model(
    make: Any, precision: str
) -> None:
    graphs, explanation = trained(make, precision)
    ids = {str(operator.id) for operator in explanation.operators}
    assert len(graphs) >= 2
    for graph in graphs:
        charged = charges(graph)
        for node in graph.nodes:
            if computes(node) and tensors(node.meta.get("val")):
                assert node in charged, f"{node.format_node()} is charged to no operator"
                assert charged[node].owner in ids, (
                    f"{node.name} is charged outside of the model, to {charged[node].owner}"
                )


@pytest.mark.parametrize(("make", "precision"), CASES)
def test_casts_are_marked_as_casts_of_their_owner(make: Any, precision: str) -> None:
    graphs, explanation = trained(make, precision)
    wanted, seeds = set(), 0
    for node in explanation.graph_module("lower").graph.nodes:
        cast = node_metadata.CAST.get(node)
        assert cast is None or (
            (charge := node_metadata.charged(node)) is not None and charge.part is cast.part
        )
        if cast is not None and cast.part in (Part.QUANTIZE, Part.SEED):
            wanted.add(node_metadata.charged(node))
            seeds += cast.part is Part.SEED
    assert (seeds > 0) == (precision == "int8")
    marked = {charge for charge in charges(graphs[0]).values() if charge.part is not None}
    assert marked >= wanted
    if precision == "int8":
        targets = {torch.ops.qsync.quantize.default, torch.ops.qsync.quantize_transposed.default}
        for node, charge in charges(graphs[0]).items():
            assert (node.target not in targets) or charge.part is Part.QUANTIZE
    else:
        assert {charge.part for charge in marked} == {Part.CONVERT}


@pytest.mark.skipif(
    torch.__version__ >= (2, 15),
    reason="Inductor gives fused attention the name of a view; see docs/known-issues.md",
)
@pytest.mark.skipif(
    bool(multiplied_in_fp32()), reason="Inductor fuses torch's products into attention, not ours"
)
def test_fused_pattern_belongs_to_its_last_product() -> None:
    (forward, backward), _ = trained(attention, "int8")
    (fused,) = [n for n in forward.nodes if computes(n) and "scaled_dot_product" in n.name]
    (gradient,) = [n for n in backward.nodes if computes(n) and "scaled_dot_product" in n.name]
    assert node_metadata.charged(fused) is None, (
        "a fused node carries no charge: Inductor records which nodes it fused"
    )
    assert charges(forward)[fused].owner == "/matmul@v#1"
    assert charges(backward)[gradient].owner.startswith("/")


def test_constant_is_attributed_to_its_single_reader() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(aten.mm.default, (x, x))
    node_metadata.charge(product, "linear")
    classes = graph.call_function(torch.ops.prims.iota.default, (2,))
    compared = graph.call_function(
        aten.eq.Tensor, (product, graph.call_function(aten.reshape.default, (classes, [1, 2])))
    )
    graph.output((compared,))

    charged = charges(graph)

    assert {node: charge.owner for node, charge in charged.items()} == dict.fromkeys(
        filter(computes, graph.nodes), "linear"
    )


@tiers.ALL
def test_batch_norm_statistics_are_attributed_to_it() -> None:
    (forward, _), _ = trained(residual, "bf16")
    charged = charges(forward)
    written = [node for node in forward.nodes if node.target is aten.copy_.default]
    assert len(written) == 9  # count, mean and variance of each of three norms
    assert {charged[node].owner for node in written} == {
        f"{name}/batch_norm" for name in ("norm", "block.norm1", "block.norm2")
    }


@tiers.ALL
def test_the_sum_of_two_gradients_is_charged_where_the_value_was_made() -> None:
    (_, backward), _ = trained(residual, "bf16")
    charged = charges(backward)
    sums = [
        n
        for n in backward.nodes
        if n.target is aten.add.Tensor and node_metadata.charged(n) is None
    ]
    # The pooling computes the block's input.
    assert "pool/max_pool2d" in {charged[node].owner for node in sums}
