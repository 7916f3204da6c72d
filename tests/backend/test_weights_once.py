"""The option "weights_once": a weight is quantized once a step, to the bits of a step without the option, and no write goes unseen."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiers
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint
from weight_writes import COUNTED, UNCOUNTED, Write

import qsync_fx
from qsync_fx.backend import kept_weights
from qsync_fx.backend.kept_weights import Made, copies

INNERS = ["aot_eager", pytest.param("inductor", marks=tiers.ALL), pytest.param("eager", marks=tiers.ALL)]
NEAREST = {"precision": "int8", "rounding": "nearest"}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The weights that were quantized outside of graphs."""
    found: list[Tensor] = []
    quantize = Made.of

    def watched(self: Made, weight: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        found.append(weight)
        return quantize(self, weight, seed)

    monkeypatch.setattr(Made, "of", watched)
    yield found
    torch.compiler.reset()


class Net(nn.Module):
    """Convolution, linear layers, one of them twice, and a product with a parameter that no module owns."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up, self.same = nn.Conv2d(3, 8, 3), nn.Linear(32, 24), nn.Linear(24, 24, bias=False)
        self.out = nn.Parameter(torch.randn(24, 5))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(torch.relu(self.conv(x)).flatten(1)))
        return torch.relu(self.same(torch.relu(self.same(h)))) @ self.out


def trained(
    model: nn.Module, options: dict[str, Any], batches: list[list[Tensor]], optimizer: Any = qsync_fx.optim.SGD
) -> list[Tensor]:
    """Returns outputs and gradients of steps, each over some micro-batches, and the weights behind them."""
    torch.compiler.reset()
    torch.manual_seed(1)
    model = copy.deepcopy(model)
    compiled, found = torch.compile(model, backend="qsync", options=options), []
    stepping = optimizer(model.parameters(), lr=0.05)
    for micro_batches in batches:
        stepping.zero_grad()
        for x in micro_batches:
            y = compiled(x)
            y.square().mean().backward()
            found.append(y.detach())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        stepping.step()
    return found + [p.detach() for p in model.parameters()]


def images(count: int, rows: int = 4) -> list[Tensor]:
    return [torch.randn(rows, 3, 4, 4) for _ in range(count)]


def equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) > 0 and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(
    ("precision", "scaling", "inner"),
    [
        ("int8", "tensor", "aot_eager"),
        ("int8", "channel", "aot_eager"),
        ("int8_grad", "tensor", "aot_eager"),
        ("fp8", "channel", "aot_eager"),
        pytest.param("int8", "channel", "eager", marks=tiers.ALL),
        pytest.param("int8_grad", "tensor", "inductor", marks=tiers.ALL),
        pytest.param("fp8", "channel", "inductor", marks=tiers.ALL),
    ],
)
def test_steps_have_the_bits_of_steps_without_it(precision: str, scaling: str, inner: str, made: list[Tensor]) -> None:
    """With one pass a step: the same numbers are drawn for the same roundings."""
    torch.manual_seed(0)
    model, batches = Net(), [[x] for x in images(3)]
    options = {"precision": precision, "scaling": scaling, "inner": inner}
    wanted = trained(model, options, batches)
    assert not made
    found = trained(model, {**options, "weights_once": True}, batches)
    assert equal(found, wanted)
    assert len(made) == 4 * 3


@pytest.mark.parametrize("inner", INNERS)
def test_a_weight_is_quantized_once_a_step_and_not_once_a_micro_batch(inner: str, made: list[Tensor]) -> None:
    """Rounded to nearest, which copy is read makes no difference: gradients that are summed are those without the option."""
    torch.manual_seed(0)
    model, batches = Net(), [images(4), images(4), images(4)]
    options = {**NEAREST, "inner": inner}
    assert equal(trained(model, {**options, "weights_once": True}, batches), trained(model, options, batches))
    assert len(made) == 4 * 3


def test_micro_batches_share_a_rounding_and_steps_do_not() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 32, bias=False), torch.eye(64)  # each value of which is on INT8's grid
    compiled = torch.compile(
        layer, backend="qsync", options={"precision": "int8", "inner": "aot_eager", "weights_once": True}
    )
    first, second = compiled(x), compiled(x)
    with torch.no_grad():
        layer.weight.mul_(1)
    assert torch.equal(first, second) and not torch.equal(first, compiled(x))


def test_a_seed_repeats_a_run() -> None:
    torch.manual_seed(0)
    model, batches = Net(), [images(2), images(2)]
    options = {"precision": "int8", "inner": "aot_eager", "weights_once": True}
    assert equal(trained(model, options, batches), trained(model, options, batches))


def test_graphs_of_other_shapes_and_evaluation_share_or_have_copies_of_their_own(made: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = Net()
    compiled = torch.compile(
        model, backend="qsync", dynamic=False, options={"precision": "int8", "inner": "aot_eager", "weights_once": True}
    )
    for rows in (4, 6, 4):
        compiled(*images(1, rows)).sum().backward()
    assert len(made) == 4, "another graph reads the copies of the first"
    with torch.inference_mode():
        compiled(*images(1))
        compiled(*images(1))
    assert len(made) == 8, "evaluation rounds to nearest"
    compiled(*images(1)).sum().backward()
    assert len(made) == 8, "and leaves what training reads as it was"


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("name", [*COUNTED, *UNCOUNTED])
def test_a_weight_that_was_changed_is_read_as_it_is(
    name: str, evaluated: bool, inner: str, recwarn: pytest.WarningsRecorder
) -> None:
    """What torch does not count is seen by its values, here at the second time that a copy is used."""
    torch.compiler.reset()
    torch.manual_seed(0)
    layer, x = nn.Linear(24, 12, bias=False), torch.randn(5, 24)
    compiled = torch.compile(layer, backend="qsync", options={**NEAREST, "inner": inner, "weights_once": True})
    write: Write = {**COUNTED, **UNCOUNTED}[name]
    with torch.set_grad_enabled(not evaluated):
        before, again = compiled(x).detach().clone(), compiled(x).detach().clone()
        write(layer)
        after = compiled(x)
        assert torch.equal(before, again) and before.any()
        assert torch.equal(after, -before)
        write(layer)
        assert torch.equal(compiled(x), before), "a weight that is not trusted any more is read in each pass"
    told = [w for w in recwarn.list if "written to without torch knowing" in str(w.message)]
    assert len(told) == (name in UNCOUNTED)


def stepped(optimizer: Callable[..., Any], **given: Any) -> Write:
    def write(layer: nn.Linear) -> None:
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer([layer.weight], lr=0.5, **given).step()

    return write


def compiled_step(layer: nn.Linear) -> None:
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer = torch.optim.AdamW([layer.weight], lr=0.5)
    torch.compile(lambda: optimizer.step())()


def in_inference_mode(layer: nn.Linear) -> None:
    with torch.inference_mode():
        layer.weight.mul_(2)


class ThroughData(torch.optim.Optimizer):
    """One that no counter sees."""

    def __init__(self, parameters: list[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])


STEPS: dict[str, Write] = {
    **{f"{o.__name__}, fused": stepped(o, fused=True) for o in (torch.optim.SGD, torch.optim.AdamW)},
    **{f"{o.__name__}, foreach": stepped(o, foreach=True) for o in (torch.optim.SGD, torch.optim.AdamW)},
    **{f"{o.__name__} of ours": stepped(o) for o in (qsync_fx.optim.SGD, qsync_fx.optim.Adam, qsync_fx.optim.AdamW)},
    **{o.__name__: stepped(o) for o in (torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.ASGD)},
    "through .data": stepped(ThroughData),
    "vector_to_parameters": lambda layer: nn.utils.vector_to_parameters(torch.ones(24 * 12), [layer.weight]),
    "inference mode": in_inference_mode,
}


@pytest.mark.parametrize("name", [*STEPS, pytest.param("compiled", marks=tiers.ALL)])
def test_steps_of_optimizers_are_counted(name: str) -> None:
    """What the option stands on."""
    torch.manual_seed(0)
    layer, seed = nn.Linear(24, 12, bias=False), torch.zeros([1], dtype=torch.int64)
    how = Made(0, "int8", "nearest", ())
    (before,) = copies([(layer.weight, how)], seed)
    {**STEPS, "compiled": compiled_step}[name](layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = copies([(layer.weight, how)], seed)
    assert found[0] is not before[0] and equal([*found], [*how.of(layer.weight, seed)])


def test_memory_that_comes_back_is_not_taken_for_what_lay_there() -> None:
    """A parameter that is given other memory twice, between two passes, would find itself where it was."""
    weight, seed = nn.Parameter(torch.ones(1000)), torch.zeros([1], dtype=torch.int64)
    how = Made(0, "int8", "nearest", ())
    copies([(weight, how)], seed)
    for factor in range(2, 8):
        weight.data = weight.data * factor
        (found,) = copies([(weight, how)], seed)
        assert equal([*found], [*how.of(weight, seed)])


@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (7,), (300, 2), (3, 5, 2, 2)])
def test_weights_of_any_size_and_strides(shape: tuple[int, ...]) -> None:
    seed, how = torch.zeros([1], dtype=torch.int64), Made(0, "int8", "nearest", ())
    gapped = torch.randn(*shape, 2)[..., 0] if shape else torch.tensor(2.0)
    for held in (torch.randn(shape), torch.randn(shape).t() if len(shape) == 2 else torch.randn(shape), gapped):
        weight = nn.Parameter(held)
        pairs = [copies([(weight, how)], seed)[0] for _ in range(5)]
        assert all(equal([*pair], [*how.of(weight, seed)]) for pair in pairs)
        assert pairs[0][0] is pairs[4][0]


def test_numbers_that_are_none_are_the_same_as_before(recwarn: pytest.WarningsRecorder) -> None:
    weight, seed = nn.Parameter(torch.full((4, 4), float("nan"))), torch.zeros([1], dtype=torch.int64)
    found = [copies([(weight, Made(0, "int8", "nearest", ()))], seed)[0][0] for _ in range(4)]
    assert all(q is found[0] for q in found) and not recwarn.list


def test_tensors_without_values_are_quantized_and_not_kept() -> None:
    """DDP runs what is compiled of a bucket on them, to know what the next one gets."""
    with FakeTensorMode():
        weight, seed = nn.Parameter(torch.ones(4, 6)), torch.zeros([1], dtype=torch.int64)
        ((q, scale),) = copies([(weight, Made(0, "int8", "nearest", ()))], seed)
    assert isinstance(q, FakeTensor) and q.shape == (4, 6) and scale.shape == ()
    assert weight not in kept_weights._kept


def test_what_is_recorded_for_a_cuda_graph_reads_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that was at hand would be replayed for good."""
    weight, seed, how = nn.Parameter(torch.ones(4)), torch.zeros([1], dtype=torch.int64), Made(0, "int8", "nearest", ())
    before = copies([(weight, how)], seed)
    monkeypatch.setattr(kept_weights, "_queue", lambda device: None)
    assert copies([(weight, how)], seed)[0][0] is not before[0][0]
    monkeypatch.undo()
    assert copies([(weight, how)], seed)[0][0] is before[0][0]


def test_queues_of_a_device_have_copies_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another one has made it may not have made yet."""
    weight, seed, how = nn.Parameter(torch.ones(4)), torch.zeros([1], dtype=torch.int64), Made(0, "int8", "nearest", ())
    found = []
    for queue in (1, 2, 1, 2):
        monkeypatch.setattr(kept_weights, "_queue", lambda device, queue=queue: queue)
        found.append(copies([(weight, how)], seed)[0][0])
    assert found[0] is found[2] and found[1] is found[3] and found[0] is not found[1]


def test_copies_go_with_their_weight(made: list[Tensor]) -> None:
    weight, seed = nn.Parameter(torch.ones(4)), torch.zeros([1], dtype=torch.int64)
    ((q, _),) = copies([(weight, Made(0, "int8", "nearest", ()))], seed)
    gone = weakref.ref(q)
    made.clear()
    del weight, q
    gc.collect()
    assert gone() is None


def test_around_the_compiled_model_checkpointing_computes_the_same_again(made: list[Tensor]) -> None:
    torch.manual_seed(0)
    model, (x,) = Net(), images(1)
    options = {"precision": "int8", "inner": "aot_eager", "weights_once": True}
    found = []
    for around in (False, True):
        torch.compiler.reset()
        compiled = torch.compile(copy.deepcopy(model), backend="qsync", options=options)
        torch.manual_seed(1)
        compiled(x)
        y = checkpoint(compiled, x, use_reentrant=False) if around else compiled(x)
        found.append([y.detach(), *torch.autograd.grad(y.sum(), list(compiled.parameters()))])
    assert equal(*found)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(checkpoint(self.inside, x, use_reentrant=False))  # type: ignore[no-any-return]


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.neg_()
        return self.layer(x)  # type: ignore[no-any-return]


class Derived(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.both[8:].t()


@pytest.mark.parametrize(
    ("model", "why", "count"),
    [
        (Checkpointed, "inside.* it stands in what is checkpointed", 1),
        (Writing, "the model itself writes to it", 0),
        (Derived, "it is computed from a parameter", 0),
    ],
)
def test_what_stays_in_the_graph_is_said(model: type[nn.Module], why: str, count: int, made: list[Tensor]) -> None:
    torch.manual_seed(0)
    net, x = model(), torch.randn(4, 8)
    options = {**NEAREST, "inner": "aot_eager"}
    wanted = torch.compile(copy.deepcopy(net), backend="qsync", options=options)(x)
    compiled = torch.compile(net, backend="qsync", options={**options, "weights_once": True})
    with pytest.warns(qsync_fx.PlanWarning, match=f'"weights_once" leaves 1 weights .*{why}'):
        found = compiled(x)
    assert torch.equal(found, wanted) and len(made) == count
    found.sum().backward()


def test_a_model_without_such_weights_is_told() -> None:
    options = {"precision": "bf16", "inner": "aot_eager", "weights_once": True}
    compiled = torch.compile(nn.Linear(8, 8), backend="qsync", options=options)
    with pytest.warns(qsync_fx.PlanWarning, match='"weights_once" has no effect on .* It is for int8 and fp8'):
        compiled(torch.randn(4, 8))
