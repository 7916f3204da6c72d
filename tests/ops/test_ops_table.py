"""The operator table, compared with torch's schemas, torch's samples, and operators of models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from qsync_fx.ops import Kind, row_for, table
from tests.support.computing.operator_samples import calls

aten = torch.ops.aten
ROWS = table()


def packet(target: str) -> torch._ops.OpOverloadPacket:
    """Return the operator of a target, or its in-place variant if it has no other."""
    name = target.removeprefix("aten::").partition(".")[0]
    return getattr(aten, name) if hasattr(aten, name) else getattr(aten, f"{name}_")


def overloads(target: str) -> list[torch._ops.OpOverload]:
    """Return the overloads of a target that have its row."""
    operator = packet(target)
    chosen = [target.partition(".")[2]] if "." in target else operator.overloads()
    return [
        getattr(operator, name)
        for name in chosen
        if row_for(getattr(operator, name)) is ROWS[target]
    ]


OURS = sorted(target for target in ROWS if target.startswith("aten::"))
ADJUSTABLE = [target for target in OURS if ROWS[target].kind is Kind.ADJUSTABLE]
# torch 2.14 removed some operators and added others.
NOT_IN_EVERY_TORCH = (
    {"aten::linalg_matrix_sqrth", "aten::linalg_polar"},
    {"aten::cholesky", "aten::qr"},
)[torch.__version__ >= (2, 14)]


def test_every_target_is_an_operator_of_this_torch() -> None:
    missing = {target for target in OURS if not (exists(target) and overloads(target))}
    assert missing <= NOT_IN_EVERY_TORCH


def exists(target: str) -> bool:
    try:
        return bool(packet(target).overloads())
    except AttributeError:
        return False


def test_every_row_has_a_reason() -> None:
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
                assert str(arguments[position].type) in (
                    "Tensor",
                    "Optional[Tensor]",
                    "List[Tensor]",
                ), (
                    overload,
                    position,
                )
        for position in row.scaled:
            assert str(arguments[position].type) == "Tensor"


def test_adjustable_fields_are_empty_for_other_kinds() -> None:
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


# Operators of PyTorch's samples that the table omits: parts of backward passes and one attention
# kernel, which the samples call directly, and a private loss of torch. All run in FP32.
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


def test_operators_of_opinfo_have_a_row() -> None:
    unknown = {call.target._schema.name for call in calls(2) if row_for(call.target) is None}
    assert unknown <= UNKNOWN


class Block(nn.Module):
    """Residual block and patch embedding, as in vision models."""

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
    """Decoder layer with an embedding, rotary angles and an RMS norm, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layer = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)
        self.norm = nn.RMSNorm(16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.embedding(tokens)
        angles = torch.outer(torch.arange(tokens.shape[1]).float(), torch.arange(8).float())
        first, second = rows.chunk(2, dim=-1)
        rotated = torch.cat(
            [
                first * angles.cos() - second * angles.sin(),
                first * angles.sin() + second * angles.cos(),
            ],
            -1,
        )
        mask = torch.full((tokens.shape[1], tokens.shape[1]), -torch.inf).triu(1)
        rows = self.norm(self.layer(rotated, rows, tgt_mask=mask))
        logits = rows @ self.embedding.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + rows.pow(2).mean().sqrt()


MODELS: tuple[tuple[str, Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]], ...] = (
    ("vision", Block, lambda: (torch.randn(2, 3, 16, 16), torch.tensor([1, 4]))),
    ("decoder", Decoder, lambda: (torch.randint(0, 11, (2, 7)),)),
    ("encoder", lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
    lambda: (torch.randn(2, 7, 16),)),
    ("attention", lambda: nn.MultiheadAttention(16, 2), lambda: (torch.randn(7, 2, 16),) * 3),
    ("lstm cell", lambda: nn.LSTMCell(5, 4), lambda: (torch.randn(2, 5),)),
    ("gru", lambda: nn.GRU(5, 4), lambda: (torch.randn(3, 2, 5),)),
    ("upsampling",
    lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 2, 2), nn.InstanceNorm2d(4), nn.PReLU(),
    nn.Upsample(9)),
     lambda: (torch.randn(2, 3, 4, 4),)),
    ("weight norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
    lambda: (torch.randn(2, 4),)),
)  # fmt: skip


@pytest.mark.parametrize(("name", "make", "inputs"), MODELS, ids=[name for name, *_ in MODELS])
def test_operators_of_models_have_a_row(
    name: str, make: Callable[[], nn.Module], inputs: Callable[[], tuple[torch.Tensor, ...]]
) -> None:
    model, values = make(), inputs()
    traced = make_fx(
        lambda *tensors: model(*tensors), pre_dispatch=True, _allow_non_fake_inputs=True
    )(*values)
    targets = [
        node.target for node in traced.graph.nodes if isinstance(node.target, torch._ops.OpOverload)
    ]
    assert targets
    assert not [str(target) for target in targets if row_for(target) is None]
    assert (
        any(row_for(target).kind is not Kind.FIXED for target in targets)
        or "cell" in name
        or name == "gru"
    )
