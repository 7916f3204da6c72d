"""Modules outside of compiled graphs: `plan_coverage` gives the reason and a remedy, and a training
step warns.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx import PlanError
from qsync_fx.devices.cpu_features import native_bf16_unit
from tests.support.compiling.applied_steps import (
    Mode,
    Outer,
    Plain,
    Scaled,
    compiled,
    step,
    uncovered,
)

torch.set_num_threads(1)

BREAKS_AT_RNNS = torch.__version__ >= (2, 15)
"""Whether Dynamo breaks the graph at an RNN. Older versions do not compile the calling function."""


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def test_a_dispatch_mode() -> None:
    model = Plain()

    def call() -> Tensor:
        with Mode():
            return compiled(model, precision="bf16")(torch.randn(4, 16))

    (message,) = step(model, call)
    assert message.startswith(
        "the plan is not applied: no compiled graph contains 2 modules of Plain"
    )
    # torch 2.11 reports each module separately.
    assert re.search(r"first \(Linear\)(, second \(Linear\))?: it is called under a Torch", message)
    assert "second (Linear)" in message
    assert "Plain.forward" in message
    assert "call the model outside of the mode" in message
    assert uncovered(model) == {"first": "mode", "second": "mode"}


@pytest.mark.parametrize("rnn", [nn.LSTM, nn.GRU, nn.RNN])
def test_rnns(rnn: Callable[..., nn.Module]) -> None:
    model = Outer(rnn(16, 4, batch_first=True))
    warned = step(model, lambda: compiled(model, precision="bf16")(torch.randn(2, 3, 16)))
    if BREAKS_AT_RNNS:
        assert warned == []
        assert uncovered(model) == {"inner": "break"}
        return
    (message,) = warned
    assert (
        "start (Linear), end (Linear): Dynamo does not compile a function that calls an RNN "
        "(Outer.forward" in message
    )
    assert "allow_rnn" in message
    assert uncovered(model) == {"start": "rnn", "inner": "rnn", "end": "rnn"}

    class Apart(Outer):
        """Model with the remedy that the warning names."""

        @torch.compiler.disable
        def recurrent(self, x: Tensor) -> Tensor:
            return self.inner(x)[0]

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.recurrent(self.start(x)))

    apart = Apart(rnn(16, 4, batch_first=True))
    assert step(apart, lambda: compiled(apart, precision="bf16")(torch.randn(2, 3, 16))) == []
    assert uncovered(apart) == {"inner": "disabled"}


def test_a_full_backward_hook() -> None:
    model = Plain()
    model.first.register_full_backward_hook(lambda *_: None)
    (message,) = step(model, lambda: compiled(model, precision="bf16")(torch.randn(4, 16)))
    assert "no compiled graph contains 1 module of Plain" in message
    assert "first (Linear): it has a full backward hook" in message
    assert "compiled_autograd" in message
    assert uncovered(model) == {"first": "backward hook"}


def test_disabled() -> None:
    inner = Plain()
    inner.forward = torch.compiler.disable(inner.forward)  # type: ignore[method-assign]
    model = Outer(inner)
    (message,) = step(model, lambda: compiled(model, precision="bf16")(torch.randn(4, 16)))
    assert (
        "inner.first (Linear), inner.second (Linear): torch.compiler.disable applies to it"
        in message
    )
    assert uncovered(model) == {"inner.first": "disabled", "inner.second": "disabled"}

    class Whole(Plain):
        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    disabled_model = Whole()
    (message,) = step(
        disabled_model, lambda: compiled(disabled_model, precision="bf16")(torch.randn(4, 16))
    )
    assert "Whole.forward" in message
    assert uncovered(disabled_model) == {"first": "disabled", "second": "disabled"}


def test_a_forward_that_dynamo_gives_up_on() -> None:
    class Class(Plain):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(1):

                class Result(tuple):
                    pass

                x = self.first(x)
            return Result((self.second(x),))[0]

    model = Class()
    (message,) = step(model, lambda: compiled(model, precision="bf16")(torch.randn(4, 16)))
    # Dynamo's reason: "Invalid call to __build_class__"; before torch 2.13 another one.
    assert re.search(
        r"Dynamo did not compile the function that calls it: \w.* \(.*forward", message
    )
    assert uncovered(model) == {"first": "skipped", "second": "skipped"}


def test_each_reason_lists_its_modules() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.first, self.second = nn.Linear(16, 16), Plain(), nn.Linear(4, 4)
            self.first.forward = torch.compiler.disable(self.first.forward)  # type: ignore[method-assign]
            self.second.register_full_backward_hook(lambda *_: None)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(self.start(x)))

    model = Two()
    step(model, lambda: compiled(model, precision="bf16")(torch.randn(4, 16)))
    assert uncovered(model) == {
        "first.first": "disabled",
        "first.second": "disabled",
        "second": "backward hook",
    }


def test_the_limit_of_versions() -> None:
    model = Scaled()
    fast = compiled(model, precision="bf16")
    with torch._dynamo.config.patch(recompile_limit=2):
        fast(torch.randn(4, 16))
        model.scale = 2
        with pytest.warns(UserWarning, match="this is version 2"):
            fast(torch.randn(4, 16))
        assert uncovered(model) == {}
        model.scale = 3
        with pytest.raises(PlanError, match="recompile_limit"):
            fast(torch.randn(4, 16))
    assert uncovered(model) == {"layer": "limit"}
    assert qsync_fx.plan_coverage(model).operators, "versions compiled before the limit still run"


@pytest.mark.parametrize(
    ("root", "named"), [(None, "Linear.forward"), ("body", "Linear.forward of body (Linear)")]
)
def test_the_limit_names_the_module_where_torch_puts_a_function_around_it(
    root: str | None, named: str
) -> None:
    layer = nn.Linear(16, 16)
    fast = compiled(layer, precision="bf16", **({} if root is None else {"root": root}))
    with torch._dynamo.config.patch(recompile_limit=1, automatic_dynamic_shapes=False):
        with pytest.warns(UserWarning, match=r"version 1 of Linear\.forward"):
            fast(torch.randn(4, 16))
        with pytest.raises(PlanError, match="recompile_limit") as raised:
            fast(torch.randn(5, 16))
    assert f"for {named} and makes no more" in raised.value.what
    assert raised.value.where is not None and raised.value.where.startswith(f"{named}, ")
    assert "external_utils" not in str(raised.value) and "wrap_inline" not in str(raised.value)


def test_dynamo_switched_off() -> None:
    model = Plain()
    fast = compiled(model, precision="bf16")
    with torch.compiler.set_stance("force_eager"):
        (message,) = step(model, lambda: fast(torch.randn(4, 16)))
    assert "Dynamo has processed no call of the model" in message
    assert "set_stance" in message


# Without a plan.


class Sparse(Plain):
    """Layer of a graph network, which Dynamo does not compile."""

    def forward(self, x: Tensor, adjacency: Tensor | None = None) -> Tensor:
        assert adjacency is not None
        return self.second(torch.sparse.mm(adjacency, torch.relu(self.first(x))))


class Mixing(Plain):
    """Layer with the remedy that the reason names."""

    adjacency = torch.eye(4).to_sparse()

    @torch.compiler.disable
    def mixed(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.adjacency, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.mixed(torch.relu(self.first(x))))


def test_a_sparse_tensor() -> None:
    model, x, adjacency = Sparse(), torch.randn(4, 16), torch.eye(4).to_sparse()
    (message,) = step(model, lambda: compiled(model, precision="bf16")(x, adjacency))
    assert (
        "first (Linear), second (Linear): Dynamo does not compile a function with a sparse tensor "
        "as argument" in message
    )
    assert "with @torch.compiler.disable" in message
    assert "fullgraph" not in message
    assert uncovered(model) == {"first": "sparse", "second": "sparse"}
    apart = Mixing()
    assert step(apart, lambda: compiled(apart, precision="bf16")(x)) == []
    assert uncovered(apart) == {}


@pytest.mark.parametrize("kind", ["sparse", "rnn", "hook"])
def test_no_warning_without_a_plan(kind: str) -> None:
    x: tuple[Tensor, ...] = (torch.randn(4, 16),)
    model: nn.Module = Plain()
    if kind == "sparse":
        model, x = Sparse(), (*x, torch.eye(4).to_sparse())
    elif kind == "rnn":
        model, x = Outer(nn.LSTM(16, 4, batch_first=True)), (torch.randn(2, 3, 16),)
    else:
        model.first.register_full_backward_hook(lambda *_: None)  # type: ignore[operator,union-attr]
    assert step(model, lambda: compiled(model)(*x)) == []
    coverage = qsync_fx.plan_coverage(model)
    assert coverage.uncovered and not any(module.lost for module in coverage.uncovered)
    text = str(coverage)
    assert "in no graph" in text and "to do: " in text
    assert "as written (not" not in text and "all that is planned is applied" not in text
    assert text.endswith("no plan or precision is given: modules in no graph run as written")


@pytest.mark.skipif(BREAKS_AT_RNNS, reason="this torch compiles all planned operators")
@pytest.mark.skipif(not native_bf16_unit(), reason="the default format is FP32, no plan")
def test_with_strict_the_default_format_is_a_plan() -> None:
    model = Outer(nn.LSTM(16, 4, batch_first=True))
    with pytest.raises(PlanError, match="no compiled graph contains"):
        step(model, lambda: compiled(model, strict=True)(torch.randn(2, 3, 16)))
