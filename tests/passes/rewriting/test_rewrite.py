"""`@qsync_fx.rewrite`: what it finds, what it puts in, what it leaves alone, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiers
import torch
from small_models import Counting, assert_equal, build, compiled, gradients
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qsync_fx
from qsync_fx import OptionError, PassError, Plan

torch.set_num_threads(1)

INNER = ["aot_eager", *(pytest.param(inner, marks=tiers.ALL) for inner in ("eager", "inductor"))]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Net(nn.Module):
    """Norm, linear, GELU, linear, GELU, dropout: `[..., 8]` to `[..., 8]`."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(F.gelu(self.second(F.gelu(self.first(self.norm(x))))))


def explained(*passes: object, model: Any = None, args: tuple[Any, ...] = (), **options: object) -> Any:
    model = build(Net) if model is None else model
    return qsync_fx.explain(
        model, *(args or (torch.randn(4, 8),)), options={"precision": "fp32", **options, "passes": list(passes)}
    )


def places(explanation: Any) -> dict[str, int]:
    return {name: done.count for name, done in explanation.rewritten.items()}


def step(run: Callable[..., Tensor], model: nn.Module, *args: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(1)
    output = run(*args)
    output.square().mean().backward()
    return output.detach(), gradients(model)


def rewriting(find: Callable[..., Any], put: Callable[..., Any], **options: Any) -> Any:
    return qsync_fx.rewrite(**options)(find).replacement(put)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias))


def addmm_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(torch.addmm(bias, x, weight.t()))


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


# What is found, and what it becomes.


def test_every_place_computes_what_is_put_in() -> None:
    fuse = rewriting(linear_gelu, addmm_gelu)
    explanation = explained(fuse)
    assert places(explanation) == {"linear_gelu": 2}
    names = [op.row.name for op in explanation.operators if op.row]
    assert names == ["layer_norm", "t", "addmm", "gelu", "t", "addmm", "gelu", "dropout"]
    model, x = build(Net), torch.randn(4, 8)
    output, grads = step(model, model, x)
    found, found_grads = step(compiled(model, precision="fp32", passes=[fuse]), model, x)
    assert torch.allclose(found, output, atol=1e-6)
    assert found_grads.keys() == grads.keys()
    assert all(torch.allclose(found_grads[name], grads[name], atol=1e-6) for name in grads)


def test_what_is_put_in_has_ids_kinds_reasons_and_lines() -> None:
    explanation = explained(rewriting(linear_gelu, addmm_gelu), precision="bf16")
    put_in = {str(op.id): op for op in explanation.operators if op.note.by}
    assert list(put_in) == [
        "first/linear_gelu.t", "first/linear_gelu.addmm", "/gelu@first", "second/linear_gelu.t", "second/linear_gelu.addmm",
        "/gelu@second",
    ]  # fmt: skip
    product = put_in["first/linear_gelu.addmm"]
    assert (product.kind, str(product.precision)) == ("adjustable", "bf16")
    assert product.reason == "rewritten by linear_gelu; plan: uniform bf16"
    assert product.source is not None
    assert "self.first" in product.source.code
    assert product.node.meta["custom"]["qsync"] == "first/linear_gelu.addmm"


def test_a_plan_decides_on_what_is_put_in() -> None:
    plan = Plan("fp32", patterns=[("first", "int8"), ("**/linear_gelu.*", "bf16")])
    fuse = rewriting(linear_gelu, addmm_gelu)
    assert {
        str(op.precision)
        for op in explained(fuse, precision=None, plan=plan).operators
        if "linear_gelu.addmm" in str(op.id)
    } == {"bf16"}


def test_an_operator_of_the_same_name_keeps_its_id() -> None:
    """So that a plan made without the rewrite still means the same."""

    def put(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x * 1.0, weight, bias)

    plan = Plan("fp32", operators={"first/linear": "int8", "second/linear": "bf16"})
    found = {
        str(op.id): str(op.precision)
        for op in explained(rewriting(linear, put), precision=None, plan=plan).operators
        if op.kind == "adjustable"
    }
    assert (found["first/linear"], found["second/linear"]) == ("int8", "bf16")


def test_the_pattern_is_spelled_as_the_model_is() -> None:
    class Spelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x @ self.w + self.b, inplace=True)

    def find(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.relu(torch.matmul(x, w) + b)

    def in_place(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.relu(x @ w + b, inplace=True)

    for pattern in (find, in_place):
        explanation = explained(rewriting(pattern, lambda x, w, b: torch.addmm(b, x, w)), model=Spelled())
        assert places(explanation) == {pattern.__name__: 1}


def test_one_tensor_may_be_two_arguments() -> None:
    explanation = explained(
        rewriting(lambda a, b: a.sin() * b, lambda a, b: a * b, name="both"), model=lambda x: x.sin() * x
    )
    assert places(explanation) == {"both": 1}


def test_several_results() -> None:
    def find(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos()

    def put(x: Tensor) -> tuple[Tensor, Tensor]:
        turned = torch.polar(torch.ones_like(x), x)
        return turned.imag.contiguous(), turned.real.contiguous()

    def model(x: Tensor) -> Tensor:
        return torch.tanh(x).sin() + torch.tanh(x).cos() + x.sin() * x.cos()

    fuse = rewriting(find, put)
    assert places(explained(fuse, model=model)) == {"find": 1}, "of one tensor, that is"
    x = torch.randn(4, 8)
    assert torch.allclose(compiled(model, precision="fp32", passes=[fuse])(x), model(x), atol=1e-5)


def test_places_that_follow_one_another() -> None:
    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(4):
                x = torch.tanh(x) * 2
            return x

    explanation = explained(rewriting(lambda x: torch.tanh(x) * 2, lambda x: x * 3, name="link"), model=Chain())
    assert places(explanation) == {"link": 4}
    x = torch.randn(4, 8)
    run = compiled(
        Chain(), precision="fp32", passes=[rewriting(lambda x: torch.tanh(x) * 2, lambda x: x * 3, name="link")]
    )
    assert torch.equal(run(x), x * 3 * 3 * 3 * 3)


def test_places_that_overlap_are_taken_in_order() -> None:
    explanation = explained(
        rewriting(lambda x: x.sin().sin(), lambda x: x.cos(), name="twice"), model=lambda x: x.sin().sin().sin()
    )
    assert places(explanation) == {"twice": 1}
    assert [op.id.operator for op in explanation.operators] == ["twice.cos", "sin"]


def test_one_rewrite_may_find_what_another_put_in() -> None:
    first = rewriting(lambda x: x.sin(), lambda x: x.cos(), name="first")
    second = rewriting(lambda x: x.cos(), lambda x: x.tanh(), name="second")
    explanation = explained(first, second, model=lambda x: x.sin())
    assert places(explanation) == {"first": 1, "second": 1}
    assert [str(op.id) for op in explanation.operators] == ["/second.tanh"]


def test_a_replacement_may_contain_the_pattern_and_drop_arguments() -> None:
    explanation = explained(
        rewriting(linear, lambda weight, x: F.linear(F.linear(x, weight), weight.t()) @ weight.t(), name="loop")
    )
    assert places(explanation) == {"loop": 2}


def test_a_replacement_may_give_back_an_argument() -> None:
    explanation = explained(
        rewriting(lambda x: torch.tanh(x), lambda x: x, name="drop"), model=lambda x: torch.tanh(x) + 1
    )
    assert [op.id.operator for op in explanation.operators] == ["add"]


# Numbers.


def test_numbers_in_the_pattern_must_be_those_of_the_model() -> None:
    def layer_norm(eps: float) -> Any:
        return lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, eps)

    for eps, count in ((1e-5, 1), (1e-6, 0)):
        find = layer_norm(eps)
        assert places(explained(rewriting(find, lambda x: x, name="norm"))) == {"norm": count}
    assert places(explained(rewriting(lambda x: F.dropout(x, 0.5), lambda x: x, name="drop"))) == {"drop": 0}


def test_arguments_with_defaults_stand_for_any_value() -> None:
    seen = []

    def find(x: Tensor, p: float = 0.1, training: bool = True) -> Tensor:
        return F.dropout(x, p, training)

    def put(match: qsync_fx.Match, x: Tensor, p: float, training: bool) -> Tensor:
        seen.append((match["p"], p, training))
        return x * (1 - p)

    for p, training in ((0.25, True), (0.1, False), (0.1, True)):
        model = build(lambda p=p: Net(p)).train(training)
        assert places(explained(rewriting(find, put), model=model)) == {"find": 1}
    assert seen == [(0.25, 0.25, True), (0.1, 0.1, False), (0.1, 0.1, True)]


def test_numbers_that_sizes_decide() -> None:
    """`weight.shape` is [8] in one graph and symbolic in another; what the pattern makes of it is compared there."""

    def find(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias).unflatten(-1, (2, weight.shape[0] // 2)).flatten(0, 1)

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x).unflatten(-1, (2, 4)).flatten(0, 1)

    def put(x: Tensor) -> Tensor:
        return x.reshape(2 * x.shape[0], 4)

    model = Heads()
    assert places(explained(rewriting(find, put), model=model)) == {"find": 1}
    counting = Counting()
    run = counting.compile(model, passes=[rewriting(find, put)])
    for rows in (5, 6, 7):
        x = torch.randn(rows, 8)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(run(x), x.reshape(-1, 4))
    assert len(counting.graphs) == 1


# Guards.


def test_guards_on_shapes_and_formats() -> None:
    wide = rewriting(linear_gelu, addmm_gelu, where=lambda match: match["weight"].shape[0] >= 16)
    assert places(explained(wide)) == {"linear_gelu": 1}
    wide = rewriting(linear_gelu, addmm_gelu, where=lambda match: match["x"].dtype is torch.float64)
    assert places(explained(wide)) == {"linear_gelu": 0}
    named = rewriting(linear_gelu, addmm_gelu, where=lambda match: match.module == "second")
    assert next(str(op.id) for op in explained(named).operators if op.note.by) == "second/linear_gelu.t"


def test_a_guard_that_fails_is_named() -> None:
    broken = rewriting(linear, linear, where=lambda match: match["y"].shape)
    with pytest.raises(PassError, match="the guard of 'linear' failed: KeyError: 'y'") as caught:
        explained(broken)
    assert "operator first/linear" in str(caught.value.where)
    with pytest.raises(PassError, match="the guard of 'linear' failed"):
        compiled(build(Net), passes=[broken])(torch.randn(4, 8))


# What is left alone.


def test_inner_values_that_others_read_are_left_alone_and_said() -> None:
    def model(x: Tensor) -> Tensor:
        inner = x.sin()
        return inner.tanh() + inner

    explanation = explained(rewriting(lambda x: x.sin().tanh(), lambda x: x, name="both"), model=model)
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
        rewriting(find, lambda a, b: b * a.sin()), model=model, args=(torch.randn(4, 8), torch.randn(4, 8))
    )
    assert "writes in place" in explanation.rewritten["find"].left[0]


def test_a_place_across_modes_is_left_alone() -> None:
    def model(x: Tensor) -> Tensor:
        with torch.no_grad():
            first = x.sin()
        return first.tanh()

    explanation = explained(rewriting(lambda x: x.sin().tanh(), lambda x: x, name="both"), model=model)
    assert "gradients" in explanation.rewritten["both"].left[0]


def test_nothing_found_is_said() -> None:
    explanation = explained(rewriting(lambda x: x.erf(), lambda x: x, name="erf"))
    assert places(explanation) == {"erf": 0}
    assert "rewrite erf: found nowhere" in str(explanation)
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
    wanted, wanted_grads = step(compiled(plain, precision="int8", passes=[fuse]), plain, x)
    wanted_scale, scale.grad = scale.grad, None
    found, found_grads = step(compiled(recomputed, precision="int8", passes=[fuse]), recomputed, x)
    assert torch.equal(found, wanted)
    assert_equal({name.removeprefix("net."): grad for name, grad in found_grads.items()}, wanted_grads)
    assert scale.grad is not None
    assert wanted_scale is not None
    assert torch.allclose(scale.grad, wanted_scale)


def test_regions_of_autocast() -> None:
    model, x = build(Net), torch.randn(4, 8)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model.first(x)
        return y.float().sum() + model.second(F.gelu(model.first(x))).sum()

    fuse = rewriting(linear, lambda x, weight, bias: F.linear(x, weight * 1, bias))
    found = explained(fuse, model=run, precision=None)
    assert places(found) == {"linear": 3}
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
    backend, model, x, fuse = Counting(), build(Net), torch.randn(4, 8), rewriting(linear_gelu, addmm_gelu)
    for _ in range(2):
        backend.compile(model, passes=[fuse])(x)
    assert len(backend.graphs) == 1
    backend.compile(model, passes=[rewriting(linear_gelu, addmm_gelu, where=lambda match: True)])(x)
    assert len(backend.graphs) == 2


# Tensors that a replacement refers to.


@pytest.mark.parametrize("inner", INNER)
def test_parameters_that_a_replacement_refers_to_train(inner: str) -> None:
    torch.manual_seed(0)
    adapters = {"first": nn.Linear(8, 16, bias=False), "second": nn.Linear(16, 8, bias=False)}

    def put(match: qsync_fx.Match, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias) + adapters[match.module](x)

    class Written(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = F.gelu(self.first(self.norm(x)) + adapters["first"](self.norm(x)))
            return F.gelu(self.second(h) + adapters["second"](h))

    parameters = [adapter.weight for adapter in adapters.values()]
    before = [p.detach().clone() for p in parameters]

    def trained(run: Callable[..., Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        with torch.no_grad():
            for p, value in zip(parameters, before, strict=True):
                p.copy_(value)
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        losses = []
        for x in torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(3)):
            optimizer.zero_grad()
            loss = run(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses, [p.detach().clone() for p in parameters]

    wanted = trained(build(Written))
    fast = torch.compile(
        build(Net), backend="qsync", options={"precision": "fp32", "inner": inner, "passes": [rewriting(linear, put)]}
    )
    found = trained(fast)
    assert not any(torch.equal(p, value) for p, value in zip(parameters, before, strict=True))
    for one, other in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("inner", INNER)
def test_buffers_that_a_replacement_writes_stay_written(inner: str) -> None:
    largest = {"first": torch.zeros(()), "second": torch.zeros(())}

    def put(match: qsync_fx.Match, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.no_grad():
            largest[match.module].copy_(torch.maximum(largest[match.module], x.abs().amax()))
        return F.linear(x, weight, bias)

    model = build(Net)
    reads: dict[str, float] = {"first": 0.0, "second": 0.0}
    for name in reads:

        def note(module: nn.Module, args: tuple[Tensor], name: str = name) -> None:
            reads[name] = max(reads[name], float(args[0].detach().abs().amax()))

        getattr(model, name).register_forward_pre_hook(note)
    batches = torch.randn(3, 4, 8)
    for x in batches:
        model(x)
    fast = torch.compile(
        build(Net), backend="qsync", options={"precision": "fp32", "inner": inner, "passes": [rewriting(linear, put)]}
    )
    for x in batches:
        fast(x).sum().backward()
    assert {name: pytest.approx(float(value), rel=1e-5) for name, value in largest.items()} == reads


def test_a_tensor_that_the_graph_has_already_is_in_it_once() -> None:
    model = build(Net)

    def put(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias) * model.norm.weight.sum()

    fuse = rewriting(linear, put)
    found = explained(fuse, model=model)
    assert not [node for node in found.graph_module("linear").graph.nodes if node.op == "get_attr"]
    x = torch.randn(4, 8)
    _, grads = step(compiled(model, precision="fp32", passes=[fuse]), model, x)
    exact = build(Net)

    def written(x: Tensor) -> Tensor:
        scale = exact.norm.weight.sum()
        return F.gelu(exact.second(F.gelu(exact.first(exact.norm(x)) * scale)) * scale)

    _, wanted = step(written, exact, x)
    assert all(torch.allclose(grads[name], wanted[name], rtol=1e-4) for name in wanted)


def test_operators_with_a_backward_pass_of_their_own() -> None:
    @torch.library.custom_op("test_rewrite::doubled_gradient", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x.clone()

    doubled.register_fake(torch.empty_like)
    doubled.register_autograd(lambda ctx, gradient: 2 * gradient)
    model, x = build(Net), torch.randn(4, 8)
    fuse = rewriting(
        linear, lambda x, weight, bias: F.linear(x, doubled(weight), bias), where=lambda match: match.module == "second"
    )
    _, wanted = step(model, model, x)
    _, found = step(compiled(model, precision="fp32", passes=[fuse]), model, x)
    assert torch.allclose(found["second.weight"], 2 * wanted["second.weight"], rtol=1e-4)
    assert torch.allclose(found["first.weight"], wanted["first.weight"], rtol=1e-4, atol=1e-7)


# What cannot be.


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


_GIVEN = torch.ones(8, requires_grad=True)
_COMPUTED = _GIVEN * 2


@pytest.mark.parametrize(
    ("put", "what"),
    [
        (lambda x: x.sum().item(), "cannot be traced"),
        (lambda x: x @ torch.ones(3, 3), "cannot be traced: RuntimeError: a and b must have same reduction dim"),
        (lambda x: None, "cannot be traced: it returns NoneType, where a tensor or a tuple of tensors is expected"),
        (lambda x: {"y": x}, "cannot be traced: it returns dict"),
        (Rounded.apply, "cannot be traced: it calls the autograd function Rounded, whose backward pass"),
        (lambda x: x + _COMPUTED, "cannot be traced: it refers to a tensor that was computed with gradients"),
        (lambda x: (x, x), r"gives f32\[4, 8\], f32\[4, 8\] where the model computes f32\[4, 8\]"),
        (lambda x: x[:, :4], r"gives f32\[4, 4\] where the model computes f32\[4, 8\]"),
        (lambda x: x.double(), r"gives f64\[4, 8\] where the model computes f32\[4, 8\]"),
    ],
)
def test_replacements_that_do_not_fit(put: Callable[..., Any], what: str) -> None:
    broken = rewriting(lambda x: F.dropout(x, 0.0), lambda x: put(x), name="broken")
    with pytest.raises(PassError, match=rf"the replacement of 'broken' {what}") as caught:
        explained(broken)
    assert "operator dropout/dropout" in str(caught.value.where)
    assert __file__ in str(caught.value.where)
    assert caught.value.do
    with pytest.raises(PassError, match="the replacement of 'broken'"):
        compiled(build(Net), passes=[broken])(torch.randn(4, 8))


@pytest.mark.parametrize(
    ("find", "what"),
    [
        (lambda x: x + _GIVEN, "refers to a tensor that it is not given"),
        (lambda x, y: x.sin(), "does not read 'y'"),
        (lambda x: x, "returns what it is given"),
        (lambda x: x.sum().item(), "cannot be traced: DataDependentOutputException"),
        (lambda x: None, "cannot be traced: it returns NoneType"),
        (
            lambda x, scale=3.0: x * (scale + 1),
            "the argument 'scale' of the pattern '<lambda>' reaches no operator as it is",
        ),
        (lambda ids, weight: F.embedding(ids, weight), "cannot be traced"),
    ],
)
def test_patterns_that_say_nothing_to_find(find: Callable[..., Any], what: str) -> None:
    with pytest.raises(PassError, match=what) as caught:
        explained(rewriting(find, lambda: None))
    assert __file__ in str(caught.value.where)
    assert caught.value.do


def test_an_example_says_what_a_pattern_takes() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 8)

        def forward(self, ids: Tensor) -> Tensor:
            return self.embedding(ids)

    def find(ids: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(ids, weight)

    example = torch.zeros(2, 3, dtype=torch.int64), torch.empty(5, 4)
    fuse = rewriting(find, lambda ids, weight: weight[ids], example=example)
    assert places(explained(fuse, model=Embedded(), args=(torch.randint(10, (4, 6)),))) == {"find": 1}


def test_what_is_wrong_with_a_rewrite_is_told_where_it_is_written() -> None:
    with pytest.raises(OptionError, match="one place"):
        qsync_fx.rewrite(after="normalize", before="lower")
    with pytest.raises(OptionError, match="has \\*arguments"):
        qsync_fx.rewrite(lambda *args: args[0])
    with pytest.raises(OptionError, match="0 arguments for tensors"):
        qsync_fx.rewrite(lambda p=1: p)
    with pytest.raises(OptionError, match="an example of 1 tensors and 2 arguments"):
        qsync_fx.rewrite(example=(torch.empty(2),))(lambda x, y: x + y)
    with pytest.raises(OptionError, match="takes 'z', which the pattern has not"):
        rewriting(lambda x: x.sin(), lambda z: z)
    with pytest.raises(OptionError, match="has a replacement already"):
        rewriting(linear, linear).replacement(linear)
    with pytest.raises(OptionError, match="has no replacement") as caught:
        explained(qsync_fx.rewrite(linear))
    assert caught.value.do == "decorate one with @linear.replacement"
