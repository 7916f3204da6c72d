"""Every optional operand of every operator in the table: passed, None, omitted, and as a keyword.

Dynamo and make_fx omit trailing defaults, so that a node has fewer arguments than its schema. A
custom pass may write them as keywords.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_ops_table import OURS, exists, overloads
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

import qsync_fx
from qsync_fx.graph import PrecisionGraph
from qsync_fx.graph.fx_utils import arguments, filled
from qsync_fx.ops import Kind, row_for
from tests.support import tiers
from tests.support.computing.operator_samples import Call, calls
from tests.support.models import opinfo

aten = torch.ops.aten


def optional(target: torch._ops.OpOverload) -> list[str]:
    """Return the names of an operator's optional tensors."""
    return [a.name for a in target._schema.arguments if str(a.type) == "Optional[Tensor]"]


TARGETS = {str(o): o for target in OURS if exists(target) for o in overloads(target) if optional(o)}
NOT_HERE = {
    "aten._scaled_grouped_mm.default": "CUDA only",
    "aten._scaled_mm.default": "takes operands of FP8, which no sample in FP32 has",
    "aten._embedding_bag_forward_only.default": "no graph has it: fake tensors do not take it",
    "aten.histogramdd.int_bins": "no graph has it: fake tensors do not take it",
    "aten.cov.default": "no graph has it: it reads its result while it is traced",
}
FAMILIES = sorted(TARGETS.keys() - NOT_HERE)
CONVERTED = [name for name in FAMILIES if row_for(TARGETS[name]).kind is not Kind.FIXED]


def more_samples() -> Iterator[Call]:
    """Yield calls that PyTorch's own samples have only in another form, or on other devices."""
    ones, x, image = torch.ones, torch.randn(4, 6), torch.randn(2, 4, 5, 5)
    weight, per_channel = torch.randn(4, 4, 3, 3), [torch.rand(4) + 0.5 for _ in range(4)]
    window = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    yield Call(aten.convolution.default, (image, weight, per_channel[0], *window), {})
    yield Call(
        aten._convolution.default,
        (image, weight, per_channel[0], *window, False, False, True, True),
        {},
    )
    yield Call(
        aten._convolution.deprecated,
        (image, weight, per_channel[0], *window, False, False, True),
        {},
    )
    yield Call(aten.conv2d.padding, (image, weight, per_channel[0], [1, 1], "same"), {})
    yield Call(
        aten.conv1d.padding,
        (torch.randn(2, 4, 5), weight[..., 0], per_channel[0], [1], "valid"),
        {},
    )
    yield Call(
        aten._native_batch_norm_legit_no_training.default, (image, *per_channel, 0.1, 1e-5), {}
    )
    yield Call(
        aten._native_batch_norm_legit.no_stats, (image, *per_channel[:2], True, 0.1, 1e-5), {}
    )
    yield Call(aten._fused_rms_norm.default, (x, [6], ones(6), 1e-5), {})
    # Fake tensors support it only in BF16.
    tokens, experts = torch.randn(12, 8).bfloat16(), torch.randn(2, 8, 16).bfloat16()
    yield Call(
        aten._grouped_mm.default, (tokens, experts, torch.tensor([4, 12], dtype=torch.int32)), {}
    )
    yield Call(aten.clip.Tensor, (x, -ones(6), ones(6)), {})
    yield Call(aten.bincount.default, (torch.tensor([0, 1, 1]), torch.rand(3)), {})
    bag = (
        torch.randn(5, 3),
        torch.tensor([0, 2, 4, 1]),
        torch.tensor([0, 2]),
        False,
        0,
        False,
        torch.rand(4),
    )
    for target in (
        aten.embedding_bag.default,
        aten._embedding_bag.default,
        aten._embedding_bag_forward_only.default,
    ):
        yield Call(target, bag, {})
    classes, places = torch.tensor([1, 0, 3, 2]), torch.randint(0, 4, (2, 5, 5))
    for target in (aten.nll_loss.default, aten.nll_loss_forward.default):
        yield Call(target, (x, classes, torch.rand(6), 1, -100), {})
    for target in (aten.nll_loss2d.default, aten.nll_loss2d_forward.default):
        yield Call(target, (image, places, torch.rand(4), 1, -100), {})
    state, gates = (
        (torch.randn(4, 3), torch.randn(4, 3)),
        {"lstm": 12, "gru": 9, "rnn_tanh": 3, "rnn_relu": 3},
    )
    for name, size in gates.items():
        weights = torch.randn(size, 6), torch.randn(size, 3), torch.randn(size), torch.randn(size)
        yield Call(
            getattr(aten, f"{name}_cell").default,
            (x, state if name == "lstm" else state[0], *weights),
            {},
        )
    yield Call(aten.searchsorted.Scalar, (torch.arange(6.0), 2.5), {"sorter": torch.arange(6)})
    sound = torch.randn(2, 64)
    yield Call(
        aten.stft.center, (sound, 16), {"window": torch.hann_window(16), "return_complex": True}
    )
    spectrum = torch.stft(sound, 16, window=torch.hann_window(16), return_complex=True)
    yield Call(aten.istft.default, (spectrum, 16, None, None, torch.hann_window(16)), {})


@functools.cache
def samples() -> dict[str, list[Call]]:
    torch.manual_seed(0)
    by_target: dict[str, list[Call]] = {name: [] for name in TARGETS}
    for call in (*more_samples(), *calls(3)):
        if str(call.target) in by_target:
            by_target[str(call.target)].append(call)
    return by_target


def spellings(call: Call) -> Iterator[Call]:
    """Yield the call with each optional operand passed, None, omitted, and as a keyword."""
    operands, schema = filled(call.target, call.args, call.kwargs), call.target._schema.arguments
    only_by_name = [a.name for a in schema if a.kwarg_only]

    def spelled(
        values: dict[str, Any], by_name: set[str], left_out: frozenset[str] = frozenset()
    ) -> Call:
        names = [a.name for a in schema]
        first = next(
            (index for index, name in enumerate(names) if name in by_name | left_out), len(names)
        )
        args = tuple(values[name] for name in names[:first] if name not in only_by_name)
        rest = [name for index, name in enumerate(names) if index >= first or name in only_by_name]
        return Call(
            call.target, args, {name: values[name] for name in rest if name not in left_out}
        )

    yield spelled(operands, set())
    for name in optional(call.target):
        yield spelled(operands, {name})
        yield spelled({**operands, name: None}, set())
        if next(a for a in schema if a.name == name).has_default_value():
            yield spelled(operands, set(), frozenset({name}))
    absent = {a.name for a in schema if a.name in optional(call.target) and a.has_default_value()}
    yield spelled(operands, set(), frozenset(absent))


def runs(call: Call) -> bool:
    """Return whether torch accepts a call, with real tensors and with fake tensors, as in
    compilation.
    """
    fake = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    try:
        for make in (torch.clone, fake.from_tensor):
            # Copies, because some operators write to statistics.
            args, kwargs = pytree.tree_map_only(torch.Tensor, make, (call.args, call.kwargs))
            call.target(*args, **kwargs)
    except Exception:  # noqa: BLE001 - torch raises errors of many types
        return False
    return True


def best(name: str) -> list[Call]:
    """Return the forms that torch accepts of the sample with the most optional operands."""

    def present(call: Call) -> int:
        values = filled(call.target, call.args, call.kwargs)
        return sum(values[operand] is not None for operand in optional(call.target))

    return [spelled for spelled in spellings(max(samples()[name], key=present)) if runs(spelled)]


@dataclass(frozen=True)
class Program:
    """Calls as one graph without control flow, and the tensors that are its inputs."""

    module: fx.GraphModule
    tensors: list[torch.Tensor]

    @staticmethod
    def of(calls: list[Call], tensors: list[torch.Tensor]) -> Program:
        graph, results = fx.Graph(), []
        inputs = {id(t): graph.placeholder(f"t{index}") for index, t in enumerate(tensors)}

        def value(leaf: Any) -> Any:
            # Copies, because some operators write to statistics.
            return (
                graph.call_method("clone", (inputs[id(leaf)],))
                if isinstance(leaf, torch.Tensor)
                else leaf
            )

        for call in calls:
            args, kwargs = pytree.tree_map(value, (call.args, call.kwargs))
            results.append(graph.call_function(call.target, args, kwargs))
        graph.output(tuple(results))
        return Program(fx.GraphModule({}, graph), tensors)

    def __call__(self, module: Callable[..., Any]) -> list[torch.Tensor | None]:
        """Return the outputs, and the gradient of each tensor for which torch has a formula."""
        marked = [t.detach().clone().requires_grad_(t.requires_grad) for t in self.tensors]
        torch.manual_seed(1)
        outputs = [o for o in pytree.tree_leaves(module(*marked)) if isinstance(o, torch.Tensor)]
        torch.manual_seed(2)
        carrying = [o for o in outputs if o.requires_grad]
        learned = [t for t in marked if t.requires_grad]
        weights = [torch.randn_like(o) for o in carrying]
        gradients = (
            torch.autograd.grad(carrying, learned, weights, allow_unused=True) if carrying else ()
        )
        return [*(o.detach() for o in outputs), *gradients]


def calls_of(names: Sequence[str]) -> list[Call]:
    """Return the best forms of each operator, on tensors that require gradients if possible."""
    result = []
    for name in names:
        spelled = best(name)
        assert len(spelled) > 1, f"torch accepts no other call form of {name}"
        tensors = tensors_of(spelled)
        floats = [t for t in tensors if t.is_floating_point()]
        for chosen in (floats, floats[:1], []):
            for t in tensors:
                t.requires_grad_(any(t is c for c in chosen))
            try:
                alone = Program.of(spelled, tensors)
                alone(alone.module)
                break
            except RuntimeError:
                continue
        result += spelled
    return result


def tensors_of(calls: list[Call]) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves([(call.args, call.kwargs) for call in calls])
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())


def difference(calls: list[Call], precision: str) -> str | None:
    """Run calls as one graph in a precision and under aot_eager, and return the difference."""
    program = Program.of(calls, tensors_of(calls))

    def compiled(**compile_kwargs: Any) -> list[torch.Tensor | None]:
        torch._dynamo.reset()
        return program(
            torch.compile(program.module, dynamic=False, fullgraph=True, **compile_kwargs)
        )

    exact = compiled(backend="aot_eager")
    ours = compiled(backend="qsync", options={"precision": precision, "inner_backend": "aot_eager"})
    if precision == "fp32":
        return opinfo._difference(ours, exact)
    return opinfo._near(ours, exact, 8 * opinfo.step(precision))[1] or None


GROUPS = [
    (precision, names[start : start + 10])
    for precision, names in (("fp32", FAMILIES), ("bf16", CONVERTED), ("int8", CONVERTED))
    for start in range(0, len(names), 10)
]


@tiers.one_in(2)
@tiers.ALL
@pytest.mark.parametrize(
    ("precision", "names"), GROUPS, ids=lambda part: part if isinstance(part, str) else part[0]
)
def test_optional_operands(precision: str, names: list[str]) -> None:
    every = calls_of(names)
    with torch._dynamo.config.patch(**opinfo.CAPTURE):
        mismatch = difference(every, precision)
        if mismatch is not None:
            alone = {str(call): difference([call], precision) for call in every}
            assert not mismatch, {call: wrong for call, wrong in alone.items() if wrong}


def by_name(graph: PrecisionGraph) -> None:
    """Write all arguments of all operators as keywords, except the first, from which values are
    computed.
    """
    for operator in graph.operators():
        node = operator.node
        if isinstance(node.target, torch._ops.OpOverload):
            names = list(arguments(node))
            node.kwargs = {**dict(zip(names[1:], node.args[1:], strict=False)), **node.kwargs}
            node.args = node.args[:1]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "fp8", "tf32"])
def test_a_pass_may_write_arguments_by_name(precision: str) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(9, 8)
            self.conv, self.norm = (
                torch.nn.Conv1d(8, 8, 3, padding=1),
                torch.nn.LayerNorm(8, bias=False),
            )
            self.attention, self.linear = torch.nn.MultiheadAttention(8, 2), torch.nn.Linear(8, 4)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.conv(self.embedding(tokens).mT).mT
            x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
            return torch.addmm(
                self.linear.bias, torch.relu(x).flatten(0, 1), self.linear.weight.t()
            )

    torch.manual_seed(0)
    model, tokens = Net(), torch.randint(0, 9, (3, 6))

    def step(passes: list[Any]) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(1)
        options = {"precision": precision, "inner_backend": "aot_eager", "passes": passes}
        output = torch.compile(model, backend="qsync", options=options)(tokens)
        return [output, *torch.autograd.grad(output.square().sum(), list(model.parameters()))]

    named = qsync_fx.graph_pass(after="normalize")(by_name)
    for ours, theirs in zip(step([named]), step([]), strict=True):
        assert torch.equal(ours, theirs)
