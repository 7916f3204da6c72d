"""The option "cache_quantized_weights": one quantization of a weight per step, bits equal to a step
without the option, and detection of every write.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qsync_fx
from qsync_fx.backend.weight_cache import CopySpec
from tests.support import tiers
from tests.support.computing.weight_writes import COUNTED, UNCOUNTED, Write

INNERS = [
    "aot_eager",
    pytest.param("inductor", marks=tiers.ALL),
    pytest.param("eager", marks=tiers.ALL),
]
NEAREST = {"precision": "int8", "rounding": "nearest"}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Yield the list of weights that are quantized outside of graphs."""
    weights: list[Tensor] = []
    quantize = CopySpec.of

    def watched(self: CopySpec, weight: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        weights.append(weight)
        return quantize(self, weight, seed)

    monkeypatch.setattr(CopySpec, "of", watched)
    yield weights
    torch.compiler.reset()


class Net(nn.Module):
    """Convolution, linear layers, one of them used twice, and a product with a parameter of the
    model itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up, self.same = (
            nn.Conv2d(3, 8, 3),
            nn.Linear(32, 24),
            nn.Linear(24, 24, bias=False),
        )
        self.out = nn.Parameter(torch.randn(24, 5))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(torch.relu(self.conv(x)).flatten(1)))
        return torch.relu(self.same(torch.relu(self.same(h)))) @ self.out


def trained(
    model: nn.Module,
    options: dict[str, Any],
    batches: list[list[Tensor]],
    optimizer: Any = qsync_fx.optim.SGD,
) -> list[Tensor]:
    """Return outputs and gradients of steps over some micro-batches, and the final weights."""
    torch.compiler.reset()
    torch.manual_seed(1)
    model = copy.deepcopy(model)
    compiled, results = torch.compile(model, backend="qsync", options=options), []
    stepping = optimizer(model.parameters(), lr=0.05)
    for micro_batches in batches:
        stepping.zero_grad()
        for x in micro_batches:
            y = compiled(x)
            y.square().mean().backward()
            results.append(y.detach())
        results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        stepping.step()
    return results + [p.detach() for p in model.parameters()]


def images(count: int, rows: int = 4) -> list[Tensor]:
    return [torch.randn(rows, 3, 4, 4) for _ in range(count)]


def equal(actual: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(actual) == len(wanted) > 0 and all(map(torch.equal, actual, wanted))


@pytest.mark.parametrize(
    ("precision", "scaling", "inner_backend"),
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
def test_steps_have_the_bits_of_steps_without_it(
    precision: str, scaling: str, inner_backend: str, made: list[Tensor]
) -> None:
    """With one pass per step, the same random numbers are used for the same roundings."""
    torch.manual_seed(0)
    model, batches = Net(), [[x] for x in images(3)]
    options = {"precision": precision, "scaling": scaling, "inner_backend": inner_backend}
    expected = trained(model, options, batches)
    assert not made
    actual = trained(model, {**options, "cache_quantized_weights": True}, batches)
    assert equal(actual, expected)
    assert len(made) == 4 * 3


@pytest.mark.parametrize("inner_backend", INNERS)
def test_a_weight_is_quantized_once_a_step_and_not_once_a_micro_batch(
    inner_backend: str, made: list[Tensor]
) -> None:
    """With rounding to nearest all copies are equal, so summed gradients equal those without the
    option.
    """
    torch.manual_seed(0)
    model, batches = Net(), [images(4), images(4), images(4)]
    options = {**NEAREST, "inner_backend": inner_backend}
    assert equal(
        trained(model, {**options, "cache_quantized_weights": True}, batches),
        trained(model, options, batches),
    )
    assert len(made) == 4 * 3


def test_micro_batches_share_a_rounding_and_steps_do_not() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 32, bias=False), torch.eye(64)  # all values are on the INT8 grid
    compiled = torch.compile(
        layer,
        backend="qsync",
        options={
            "precision": "int8",
            "inner_backend": "aot_eager",
            "cache_quantized_weights": True,
        },
    )
    first, second = compiled(x), compiled(x)
    with torch.no_grad():
        layer.weight.mul_(1)
    assert torch.equal(first, second) and not torch.equal(first, compiled(x))


def test_a_seed_repeats_a_run() -> None:
    torch.manual_seed(0)
    model, batches = Net(), [images(2), images(2)]
    options = {"precision": "int8", "inner_backend": "aot_eager", "cache_quantized_weights": True}
    assert equal(trained(model, options, batches), trained(model, options, batches))


def test_weight_copies_of_other_shapes_and_evaluation(
    made: list[Tensor],
) -> None:
    torch.manual_seed(0)
    model = Net()
    compiled = torch.compile(
        model,
        backend="qsync",
        dynamic=False,
        options={
            "precision": "int8",
            "inner_backend": "aot_eager",
            "cache_quantized_weights": True,
        },
    )
    for rows in (4, 6, 4):
        compiled(*images(1, rows)).sum().backward()
    assert len(made) == 4, "graphs share the quantized weights"
    with torch.inference_mode():
        compiled(*images(1))
        compiled(*images(1))
    assert len(made) == 8, "evaluation has its own copies, rounded to nearest"
    compiled(*images(1)).sum().backward()
    assert len(made) == 8, "evaluation preserves the copies of training"


@pytest.mark.parametrize("inner_backend", INNERS)
@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("name", [*COUNTED, *UNCOUNTED])
def test_a_weight_that_was_changed_is_read_as_it_is(
    name: str, evaluated: bool, inner_backend: str, recwarn: pytest.WarningsRecorder
) -> None:
    """A write that torch does not count is detected by a comparison of values, here at the second
    use of a copy.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    layer, x = nn.Linear(24, 12, bias=False), torch.randn(5, 24)
    compiled = torch.compile(
        layer,
        backend="qsync",
        options={**NEAREST, "inner_backend": inner_backend, "cache_quantized_weights": True},
    )
    write: Write = {**COUNTED, **UNCOUNTED}[name]
    with torch.set_grad_enabled(not evaluated):
        before, again = compiled(x).detach().clone(), compiled(x).detach().clone()
        write(layer)
        after = compiled(x)
        assert torch.equal(before, again) and before.any()
        assert torch.equal(after, -before)
        write(layer)
        assert torch.equal(compiled(x), before), (
            "a weight with uncounted writes is quantized in each pass"
        )
    messages = [w for w in recwarn.list if "modified without torch noticing" in str(w.message)]
    assert len(messages) == (name in UNCOUNTED)


def test_around_the_compiled_model_checkpointing_computes_the_same_again(
    made: list[Tensor],
) -> None:
    torch.manual_seed(0)
    model, (x,) = Net(), images(1)
    options = {"precision": "int8", "inner_backend": "aot_eager", "cache_quantized_weights": True}
    results = []
    for around in (False, True):
        torch.compiler.reset()
        compiled = torch.compile(copy.deepcopy(model), backend="qsync", options=options)
        torch.manual_seed(1)
        compiled(x)
        y = checkpoint(compiled, x, use_reentrant=False) if around else compiled(x)
        results.append([y.detach(), *torch.autograd.grad(y.sum(), list(compiled.parameters()))])
    assert equal(*results)


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
        (Checkpointed, "inside.* it is inside a checkpointed region", 1),
        (Writing, "the model itself writes to it", 0),
        (Derived, "it is computed from a parameter", 0),
    ],
)
def test_uncached_weights_are_reported(
    model: type[nn.Module], why: str, count: int, made: list[Tensor]
) -> None:
    torch.manual_seed(0)
    net, x = model(), torch.randn(4, 8)
    options = {**NEAREST, "inner_backend": "aot_eager"}
    expected = torch.compile(copy.deepcopy(net), backend="qsync", options=options)(x)
    compiled = torch.compile(
        net, backend="qsync", options={**options, "cache_quantized_weights": True}
    )
    with pytest.warns(
        qsync_fx.PlanWarning,
        match=f'"cache_quantized_weights", 1 weights of .* are still quantized .*{why}',
    ):
        actual = compiled(x)
    assert torch.equal(actual, expected) and len(made) == count
    actual.sum().backward()


def test_model_without_cacheable_weights_is_reported() -> None:
    options = {"precision": "bf16", "inner_backend": "aot_eager", "cache_quantized_weights": True}
    compiled = torch.compile(nn.Linear(8, 8), backend="qsync", options=options)
    with pytest.warns(
        qsync_fx.PlanWarning,
        match='"cache_quantized_weights" has no effect on .* The option applies to int8 and fp8',
    ):
        compiled(torch.randn(4, 8))
