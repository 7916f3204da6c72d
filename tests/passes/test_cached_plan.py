"""Cached plans: the default of a model without plan or precision if the cache has a profile of it,
and the profiles that do not match.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import qsync_fx
from qsync_fx import OptionError, PlanWarning, Profile, ProfileError
from qsync_fx.backend.operators.gemm import cpu_kernels
from qsync_fx.devices.cpu_features import native_bf16_unit
from qsync_fx.passes.cached_plan import CACHED_PLAN_FILE, CachedPlan
from tests.support import tiers
from tests.support.planning.measured_layer import Counted, layer, quick

pytestmark = pytest.mark.skipif(
    not native_bf16_unit(), reason="cached plans replace BF16, which is not the default here"
)

PLANNED = {"first/linear": "fp32", "second/linear": "int8"}


class Pair(nn.Module):
    """Two layers that run library kernels."""

    def __init__(self, width: int = 16, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, width, bias=False), nn.Linear(width, 8, bias=False)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        output: Tensor = self.second(x)
        return output


@functools.cache
def profile(breaks: bool = False) -> Profile:
    torch.manual_seed(0)
    batch = torch.randn(4, 16), torch.randn(4, 8)
    settings = {"repeats": 1, "progress": False, "sensitivity": "second_order"}
    return qsync_fx.measure(Pair(breaks=breaks), Counted(), [batch], ["fp32", "bf16"], **settings)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("QSYNC_CACHED_PLAN", "1")
    # The small layers get the default of large ones.
    monkeypatch.setitem(cpu_kernels.ENOUGH_WORK, 16, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        yield tmp_path


def keep(measured: Profile, **changes: Any) -> Path:
    """Store a profile in the cache, with a plan that no search returns."""
    file = qsync_fx.cache_plan(measured).with_suffix(".plan.json")
    CACHED_PLAN_FILE.write(
        file,
        CACHED_PLAN_FILE.encode(replace(CACHED_PLAN_FILE.load(file), operators=PLANNED, **changes)),
    )
    return file


def trained(model: nn.Module, size: int = 4, **options: Any) -> Any:
    fast = torch.compile(
        model, backend="qsync", options={"inner_backend": "eager", **options}, dynamic=None
    )
    step(fast, size)
    return fast


def step(fast: Any, size: int = 4) -> None:
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.0)
    fast(torch.randn(size, 16)).square().mean().backward()
    optimizer.step()


def formats(model: nn.Module) -> dict[str, str]:
    return {
        str(ran.id): str(ran.precision)
        for ran in qsync_fx.plan_coverage(model).operators
        if ran.kind == "adjustable"
    }


DEFAULT = dict.fromkeys(PLANNED, "bf16")


def under_inductor(measured: Profile) -> Profile:
    """Return the profile as if measured with inner_backend="eager", for fast tests."""
    assert measured.fingerprint is not None
    return replace(
        measured, fingerprint=replace(measured.fingerprint, options="inner_backend=eager")
    )


class Said(logging.Handler):
    """Context manager that records the messages of the package's logger."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("qsync_fx").addHandler(self)
        return self.messages

    def __exit__(self, *_: object) -> None:
        logging.getLogger("qsync_fx").removeHandler(self)


def test_cached_plan_is_active_and_reported(cache: Path) -> None:
    assert formats(trained(Pair())) == DEFAULT, (
        "the default precision applies without a cached plan"
    )
    torch._dynamo.reset()
    file = keep(under_inductor(profile()))
    assert file.is_relative_to(cache / "profiles") and Profile.load(
        file.with_name(file.name.replace(".plan", ""))
    )
    with Said() as messages:
        fast = trained(Pair())
        step(fast, 3)
    (message,) = messages
    assert (
        "no plan was requested" in message
        and "the variance of bf16" in message
        and str(file) in message
    )
    assert formats(fast) == PLANNED
    coverage = qsync_fx.plan_coverage(fast)
    assert (
        coverage.complete
        and coverage.unasked[0] in str(coverage)
        and coverage.unasked[0] in message
    )
    assert {ran.reason for ran in coverage.operators if ran.kind == "adjustable"} == {
        "plan of a cached profile"
    }
    explanation = qsync_fx.explain(Pair(), torch.randn(4, 16), options={"inner_backend": "eager"})
    assert {str(op.id): str(op.precision) for op in explanation.operators} == PLANNED


def test_cached_plan_is_the_fastest_within_bf16_variance() -> None:
    path = qsync_fx.cache_plan(profile())
    cached = CACHED_PLAN_FILE.load(path.with_suffix(".plan.json"))
    answer = qsync_fx.find_plan(profile(), objective="fastest", budget="bf16")
    assert (
        isinstance(cached, CachedPlan)
        and cached.operators == answer.plans["cpu"]
        and cached.within == "bf16"
    )
    assert cached.seconds == answer.evaluation.seconds <= cached.uniform_seconds
    assert Profile.load(path) == profile()
    assert Profile.load(path).fingerprint == profile().fingerprint is not None


@tiers.ALL
def test_by_inductor_as_it_was_measured() -> None:
    keep(profile())
    fast = torch.compile(Pair(), backend="qsync")
    step(fast)
    assert formats(fast) == PLANNED


def test_the_last_batch_of_an_epoch_and_evaluation_go_on_under_the_plan() -> None:
    keep(under_inductor(profile()))
    fast = trained(Pair())
    step(fast, 3)
    step(fast, 4)
    assert formats(fast) == PLANNED
    with torch.no_grad():
        fast.eval()(torch.randn(5, 16))
    assert formats(fast) == PLANNED


def test_evaluation_does_not_select_a_cached_plan() -> None:
    keep(under_inductor(profile()))
    model = Pair().eval()
    fast = torch.compile(model, backend="qsync", options={"inner_backend": "eager"})
    with torch.no_grad():
        fast(torch.randn(5, 16))
    assert formats(fast) == DEFAULT
    fast.train()
    step(fast)
    assert set(formats(fast).items()) >= set(PLANNED.items())


@pytest.mark.parametrize(
    ("model", "size", "changes", "why"),
    [
        (Pair, 6, {}, "another batch size: the output of first/linear is 4x16, here 6x16"),
        (functools.partial(Pair, 32), 4, {}, "tensors of other sizes or dtypes"),
        (Pair, 4, {"torch": "2.0.0"}, "another machine: torch 2.0.0, here"),
        (Pair, 4, {"threads": 64}, "another machine: threads 64, here"),
    ],
)
def test_stale_profile_is_ignored_and_reported_once(
    model: Any, size: int, changes: dict[str, Any], why: str
) -> None:
    keep(under_inductor(profile()), machine=replace(profile().machine, **changes))
    made = model()
    with pytest.warns(
        PlanWarning, match=f"(?s)a profile of Pair is in the cache, but.*{why}.*cached_plan=False"
    ):
        fast = trained(made, size)
    assert formats(fast) == DEFAULT and not qsync_fx.plan_coverage(fast).unasked
    step(fast, size + 1)


def test_other_options_make_other_times() -> None:
    keep(profile())
    with pytest.warns(PlanWarning, match="other options: none, here inner_backend=eager"):
        assert formats(trained(Pair())) == DEFAULT


def test_matching_profile_is_selected() -> None:
    matching = under_inductor(profile())
    keep(matching)
    stale = keep(
        replace(matching, model=replace(matching.model, digest="0" * 16)),
        machine=replace(matching.machine, torch="2.0"),
    )
    assert stale.parent == keep(matching).parent and len(list(stale.parent.iterdir())) == 4
    assert formats(trained(Pair())) == PLANNED


def test_explicit_options_override_the_cached_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(under_inductor(profile()))
    assert formats(trained(Pair(), cached_plan=False)) == DEFAULT
    assert formats(trained(Pair(), precision="fp32")) == dict.fromkeys(PLANNED, "fp32")
    torch._dynamo.reset()
    fast = torch.compile(Pair(), backend="qsync", options={"inner_backend": "eager"})
    with torch.autocast("cpu", torch.bfloat16):
        step(fast)
    assert formats(fast) == DEFAULT
    torch._dynamo.reset()
    monkeypatch.setenv("QSYNC_CACHED_PLAN", "0")
    assert formats(trained(Pair())) == DEFAULT
    with pytest.raises(OptionError, match="cached_plan"):
        torch.compile(Pair(), backend="qsync", options={"cached_plan": "no"})


def test_profile_of_other_operators_is_ignored() -> None:
    keep(under_inductor(profile()))
    fast = trained(nn.Sequential(Pair()))
    assert set(formats(fast).values()) == {"bf16"}


def test_a_file_that_is_none_is_no_matter() -> None:
    keep(under_inductor(profile())).write_text("{")
    assert formats(trained(Pair())) == DEFAULT


@tiers.ALL
def test_each_graph_of_a_model_gets_its_part() -> None:
    keep(under_inductor(profile(breaks=True)))
    fast = trained(Pair(breaks=True))
    assert formats(fast) == PLANNED and qsync_fx.plan_coverage(fast).complete


@tiers.ALL
@pytest.mark.parametrize("outside", [True, False])
def test_data_parallel_model_is_identified_by_its_module(tmp_path: Path, outside: bool) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    try:
        keep(under_inductor(profile()))
        model = Pair()
        fast = (
            trained(DistributedDataParallel(model))
            if outside
            else DistributedDataParallel(trained(model))
        )
        step(fast)
        assert formats(model) == PLANNED
    finally:
        distributed.destroy_process_group()


def test_uncacheable_profile_is_an_error(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    with pytest.raises(ProfileError, match="no profile contains how much"):
        qsync_fx.cache_plan(quick(layer(), Counted(), repeats=1))
    with pytest.raises(ProfileError, match="another machine"):
        qsync_fx.cache_plan(
            replace(profile(), machine=replace(profile().machine, name="elsewhere"))
        )
    with pytest.raises(ProfileError, match="no fingerprint of its model"):
        qsync_fx.cache_plan(replace(profile(), fingerprint=None))
    (cache / "file").write_text("")
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(cache / "file"))
    with pytest.raises(ProfileError, match=r"is not saved[\s\S]*QSYNC_CACHE_DIR"):
        qsync_fx.cache_plan(profile())
