"""The operator table against torch: schemas, kernels, numerics and operation counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import tiers
import torch
import torch.nn.functional as F
from operator_samples import Call, calls
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map

from qsync_fx.graph.nodes import filled
from qsync_fx.ops import Kind, OperatorRow, row_for, table

aten = torch.ops.aten
ROWS = table()
NARROW = (torch.bfloat16, torch.float16)


def packet(target: str) -> torch._ops.OpOverloadPacket:
    """Returns the operator of a target, or its in-place twin where it has no other."""
    name = target.removeprefix("aten::").partition(".")[0]
    return getattr(aten, name) if hasattr(aten, name) else getattr(aten, f"{name}_")


def overloads(target: str) -> list[torch._ops.OpOverload]:
    """Returns the overloads that a target stands for and that passes leave to its row's kind."""
    found = packet(target)
    chosen = [target.partition(".")[2]] if "." in target else found.overloads()
    return [getattr(found, name) for name in chosen if row_for(getattr(found, name)) is ROWS[target]]


OURS = sorted(target for target in ROWS if target.startswith("aten::"))
ADJUSTABLE = [target for target in OURS if ROWS[target].kind is Kind.ADJUSTABLE]


# Some operators are gone in torch 2.15, some are new in it.
NOT_IN_EVERY_TORCH = (
    {"aten::linalg_matrix_sqrth", "aten::linalg_polar"},
    {"aten::cholesky", "aten::qr"},
)[torch.__version__ >= (2, 15)]


def test_every_target_is_an_operator_of_this_torch() -> None:
    missing = {target for target in OURS if not (exists(target) and overloads(target))}
    assert missing <= NOT_IN_EVERY_TORCH


def exists(target: str) -> bool:
    try:
        return bool(packet(target).overloads())
    except AttributeError:
        return False


def test_every_row_says_why() -> None:
    for row in ROWS.values():
        assert len(row.reason.split()) >= 3, row
        assert "." not in row.name, row


@pytest.mark.parametrize("target", ADJUSTABLE)
def test_adjustable_rows_point_at_tensors(target: str) -> None:
    row = ROWS[target]
    assert row.operands
    assert set(row.scaled) <= set(row.operands)
    assert len(row.scaled) in (0, 2)
    if row.products:
        assert row.flops is not None
    for overload in overloads(target):
        arguments = overload._schema.arguments
        for position in row.operands:
            # The last operand of a product is a bias or a mask, which some overloads lack.
            if position < len(arguments):
                assert str(arguments[position].type) in ("Tensor", "Optional[Tensor]", "List[Tensor]"), (
                    overload,
                    position,
                )
        for position in row.scaled:
            assert str(arguments[position].type) == "Tensor"


def test_what_only_the_plan_decides_is_left_empty_elsewhere() -> None:
    for row in ROWS.values():
        if row.kind is not Kind.ADJUSTABLE:
            assert not row.operands
            assert not row.scaled
            assert not row.output_only


def test_in_place_overload_and_out_variants() -> None:
    assert row_for(aten.relu_.default) is row_for(aten.relu.default)
    assert row_for(aten.div.Tensor).kind is Kind.DEPENDENT
    assert row_for(aten.div.Tensor_mode).kind is Kind.FIXED
    assert row_for(aten.div_.Tensor_mode).kind is Kind.FIXED
    assert row_for(aten.view.default).kind is Kind.DEPENDENT
    assert row_for(aten.view.dtype).kind is Kind.FIXED
    assert row_for(aten.addmm.out).kind is Kind.FIXED
    assert not row_for(aten.addmm.out).operands
    assert row_for(aten.where.default).kind is Kind.FIXED
    assert row_for(len) is None


# What PyTorch's own samples reach and the table leaves out: parts of backward passes and one kernel of attention, which are called by
# hand there, and a loss that torch keeps private. All of it runs in FP32.
UNKNOWN = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "aten::_softmax_backward_data",
        "aten::max_pool2d_with_indices_backward",
        "aten::native_dropout_backward",
        "torch_nn::_linear_cross_entropy_batch_chunked",
        "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction",
    }
)


def test_operators_of_the_operator_database_are_known() -> None:
    unknown = {call.target._schema.name for call in calls(2) if row_for(call.target) is None}
    assert unknown <= UNKNOWN


class Block(nn.Module):
    """A residual block, then a patch embedding, as vision models are made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 3, 1),
            nn.GroupNorm(1, 3),
        )
        self.patches = nn.Conv2d(3, 12, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, 12))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5)

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        image = F.max_pool2d(F.relu(image + self.body(image)), 2)
        rows = self.patches(image).flatten(2).transpose(1, 2)
        rows = torch.cat([self.token.expand(len(rows), -1, -1), rows], dim=1)
        rows = F.dropout(F.gelu(self.norm(rows)), 0.1)
        return F.cross_entropy(self.head(rows[:, 0]), label)


class Decoder(nn.Module):
    """A decoder layer with an embedding, rotary angles and an RMS norm, as language models are made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layer = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)
        self.norm = nn.RMSNorm(16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.embedding(tokens)
        angles = torch.outer(torch.arange(tokens.shape[1]).float(), torch.arange(8).float())
        first, second = rows.chunk(2, dim=-1)
        turned = torch.cat(
            [first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1
        )
        mask = torch.full((tokens.shape[1], tokens.shape[1]), -torch.inf).triu(1)
        rows = self.norm(self.layer(turned, rows, tgt_mask=mask))
        logits = rows @ self.embedding.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + rows.pow(2).mean().sqrt()


MODELS: tuple[tuple[str, Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]], ...] = (
    ("vision", Block, lambda: (torch.randn(2, 3, 16, 16), torch.tensor([1, 4]))),
    ("decoder", Decoder, lambda: (torch.randint(0, 11, (2, 7)),)),
    ("encoder", lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), lambda: (torch.randn(2, 7, 16),)),
    ("attention", lambda: nn.MultiheadAttention(16, 2), lambda: (torch.randn(7, 2, 16),) * 3),
    ("lstm cell", lambda: nn.LSTMCell(5, 4), lambda: (torch.randn(2, 5),)),
    ("gru", lambda: nn.GRU(5, 4), lambda: (torch.randn(3, 2, 5),)),
    ("upsampling", lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 2, 2), nn.InstanceNorm2d(4), nn.PReLU(), nn.Upsample(9)),
     lambda: (torch.randn(2, 3, 4, 4),)),
    ("weight norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), lambda: (torch.randn(2, 4),)),
)  # fmt: skip


@pytest.mark.parametrize(("name", "make", "inputs"), MODELS, ids=[name for name, *_ in MODELS])
def test_models_are_made_of_known_operators(
    name: str, make: Callable[[], nn.Module], inputs: Callable[[], tuple[torch.Tensor, ...]]
) -> None:
    model, values = make(), inputs()
    traced = make_fx(lambda *tensors: model(*tensors), pre_dispatch=True, _allow_non_fake_inputs=True)(*values)
    targets = [node.target for node in traced.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert targets
    assert not [str(target) for target in targets if row_for(target) is None]
    assert any(row_for(target).kind is not Kind.FIXED for target in targets) or "cell" in name or name == "gru"


# ---------------------------------------------------------------------------------------------- narrow floats


def is_fp32(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32


def converted(call: Call, row: OperatorRow, convert: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """Converts what the passes would convert: the operands of an adjustable operator, every input of a dependent one."""

    def fresh(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else value

    def chosen(value: Any) -> Any:
        return convert(value) if is_fp32(value) else fresh(value)

    everything = row.kind is Kind.DEPENDENT
    given = tuple(filled(call.target, call.args, call.kwargs).values())
    at = range(len(call.args)) if everything else row.converted(given)
    args = tuple(tree_map(chosen if i in at else fresh, v) for i, v in enumerate(call.args))
    return Call(call.target, args, tree_map(chosen if everything else fresh, call.kwargs))


def forward_and_backward(call: Call, row: OperatorRow) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Returns the outputs of floating point, and the gradients of the tensors that passes convert."""
    torch.manual_seed(0)
    mutable = call.target._schema.is_mutable
    given = tuple(filled(call.target, call.args, call.kwargs).values())
    positions = row.converted(given) if row.kind is Kind.ADJUSTABLE else range(len(call.args))
    inputs = [v for i in positions if i < len(call.args) for v in tree_leaves(call.args[i]) if _differentiable(v)]
    if not mutable:
        for value in inputs:
            value.requires_grad_()
    with torch.enable_grad():
        found = call.target(*call.args, **call.kwargs)
    outputs = [v for v in tree_leaves(found) if _differentiable(v)]
    carrying = [v for v in outputs if v.requires_grad]
    if row.kind is Kind.ADJUSTABLE:
        del carrying[1:]  # The statistics of a norm, which nobody differentiates.
    if not carrying or mutable:
        return outputs, []
    # Varied, since of equal ones a softmax or a norm passes nothing on; positive, so that few sums cancel; of 3 bits, so
    # that every type holds them.
    seeds = [torch.randint(4, 8, v.shape).to(v.dtype) / 8 for v in carrying]
    return outputs, list(torch.autograd.grad(carrying, inputs, seeds, allow_unused=True))


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def steps_apart(first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype, least: float) -> float:
    """Returns the largest difference of finite values, in steps of the type at the largest value (or at `least`)."""
    first, second = first.detach().float(), second.detach().float()
    finite = second.isfinite()
    if (finite & ~first.isfinite()).any():
        return math.inf
    largest = max(float(second[finite].abs().max()) if finite.any() else 0.0, least)
    if not largest or not finite.any():
        return 0.0
    return float((first - second)[finite].abs().max()) / largest / torch.finfo(dtype).eps


# Said by autograd of what has no derivative, and of arguments that are random numbers rather than data.
NO_BACKWARD = ("derivative for", "not differentiable")
# Steps at the largest value, of outputs and gradients. The gradients of a quotient are products of several rounded values, those of
# attention of three; the CPU adds up a product of two vectors in their own type.
STEPS = 3.0
LOOSE = {
    "aten::addcdiv": 8.0,
    "aten::addcmul": 4.0,
    "aten::div": 4.0,
    "aten::divide": 4.0,
    "aten::inner": 16.0,
    "aten::scaled_dot_product_attention": 4.0,
    "aten::true_divide": 4.0,
}
# What a softmax passes on is a difference of incoming gradients, near nothing where it is saturated. Its outputs and the
# incoming gradients are near 1, and that is what its errors are held against.
NEAR_ONE = frozenset({"aten::softmax", "aten::_softmax", "aten::_safe_softmax"})


@tiers.ALL
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_floats_harm_nothing_that_may_take_them(dtype: torch.dtype) -> None:
    """Every adjustable and dependent operator, on torch's samples, gives the FP32 result of its rounded inputs, but for rounding."""
    wrong: set[str] = set()
    kinds: dict[Kind, set[str]] = {kind: set() for kind in Kind}
    for call in calls(2):
        row = row_for(call.target)
        if row is None or row.kind is Kind.FIXED:
            continue
        name = call.target._schema.name.removesuffix("_")
        narrow = converted(call, row, lambda v: v.to(dtype))
        exact = converted(call, row, lambda v: v.to(dtype).float())
        try:
            found = forward_and_backward(narrow, row)
        except RuntimeError as error:
            if not any(text in str(error) for text in NO_BACKWARD):
                wrong.add(f"{call.target}: {error}")
            continue
        expected = forward_and_backward(exact, row)
        kinds[row.kind].add(name)
        pairs = [*zip(found[0], expected[0], strict=True), *zip(found[1], expected[1], strict=True)]
        worst = max(
            (steps_apart(a, b, dtype, float(name in NEAR_ONE)) for a, b in pairs if a is not None and b is not None),
            default=0.0,
        )
        if worst > LOOSE.get(name, STEPS):
            wrong.add(f"{call.target}: off by {worst:.1f} steps of {dtype}")
    assert not wrong, "\n".join(sorted(wrong))
    assert len(kinds[Kind.ADJUSTABLE]) > 30
    assert len(kinds[Kind.DEPENDENT]) > 150
