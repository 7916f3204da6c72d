"""`qsync_fx.switch_plan` on results of torch.compile: modules, functions, methods, blocks, frames
after a graph break, ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx import OptionError, Plan
from tests.support.compiling.switched import FP32, INT8, NOT_FOLLOWED, compilations
from tests.support.models.small_models import (
    Perceptron,
    assert_equal,
    build,
    compiled,
    gradients,
    relative_error,
)

pytestmark = NOT_FOLLOWED
torch.set_num_threads(1)


def rounds(run: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a compiled model computes in a narrower format than the model itself."""
    x = torch.randn(32, 16)
    with torch.no_grad():
        return not torch.equal(run(x), exact(x))


def test_a_module_that_compiled_itself() -> None:
    model = build(Perceptron)
    exact = copy.deepcopy(model)
    model.compile(backend="qsync", options={"precision": "fp32", "inner_backend": "aot_eager"})
    assert not rounds(model, exact)
    assert qsync_fx.switch_plan(model, INT8) is model
    assert rounds(model, exact)
    qsync_fx.switch_plan(model, FP32)
    assert not rounds(model, exact)


def test_a_function() -> None:
    model = build(Perceptron)

    @torch.compile(backend="qsync", options={"precision": "fp32", "inner_backend": "aot_eager"})
    def run(x: Tensor) -> Tensor:
        return model(x)

    alias = run  # like a variable of a training loop
    assert not rounds(alias, model)
    assert qsync_fx.switch_plan(run, INT8) is run
    assert rounds(alias, model)


def test_a_method_of_a_class() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Perceptron()

        @torch.compile(backend="qsync", options={"precision": "fp32", "inner_backend": "aot_eager"})
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = build(Net)
    assert not rounds(model, model.inner)
    qsync_fx.switch_plan(model, INT8)
    assert rounds(model, model.inner)


def test_separately_compiled_blocks() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Perceptron(), Perceptron()

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + self.second(x)

    model = build(Blocks)
    exact = copy.deepcopy(model)
    model.first.compile(
        backend="qsync", options={"precision": "fp32", "inner_backend": "aot_eager"}
    )
    model.second = compiled(model.second, precision="fp32")
    assert not rounds(model, exact)
    qsync_fx.switch_plan(model, INT8)
    assert rounds(model.first, exact.first)
    assert rounds(model.second, exact.second)


def test_frames_after_a_graph_break() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    model, x = build(Broken), torch.randn(64, 16)
    fast = compiled(model, plan=FP32)
    assert torch.equal(fast(x), model(x))
    plans = [Plan("fp32", patterns=[("second", name)]) for name in ("bf16", "int8", "fp8", "tf32")]
    for plan in plans * 2:
        qsync_fx.switch_plan(fast, plan)
        assert not torch.equal(fast(x), model(x))
    assert compilations(lambda: qsync_fx.switch_plan(fast, FP32)(x)) == 0
    assert torch.equal(fast(x), model(x))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("around", ["ddp of compiled", "compiled of ddp"])
def test_data_parallel(around: str) -> None:
    parallel = nn.parallel.DistributedDataParallel
    options: Any = {"precision": "fp32", "inner_backend": "aot_eager"}
    model, exact, x = build(Perceptron), build(Perceptron), torch.randn(32, 16)
    if around == "ddp of compiled":
        fast = parallel(torch.compile(model, backend="qsync", options=options))
    else:
        fast = torch.compile(parallel(model), backend="qsync", options=options)
    fast(x).square().mean().backward()
    exact(x).square().mean().backward()
    assert_equal(gradients(model), gradients(exact))
    assert qsync_fx.switch_plan(fast, INT8) is fast
    model.zero_grad()
    fast(x).square().mean().backward()
    assert 1e-4 < relative_error(gradients(model), gradients(exact)) < 0.1


def test_unsupported_switch_is_an_error() -> None:
    model = build(Perceptron)
    for other in (model, torch.compile(model, backend="aot_eager"), lambda x: x):
        with pytest.raises(OptionError, match="not compiled with the backend"):
            qsync_fx.switch_plan(other, INT8)
