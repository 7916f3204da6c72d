"""Operator costs: their algebra, compared with torch's FLOP counter, with tensors that autograd
saves, and with casts that passes insert.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, strategies as st
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import qsync_fx
from qsync_fx.backend.operators.attention import attend_by_products
from qsync_fx.diagnostics import Explanation
from qsync_fx.formats import FORMATS
from qsync_fx.graph import node_metadata
from qsync_fx.graph.cost_algebra import WORKS, Cost, Work
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.graph.operator_costs import casts
from qsync_fx.ops import Kind
from tests.support.models.zoo import CASES, loss_of, make

torch.set_num_threads(1)
ZOO = {case.name: case for case in CASES}
SYMBOLS = {name: sympy.Symbol(name, integer=True, positive=True) for name in ("batch", "sequence")}
MODELS = ("bert", "gpt2", "resnet", "vit", "mixtral", "llama_recomputing")


# Cost algebra.

numbers = st.integers(0, 10**6)
sizes = st.one_of(
    numbers,
    st.builds(lambda a, b: a * SYMBOLS["batch"] + b * SYMBOLS["sequence"], numbers, numbers),
)
works = st.builds(Work, sizes, sizes)
saved_keys = st.sampled_from([("x", "bf16"), ("x", "int8"), ("mask", "extra 0"), ("y", "fp32")])


@st.composite
def costs(draw: st.DrawFn) -> Cost:
    # The bytes of a value in a format are equal for all operators that save it.
    amount = {
        key: 1 + sum(map(ord, key[0] + key[1])) * SYMBOLS["batch"]
        for key in draw(st.sets(saved_keys))
    }
    return Cost(**{name: draw(works) for name in WORKS}, saved=amount)


@given(st.lists(costs(), max_size=4))
def test_costs_add_up_in_any_order_and_saved_tensors_count_once(parts: list[Cost]) -> None:
    total = sum(parts, start=Cost())
    assert total == sum(reversed(parts), start=Cost())
    assert total.flops == sum((part.flops for part in parts), start=0)
    assert total.bytes == sum((part.bytes for part in parts), start=0)
    assert total.saved.keys() == {key for part in parts for key in part.saved}
    assert total + total == Cost(
        **{name: getattr(total, name) + getattr(total, name) for name in WORKS}, saved=total.saved
    )
    assert pickle.loads(pickle.dumps(total)) == total


@given(costs(), st.integers(1, 512), st.integers(1, 512))
def test_numbers_take_the_place_of_symbols(cost: Cost, batch: int, sequence: int) -> None:
    numeric = cost.at(batch=batch, sequence=sequence)
    values = {SYMBOLS["batch"]: batch, SYMBOLS["sequence"]: sequence}
    assert numeric.flops == sympy.sympify(cost.flops).subs(values)
    assert numeric.saved_bytes == sympy.sympify(cost.saved_bytes).subs(values)
    assert cost.at(batch=batch).at(sequence=sequence) == numeric
    assert all(
        isinstance(size, int) for size in (numeric.flops, numeric.bytes, numeric.saved_bytes)
    )


# Costs of models.


def explained(
    name: str, precision: str, wanted: bool = False
) -> tuple[nn.Module, dict[str, Tensor], Explanation]:
    """Explain a model of the zoo. With `wanted`, its floating-point inputs require gradients."""
    torch._dynamo.reset()
    model, inputs = make(ZOO[name])
    for value in inputs.values() if wanted else ():
        value.requires_grad_(value.dtype.is_floating_point)
    return model, inputs, qsync_fx.explain(model, **inputs, options={"precision": precision})


def total(explanation: Explanation) -> Cost:
    return sum((op.note.cost for op in explanation.operators if op.note.cost), start=Cost())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_casts_are_predicted(name: str, precision: str) -> None:
    """The casts in costs are the casts that passes insert: as many, between the same formats."""
    *_, explanation = explained(name, precision)
    for part in explanation.graphs:
        assert predicted(part.graph) == inserted(part.graph)


class ReadsOtherwise(nn.Module):
    """Model with operators that read some operands in another format."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        y = y.clone().mul_(self.factor).add_(x)
        with torch.autocast("cpu", dtype=torch.float16):
            z = torch.histc(self.second(y).detach())
        return (y * self.factor).sum() + z.sum() + (y.detach() > 0).to(torch.int64).sum()


@pytest.mark.parametrize("precision", ["tf32", "fp32", "bf16", "fp16", "int8", "fp8"])
def test_casts_of_different_operands_are_predicted(precision: str) -> None:
    explanation = qsync_fx.explain(
        ReadsOtherwise(), torch.randn(4, 8), options={"precision": precision}
    )
    for part in explanation.graphs:
        assert predicted(part.graph) == inserted(part.graph)


def predicted(graph: qsync_fx.PrecisionGraph) -> Counter[tuple[str, str]]:
    notes = {op.id: op.note for op in graph.operators()}
    flow = graph.costing.flow
    planned_casts = casts(
        flow,
        {site.node: OperandState.of(notes[site.id]) for site in flow.sites if site.id in notes},
        graph.costing.places,
    )
    return Counter((str(cast.before), str(cast.after)) for cast in planned_casts if not cast.wanted)


def inserted(graph: qsync_fx.PrecisionGraph) -> Counter[tuple[str, str]]:
    from qsync_fx.graph.fx_utils import format_of

    counts: Counter[tuple[str, str]] = Counter()
    for part in graph.walk():
        for node in part.nodes:
            before = format_of(part.value(node.args[0])) if node.args else None
            if node.target is torch.ops.aten.to.dtype and node_metadata.is_cast(node):
                counts[str(before), str(format_of(part.value(node)))] += 1
            elif node.target in (torch.ops.qsync.quantize.default, torch.ops.qsync.round.default):
                counts[str(before), str(node.args[3])] += 1
    return counts


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", ["bert", "resnet", "vit"])
def test_saved_bytes_equal_autograd(name: str, precision: str) -> None:
    """The tolerance covers scales of one number each, and statistics of narrow norms, which are
    FP32 in eager mode and narrow when compiled.
    """
    model, _, explanation = explained(name, precision, wanted=True)
    (part,) = explanation.graphs
    lowered = part.snapshots.graphs["lower"]
    attend_by_products(lowered)
    state = {id(t): t for t in (*model.parameters(), *model.buffers())}
    arguments = [
        _real(node, model, lowered.value(node))
        for node in lowered.nodes
        if node.op == "placeholder"
    ]
    input_storages = {
        _storage(t) for t in (*state.values(), *(a for a in arguments if isinstance(a, Tensor)))
    }
    saved: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in input_storages:
            saved[_storage(tensor)] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    with (
        enable_python_dispatcher(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        lowered.module(*arguments)
    measured = sum(size for size, _ in saved.values())
    assert total(explanation).saved_bytes == pytest.approx(
        measured, rel=0.015 if precision != "fp32" else 0
    )


class Dropping(nn.Module):
    """Attention with dropout, called with positional or with keyword arguments."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.named = named

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        attend = nn.functional.scaled_dot_product_attention
        if self.named:
            return attend(query, key, value, attn_mask=mask, dropout_p=0.1)
        return attend(query, key, value, mask, 0.1, False)


@pytest.mark.parametrize("named", [True, False])
def test_attention_dropout_saves_weights_without_a_fused_kernel(named: bool) -> None:
    """A GPU's fused kernel saves its output and one number per row, and regenerates its mask."""
    shape, mask = (2, 3, 16, 8), torch.ones(2, 1, 1, 16, dtype=torch.bool)
    operands = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    weights, rows = 2 * 3 * 16 * 16, 2 * 3 * 16
    for target, few in (("cpu", False), ("t4", True), ("a100", True)):
        torch._dynamo.reset()
        options = {} if target == "cpu" else {"target": target}
        saved = total(
            qsync_fx.explain(Dropping(named).train(), *operands, mask, options=options)
        ).saved
        extra = [size for (_, kind), size in saved.items() if kind.startswith("extra")]
        assert (sum(extra) < weights) is few
        if few:
            assert 4 * rows in extra


def _real(node: fx.Node, model: nn.Module, value: Any) -> Any:
    """Return a value for a graph input: a parameter or buffer by its name, or else a tensor
    of random numbers or ones.
    """
    named = {
        name.replace(".", "_"): t for name, t in (*model.named_parameters(), *model.named_buffers())
    }
    if node.name in named:
        return named[node.name]
    if not isinstance(value, Tensor):
        return value
    shape = [int(size) for size in value.shape]
    if value.dtype.is_floating_point:
        return torch.randn(shape, dtype=value.dtype).requires_grad_(value.requires_grad)
    return torch.ones(shape, dtype=value.dtype)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.mark.parametrize("name", ["bert", "resnet", "vit", "gpt2"])
def test_operations_equal_the_flop_counter(name: str) -> None:
    model, inputs, explanation = explained(name, "fp32")
    cost = total(explanation)
    attention = [
        op.note.cost
        for op in explanation.operators
        if op.id.operator == "scaled_dot_product_attention"
    ]
    # torch's counter omits that the CPU's fused kernel recomputes the scores.
    recomputed = sum(part.forward.flops for part in attention if part) // 2
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            output = model(**inputs)
        with FlopCounterMode(display=False) as backward:
            loss_of(output).backward()
    assert cost.forward.flops == forward.get_total_flops()
    assert (
        cost.input_gradient.flops + cost.weight_gradient.flops
        == backward.get_total_flops() + recomputed
    )


def test_another_batch_needs_no_new_trace() -> None:
    """Symbolic costs at a batch size and a length equal the costs of an explanation with them."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm, self.head = (
                nn.Embedding(50, 16),
                nn.LayerNorm(16),
                nn.Linear(16, 8),
            )

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.norm(self.table(tokens))
            x = nn.functional.scaled_dot_product_attention(x, x, x)
            return self.head(torch.nn.functional.gelu(x)).flatten(1)

    def explain(batch: int, sequence: int, dynamic: bool) -> Explanation:
        torch._dynamo.reset()
        tokens = torch.randint(0, 50, (batch, sequence))
        if dynamic:
            torch._dynamo.mark_dynamic(tokens, 0)
            torch._dynamo.mark_dynamic(tokens, 1)
        return qsync_fx.explain(model, tokens, options={"precision": "int8"})

    model = Model()
    symbolic = explain(3, 5, dynamic=True)
    for batch, sequence in ((3, 5), (8, 32), (32, 128)):
        fixed = explain(batch, sequence, dynamic=False)
        for op, other in zip(symbolic.operators, fixed.operators, strict=True):
            assert op.note.cost is not None
            assert other.note.cost is not None
            actual, wanted = op.note.cost.at(batch=batch, sequence=sequence), other.note.cost
            assert (actual.flops, actual.bytes, actual.saved_bytes) == (
                wanted.flops,
                wanted.bytes,
                wanted.saved_bytes,
            ), op.id


def test_inference_mode_saves_no_tensors() -> None:
    """An inference_mode region costs the same as a no_grad region; autograd records after it."""

    class Model(nn.Module):
        def __init__(self, region: Callable[[], AbstractContextManager[None]]) -> None:
            super().__init__()
            self.region, self.head, self.tail = region, nn.Linear(16, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with self.region():
                statistics = self.head(x).sin().mean()
            return self.tail(x), statistics

    def explain(region: Callable[[], AbstractContextManager[None]]) -> Cost:
        torch._dynamo.reset()
        return total(
            qsync_fx.explain(Model(region), torch.randn(4, 16), options={"precision": "fp32"})
        )

    cost = explain(torch.inference_mode)
    assert cost == explain(torch.no_grad)
    assert cost.weight_gradient.flops == 2 * 4 * 16 * 8


# Costs of operator states.


def test_the_saved_bytes_of_every_precision() -> None:
    *_, explanation = explained("bert", "bf16")
    graph = explanation.graphs[0].graph
    for site in graph.costing.flow.sites:
        note = node_metadata.NOTE[site.node]
        if note.kind is Kind.ADJUSTABLE and note.row is not None and note.row.name == "linear":
            int8, bf16 = (
                graph.costing.cost_without_casts(
                    site.node, OperandState(fmt, FORMATS["bf16"])
                ).saved_bytes
                for fmt in (FORMATS["int8"], FORMATS["bf16"])
            )
            assert int8 < bf16, (
                "INT8 saves activation and weight in one byte per value, BF16 the activation in two"
            )
