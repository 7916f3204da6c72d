"""Single-pass optimizers as replacements for torch's: arguments, groups, schedules, hooks, scalers,
copies, compiled steps.
"""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import qsync_fx
from tests.support import tiers
from tests.support.computing.compared_optimizers import PAIRS, assert_alike, parameters, steps
from tests.support.computing.weight_writes import COUNTED, UNCOUNTED

pytest_plugins = ["tests.support.computing.compared_optimizers"]


@pytest.mark.parametrize("name", PAIRS)
def test_arguments_equal_torch(name: str) -> None:
    ours, torchs = PAIRS[name]
    assert issubclass(ours, torchs)
    assert inspect.signature(ours) == inspect.signature(torchs)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        ours(parameters(torch.zeros(1)), lr=-1.0)
    for arguments in ({"foreach": True}, {"fused": True}, {"foreach": False}, {"fused": False}):
        actual, expected = (
            kind(parameters(torch.ones(20)), **arguments) for kind in (ours, torchs)
        )
        assert actual.defaults == expected.defaults
        for optimizer in (actual, expected):
            steps(optimizer, [[torch.ones(20)]] * 2)
        assert_alike(actual, expected, 2)


@pytest.mark.parametrize("name", PAIRS)
def test_learning_rates_may_be_tensors(name: str, counted: list[int]) -> None:
    torch.manual_seed(3)
    start, gradient = torch.randn(40), torch.randn(40)
    actual, expected = (
        kind(parameters(start), lr=torch.tensor(0.1), weight_decay=0.3, foreach=False)
        for kind in PAIRS[name]
    )
    for optimizer in (actual, expected):
        steps(optimizer, [[gradient]])
        optimizer.param_groups[0]["lr"].mul_(0.1)
        steps(optimizer, [[gradient]])
    assert counted == [1, 1]
    assert_alike(actual, expected, 2)


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

        def closure(
            optimizer: Optimizer = optimizer, weight: Tensor = weight, bias: Tensor = bias
        ) -> Tensor:
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


def test_weight_changed_before_backward_is_an_error() -> None:
    """Check that autograd detects the writes of the kernels, which write by address."""
    for kind, _ in PAIRS.values():
        weight = nn.Parameter(torch.randn(8))
        optimizer = kind([weight], lr=0.1)
        loss = weight.square().sum()
        weight.grad = torch.ones(8)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("name", PAIRS)
def test_a_grad_scaler_skips_and_unscales(name: str, fused: bool | None) -> None:
    ends = []
    for kind in PAIRS[name]:
        torch.manual_seed(8)
        layer = nn.Linear(17, 3)
        # Fused steps of torch require gradients of one layout.
        optimizer = kind(layer.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for iteration in range(5):
            optimizer.zero_grad()
            loss = layer(torch.randn(4, 17)).square().sum() * (
                torch.inf if iteration in (0, 2) else 1.0
            )
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        gradient = layer.weight.grad
        assert gradient is not None
        ends.append(
            (layer.weight.detach(), layer.bias.detach(), gradient, torch.tensor(scaler.get_scale()))
        )
    assert ends[0][0].isfinite().all()
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


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


def test_copies_are_of_its_class() -> None:
    optimizer = qsync_fx.optim.AdamW(parameters(torch.ones(3)))
    steps(optimizer, [[torch.ones(3)]])
    copied = copy.deepcopy(optimizer)
    assert type(copied) is type(optimizer)
    steps(optimizer, [[torch.ones(3)]])
    steps(copied, [[torch.ones(3)]])
    assert torch.equal(optimizer.param_groups[0]["params"][0], copied.param_groups[0]["params"][0])


def test_weights_are_cast_where_they_are_read() -> None:
    """Check that no narrow copy outlives its forward pass: it would be stale after a write through
    `.data`, which does not increment the version.
    """
    torch.manual_seed(0)
    model, x = nn.Linear(64, 32), torch.randn(8, 64)
    options = {"precision": "int8", "rounding": "nearest", "inner_backend": "aot_eager"}
    compiled = torch.compile(model, backend="qsync", options=options)
    optimizer = qsync_fx.optim.SGD(model.parameters(), lr=0.1)
    compiled(x).sum().backward()
    optimizer.step()
    before, version = compiled(x), model.weight._version
    model.weight.data.neg_()
    model.bias.data.neg_()
    assert model.weight._version == version
    assert torch.equal(compiled(x), -before), "equal magnitudes have equal scales and roundings"


@pytest.mark.parametrize("inner_backend", ["aot_eager", pytest.param("inductor", marks=tiers.ALL)])
@pytest.mark.parametrize("evaluated", [False, True])
def test_a_weight_that_was_changed_is_read_as_it_is(inner_backend: str, evaluated: bool) -> None:
    """Change the weight after a training step, and between two passes without a step."""
    torch.manual_seed(0)
    layer, x = nn.Linear(24, 12, bias=False), torch.randn(5, 24)
    compiled = torch.compile(
        layer,
        backend="qsync",
        options={"precision": "int8", "rounding": "nearest", "inner_backend": inner_backend},
    )
    for name, write in {**COUNTED, **UNCOUNTED}.items():
        with torch.set_grad_enabled(not evaluated):
            before, again = compiled(x).detach().clone(), compiled(x).detach().clone()
            write(layer)
            after = compiled(x)
        assert torch.equal(before, again) and before.any()
        assert torch.equal(after, -before), f"the weight is stale after {name}"
        if not evaluated:
            (gradient,) = torch.autograd.grad(after, layer.weight, torch.ones_like(after))
            assert torch.isfinite(gradient).all() and gradient.any()


def test_micro_batches_round_weights_for_themselves() -> None:
    """Check that rounding errors of a weight differ between passes without a step in between, so
    that gradients average them out.
    """
    torch.manual_seed(0)
    model, x = nn.Linear(64, 32, bias=False), torch.eye(64)
    options = {"precision": "int8", "inner_backend": "aot_eager"}
    compiled = torch.compile(model, backend="qsync", options=options)
    # INT8 represents the identity matrix exactly, so only the weight differs.
    passes = [compiled(x).detach() for _ in range(65)]
    assert not torch.equal(passes[0], passes[1])
    single_error = (passes[0] - model.weight.detach().t()).square().mean()
    mean_error = (torch.stack(passes[1:]).mean(0) - model.weight.detach().t()).square().mean()
    assert mean_error < single_error / 4, (
        "the mean of 64 roundings has 1/64 of the variance of one, plus the output's small error"
    )
