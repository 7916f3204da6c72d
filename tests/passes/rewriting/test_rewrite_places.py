"""`@qsync_fx.rewrite`: matches that it skips, and matches in bodies, autocast regions and several
frames.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from qsync_fx import PassError
from tests.support.compiling.rewrites import (
    Net,
    addmm_gelu,
    explained,
    linear,
    linear_gelu,
    places,
    rewriting,
    step,
)
from tests.support.models.small_models import Counting, assert_equal, build, compiled

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


# Guards.


def test_guards_on_shapes_and_formats() -> None:
    wide = rewriting(linear_gelu, addmm_gelu, where=lambda match: match["weight"].shape[0] >= 16)
    assert places(explained(wide)) == {"linear_gelu": 1}
    wide = rewriting(linear_gelu, addmm_gelu, where=lambda match: match["x"].dtype is torch.float64)
    assert places(explained(wide)) == {"linear_gelu": 0}
    named = rewriting(linear_gelu, addmm_gelu, where=lambda match: match.module == "second")
    assert (
        next(str(op.id) for op in explained(named).operators if op.note.by)
        == "second/linear_gelu.t"
    )


def test_a_guard_that_fails_is_named() -> None:
    broken = rewriting(linear, linear, where=lambda match: match["y"].shape)
    with pytest.raises(PassError, match="the guard of 'linear' failed: KeyError: 'y'") as caught:
        explained(broken)
    assert "operator first/linear" in str(caught.value.where)
    with pytest.raises(PassError, match="the guard of 'linear' failed"):
        compiled(build(Net), passes=[broken])(torch.randn(4, 8))


# Skipped matches.


def test_match_with_an_external_reader_is_skipped_and_reported() -> None:
    def model(x: Tensor) -> Tensor:
        inner = x.sin()
        return inner.tanh() + inner

    explanation = explained(
        rewriting(lambda x: x.sin().tanh(), lambda x: x, name="both"), model=model
    )
    done = explanation.rewritten["both"]
    assert (done.count, len(done.left)) == (0, 1)
    assert "its inner value %sin is read by %add too" in done.left[0]
    assert "  left alone: operator /tanh" in str(explanation)


def test_a_value_that_is_written_meanwhile_is_left_alone() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        first = x.sin()
        x.add_(1)
        y.mul_(2)
        return first * x + y

    def find(a: Tensor, b: Tensor) -> Tensor:
        return a.sin() * b

    explanation = explained(
        rewriting(find, lambda a, b: b * a.sin()),
        model=model,
        args=(torch.randn(4, 8), torch.randn(4, 8)),
    )
    assert "writes in place" in explanation.rewritten["find"].left[0]


def test_a_place_across_modes_is_left_alone() -> None:
    def model(x: Tensor) -> Tensor:
        with torch.no_grad():
            first = x.sin()
        return first.tanh()

    explanation = explained(
        rewriting(lambda x: x.sin().tanh(), lambda x: x, name="both"), model=model
    )
    assert "gradients" in explanation.rewritten["both"].left[0]


def test_missing_match_is_reported() -> None:
    explanation = explained(rewriting(lambda x: x.erf(), lambda x: x, name="erf"))
    assert places(explanation) == {"erf": 0}
    assert "rewrite erf: 0 places" in str(explanation)
    assert "rewrite linear_gelu: 2 places" in str(explained(rewriting(linear_gelu, addmm_gelu)))


# Bodies, modes, frames.


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x, use_reentrant=False)


def test_bodies_of_higher_order_operators() -> None:
    scale = nn.Parameter(torch.tensor(2.0))

    def put(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias) * scale

    fuse = rewriting(linear, put)
    plain, recomputed = build(Net), build(Recomputed)
    x = torch.randn(4, 8)
    assert places(explained(fuse, model=recomputed)) == {"linear": 2}
    expected, expected_grads = step(compiled(plain, precision="int8", passes=[fuse]), plain, x)
    expected_scale, scale.grad = scale.grad, None
    actual, actual_grads = step(
        compiled(recomputed, precision="int8", passes=[fuse]), recomputed, x
    )
    assert torch.equal(actual, expected)
    assert_equal(
        {name.removeprefix("net."): grad for name, grad in actual_grads.items()}, expected_grads
    )
    assert scale.grad is not None
    assert expected_scale is not None
    assert torch.allclose(scale.grad, expected_scale)


def test_regions_of_autocast() -> None:
    model, x = build(Net), torch.randn(4, 8)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model.first(x)
        return y.float().sum() + model.second(F.gelu(model.first(x))).sum()

    fuse = rewriting(linear, lambda x, weight, bias: F.linear(x, weight * 1, bias))
    explanation = explained(fuse, model=run, precision=None)
    assert places(explanation) == {"linear": 3}
    assert torch.allclose(compiled(run, passes=[fuse], precision="fp32")(x), run(x), atol=0.05)


def test_frames_after_a_graph_break() -> None:
    class Broken(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = F.gelu(self.first(x))
            torch._dynamo.graph_break()
            return F.gelu(self.second(x))

    explanation = explained(rewriting(linear_gelu, addmm_gelu), model=build(Broken))
    assert len(explanation.graphs) == 2
    assert places(explanation) == {"linear_gelu": 2}


def test_equal_rewrites_share_compiled_code() -> None:
    backend, model, x, fuse = (
        Counting(),
        build(Net),
        torch.randn(4, 8),
        rewriting(linear_gelu, addmm_gelu),
    )
    for _ in range(2):
        backend.compile(model, passes=[fuse])(x)
    assert len(backend.graphs) == 1
    backend.compile(model, passes=[rewriting(linear_gelu, addmm_gelu, where=lambda match: True)])(x)
    assert len(backend.graphs) == 2
