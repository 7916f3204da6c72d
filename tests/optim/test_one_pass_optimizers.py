"""Optimizers of one pass are torch's: the same numbers, state, arguments and hooks, whatever the path, the threads and the parameters."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import tiers
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

import qsync_fx
from qsync_fx import _C

PAIRS: dict[str, tuple[Any, Any]] = {
    name: (getattr(qsync_fx.optim, name), getattr(torch.optim, name)) for name in qsync_fx.optim.__all__
}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "dampening": 0.25}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"lr": 0.01, "betas": (0.3, 0.5), "maximize": True}),
    ("AdamW", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "amsgrad": True, "maximize": True, "eps": 1e-3, "weight_decay": 0.0}),
]
every_setting = pytest.mark.parametrize(
    ("name", "how"), SETTINGS, ids=[f"{name}-{at}" for at, (name, _) in enumerate(SETTINGS)]
)
EPSILON = 2.0**-24


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each call of a kernel took."""
    calls: list[int] = []

    def watched(kernel: Callable[..., None]) -> Callable[..., None]:
        def call(params: list[int], *args: Any, **kwargs: Any) -> None:
            calls.append(len(params))
            kernel(params, *args, **kwargs)

        return call

    monkeypatch.setattr(_C, "sgd", watched(_C.sgd))
    monkeypatch.setattr(_C, "adam", watched(_C.adam))
    return calls


def parameters(*values: Tensor) -> list[nn.Parameter]:
    return [nn.Parameter(value.clone()) for value in values]


def steps(optimizer: Optimizer, gradients: list[list[Tensor]]) -> None:
    for now in gradients:
        for parameter, gradient in zip(optimizer.param_groups[0]["params"], now, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


def assert_alike(ours: Optimizer, torchs: Optimizer, steps_taken: int) -> None:
    """Parameters and state agree: within the ulps that a step may add, of the larger of what it adds up."""
    for a, b in zip(ours.param_groups[0]["params"], torchs.param_groups[0]["params"], strict=True):
        assert ours.state[a].keys() == torchs.state[b].keys()
        largest = max(float(tensor.detach().nan_to_num(0, 0, 0).abs().max()) for tensor in (a, b)) if a.numel() else 0.0
        pairs: list[tuple[Any, Any, float | None]] = [(a.detach(), b.detach(), max(largest, 1.0))]
        pairs += [(ours.state[a][key], torchs.state[b][key], None) for key in ours.state[a]]
        for mine, other, size in pairs:
            if not isinstance(other, Tensor):
                assert mine == other
                continue
            assert (mine.dtype, mine.shape, mine.stride()) == (other.dtype, other.shape, other.stride())
            scale = size if size is not None else float(other.nan_to_num(0, 0, 0).abs().max()) if other.numel() else 0.0
            bound = 4 * steps_taken * EPSILON * scale
            torch.testing.assert_close(mine, other, rtol=8 * steps_taken * EPSILON, atol=bound, equal_nan=True)


@every_setting
@settings(max_examples=10)
@given(data=st.data())
def test_many_steps_are_those_of_torch(name: str, how: dict[str, Any], data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=5))
    count = data.draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    exponent = data.draw(st.sampled_from([-140, -60, -10, 0, 10]))

    def drawn() -> list[Tensor]:
        return [torch.randn(size, generator=generator) * 2.0**exponent for size in sizes]

    start, gradients = drawn(), [drawn() for _ in range(count)]
    ours, torchs = PAIRS[name]
    found = ours(parameters(*start), **how)
    expected = torchs(parameters(*start), **how, foreach=False)
    steps(found, gradients)
    steps(expected, gradients)
    assert_alike(found, expected, count)


@every_setting
def test_what_is_not_finite_spreads_as_in_torch(name: str, how: dict[str, Any]) -> None:
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, 3e38, 1.0])
    start = special.repeat_interleave(8)
    gradient = special.repeat(8)
    ours, torchs = PAIRS[name]
    found, expected = ours(parameters(start), **how), torchs(parameters(start), **how, foreach=False)
    for optimizer in (found, expected):
        steps(optimizer, [[gradient], [gradient.flip(0)], [gradient.roll(3)]])
    a, b = found.param_groups[0]["params"][0], expected.param_groups[0]["params"][0]
    for mine, other in [(a, b), *((found.state[a][key], expected.state[b][key]) for key in found.state[a])]:
        if isinstance(mine, Tensor):
            torch.testing.assert_close(mine.isnan(), other.isnan())
            torch.testing.assert_close(mine.isinf(), other.isinf())
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6, equal_nan=True)


@every_setting
def test_paths_and_threads_change_no_bit(
    name: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch, counted: list[int]
) -> None:
    torch.manual_seed(1)
    start = [torch.randn(size) for size in (30_001, 7, 0, 64, 8191)]
    gradients = [[torch.randn_like(value) for value in start] for _ in range(3)]
    kernels = {"sgd": _C.sgd, "adam": _C.adam}
    found = []
    for isa in _C.available_isas():
        for threads in (1, 2, 5):
            for kernel, run in kernels.items():

                def forced(*args: Any, run: Any = run, isa: str = isa, threads: int = threads, **kwargs: Any) -> None:
                    run(*args, **{**kwargs, "isa": isa, "threads": threads})

                monkeypatch.setattr(_C, kernel, forced)
            optimizer = PAIRS[name][0](parameters(*start), **how)
            steps(optimizer, gradients)
            found.append([*optimizer.param_groups[0]["params"], *states_of(optimizer)])
    assert counted == [5] * 3 * len(found)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def states_of(optimizer: Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


@every_setting
@pytest.mark.parametrize("first", ["ours", "torch"])
def test_state_goes_from_one_to_the_other(name: str, how: dict[str, Any], first: str) -> None:
    torch.manual_seed(2)
    start = [torch.randn(33), torch.randn(4, 5)]
    gradients = [[torch.randn_like(value) for value in start] for _ in range(4)]
    one, other = PAIRS[name] if first == "ours" else PAIRS[name][::-1]
    before = one(parameters(*start), **how)
    steps(before, gradients[:2])
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    after = other(parameters(*before.param_groups[0]["params"]), lr=1.0)
    after.load_state_dict(torch.load(file))
    for optimizer in (before, after):
        steps(optimizer, gradients[2:])
    assert_alike(before, after, 2)
    pickled = pickle.loads(pickle.dumps(after))
    assert type(pickled) is other
    steps(pickled, gradients[:1])


@pytest.mark.parametrize("name", PAIRS)
def test_arguments_are_those_of_torch(name: str) -> None:
    ours, torchs = PAIRS[name]
    assert issubclass(ours, torchs)
    assert inspect.signature(ours) == inspect.signature(torchs)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        ours(parameters(torch.zeros(1)), lr=-1.0)
    for arguments in ({"foreach": True}, {"fused": True}, {"foreach": False}, {"fused": False}):
        found, expected = (kind(parameters(torch.ones(20)), **arguments) for kind in (ours, torchs))
        assert found.defaults == expected.defaults
        for optimizer in (found, expected):
            steps(optimizer, [[torch.ones(20)]] * 2)
        assert_alike(found, expected, 2)


@pytest.mark.parametrize("name", PAIRS)
def test_learning_rates_may_be_tensors(name: str, counted: list[int]) -> None:
    torch.manual_seed(3)
    start, gradient = torch.randn(40), torch.randn(40)
    found, expected = (
        kind(parameters(start), lr=torch.tensor(0.1), weight_decay=0.3, foreach=False) for kind in PAIRS[name]
    )
    for optimizer in (found, expected):
        steps(optimizer, [[gradient]])
        optimizer.param_groups[0]["lr"].mul_(0.1)
        steps(optimizer, [[gradient]])
    assert counted == [1, 1]
    assert_alike(found, expected, 2)


@pytest.mark.parametrize("name", PAIRS)
def test_groups_closures_hooks_and_schedules(name: str) -> None:
    torch.manual_seed(4)
    start = [torch.randn(6, 6), torch.randn(6)]
    ends = []
    for kind in PAIRS[name]:
        weight, bias = parameters(*start)
        groups = [{"params": [weight], "lr": 0.5}, {"params": [bias], "weight_decay": 0.5}]
        optimizer = kind(groups, lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        called: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, called=called: called.append("before"))
        optimizer.register_step_post_hook(lambda *_, called=called: called.append("after"))

        def closure(optimizer: Optimizer = optimizer, weight: Tensor = weight, bias: Tensor = bias) -> Tensor:
            optimizer.zero_grad()
            loss = (weight.sin() @ bias).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        losses = []
        for _ in range(3):
            losses.append(optimizer.step(closure).item())
            schedule.step()
        assert called == ["before", "after"] * 3
        ends.append((torch.tensor(losses), weight.detach(), bias.detach()))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


def test_a_weight_that_changes_before_its_backward_pass_is_told() -> None:
    """The kernels write by address; autograd must know all the same."""
    for kind, _ in PAIRS.values():
        weight = nn.Parameter(torch.randn(8))
        optimizer = kind([weight], lr=0.1)
        loss = weight.square().sum()
        weight.grad = torch.ones(8)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", PAIRS)
def test_layouts(name: str, counted: list[int]) -> None:
    """A layout without gaps is taken as it is, and a gradient is brought into it; the rest is torch's."""
    torch.manual_seed(5)
    image = torch.randn(4, 3, 5, 5)
    shapes = [image.contiguous(memory_format=torch.channels_last), torch.randn(6, 9).t(), torch.randn(1, 5)]
    gapped = torch.randn(12, 8)
    ends = []
    for kind in PAIRS[name]:
        weights = [nn.Parameter(torch.empty_like(shape).copy_(shape)) for shape in shapes]
        weights += [nn.Parameter(gapped.clone()[::2])]
        optimizer = kind(weights, lr=0.1)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.sin(weight.detach()).contiguous()
            optimizer.step()
        assert [weight.stride() for weight in weights[:2]] == [shape.stride() for shape in shapes[:2]]
        ends.append([weight.detach() for weight in weights])
    assert counted == [3, 3, 3]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", PAIRS)
def test_what_kernels_do_not_take_torch_does(name: str, counted: list[int]) -> None:
    """FP64, BF16, complex numbers, tensors with a class of their own, in one group with what they take."""

    class Own(Tensor):
        pass

    torch.manual_seed(6)
    values = [torch.randn(9), torch.randn(9, dtype=torch.float64), torch.randn(9).bfloat16()]
    values += [torch.randn(9, dtype=torch.complex64), torch.randn(9).as_subclass(Own), torch.randn(9)]
    ends = []
    for kind in PAIRS[name]:
        optimizer = kind([value.clone().requires_grad_() for value in values], lr=0.1)
        steps(optimizer, [[value.cos() for value in values]] * 2)
        ends.append([parameter.detach() for parameter in optimizer.param_groups[0]["params"]])
    assert counted == [2, 2]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-6)


def test_sparse_gradients_are_for_torch(counted: list[int]) -> None:
    ends = []
    for kind in PAIRS["SGD"]:
        torch.manual_seed(7)
        table, layer = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)
        optimizer = kind([*table.parameters(), *layer.parameters()], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            layer(table(torch.tensor([1, 3]))).sum().backward()
            optimizer.step()
        ends.append([table.weight.detach(), layer.weight.detach()])
    assert counted == [2, 2]
    torch.testing.assert_close(ends[0], ends[1])
    table = nn.Embedding(10, 4, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        qsync_fx.optim.AdamW(table.parameters()).step()


def test_on_another_device_torch_steps(counted: list[int]) -> None:
    parameter = nn.Parameter(torch.zeros(4, device="meta"))
    parameter.grad = torch.zeros(4, device="meta")
    for kind, _ in PAIRS.values():
        kind([parameter]).step()
    assert not counted


@pytest.mark.parametrize("name", PAIRS)
def test_differentiable_steps_are_torchs(name: str) -> None:
    ends = []
    for kind in PAIRS[name]:
        start = torch.linspace(1, 2, 5, requires_grad=True)
        weight = start.clone()
        optimizer = kind([weight], lr=0.1, differentiable=True)
        weight.grad = start.square()
        optimizer.step()
        ends.append(torch.autograd.grad(weight.sum(), start)[0])
    torch.testing.assert_close(ends[0], ends[1])


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("name", PAIRS)
def test_a_grad_scaler_skips_and_unscales(name: str, fused: bool | None) -> None:
    ends = []
    for kind in PAIRS[name]:
        torch.manual_seed(8)
        layer = nn.Linear(17, 3)
        # Fused steps of torch take gradients of one layout alone.
        optimizer = kind(layer.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for at in range(5):
            optimizer.zero_grad()
            loss = layer(torch.randn(4, 17)).square().sum() * (torch.inf if at in (0, 2) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        gradient = layer.weight.grad
        assert gradient is not None
        ends.append((layer.weight.detach(), layer.bias.detach(), gradient, torch.tensor(scaler.get_scale())))
    assert ends[0][0].isfinite().all()
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


def test_parameters_that_share_memory_step_in_turn() -> None:
    memory = torch.randn(40_000)
    ends = []
    for kind in PAIRS["SGD"]:
        whole = memory.clone()
        both = [nn.Parameter(whole[:30_000]), nn.Parameter(whole[10_000:])]
        optimizer = kind(both, lr=0.1, momentum=0.9, weight_decay=0.5)
        threads = torch.get_num_threads()
        torch.set_num_threads(4)
        try:
            for _ in range(3):
                for parameter in both:
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
        finally:
            torch.set_num_threads(threads)
        ends.append(whole)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-6)


@tiers.ALL
def test_a_compiled_step_is_torchs(counted: list[int]) -> None:
    ends = []
    for kind in PAIRS["AdamW"]:
        torch.manual_seed(9)
        optimizer = kind(parameters(torch.randn(12)), lr=0.1)
        steps(optimizer, [[torch.ones(12)]])
        torch.compile(optimizer.step, backend="eager")()  # type: ignore[no-untyped-call]
        ends.append(optimizer.param_groups[0]["params"][0].detach())
    torch._dynamo.reset()
    assert counted == [1]
    torch.testing.assert_close(ends[0], ends[1])


def test_wrong_addresses_and_counts_raise() -> None:
    value = torch.zeros(4)
    at = value.data_ptr()
    with pytest.raises(ValueError, match="null pointer"):
        _C.sgd([at], [0], [], [], [4], lr=0.1)
    with pytest.raises(ValueError, match="grads has 0 entries, not 1"):
        _C.sgd([at], [], [], [], [4], lr=0.1)
    with pytest.raises(ValueError, match="roots has 0 entries, not 1"):
        _C.adam([at], [at], [at], [at], [], [at], [4], [0.1], [], beta1=0.9, beta2=0.9, eps=1e-8)
    with pytest.raises(ValueError, match="threads is 0"):
        _C.sgd([at], [at], [], [], [4], lr=0.1, threads=0)


def test_copies_are_of_its_class() -> None:
    optimizer = qsync_fx.optim.AdamW(parameters(torch.ones(3)))
    steps(optimizer, [[torch.ones(3)]])
    again = copy.deepcopy(optimizer)
    steps(optimizer, [[torch.ones(3)]])
    steps(again, [[torch.ones(3)]])
    assert torch.equal(optimizer.param_groups[0]["params"][0], again.param_groups[0]["params"][0])
