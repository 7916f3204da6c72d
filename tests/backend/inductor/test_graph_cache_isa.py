"""Graphs in torch's disk cache are reused only with the same integer units: instruction sets and
CPUs may share a cache.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from qsync_fx.backend.inductor import inductor_config
from qsync_fx.backend.operators.gemm import dispatch
from tests.support import tiers


def test_each_set_of_units_has_a_distinct_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    tags: dict[str, set[str]] = {"cpu": set(), "cuda": set()}
    for native, exact in itertools.product((True, False), repeat=2):
        monkeypatch.setattr(
            inductor_config, "native_integer_products", lambda native=native: native
        )
        monkeypatch.setattr(inductor_config, "cpu_multiplies_integers", lambda exact=exact: exact)
        for device, device_tags in tags.items():
            with inductor_config.tracing(torch.device(device), ""):
                device_tags.add(torch.compiler.config.cache_key_tag)
    assert (len(tags["cpu"]), len(tags["cuda"])) == (4, 1)


@tiers.ALL
def test_kernel_for_a_unit_is_not_reused_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression test: a step with the cached "scalar" kernel ran in 500 ms instead of 50."""
    lookups = []
    with fresh_cache():
        for unit in (True, True, False, True):
            for module in (inductor_config, dispatch):
                monkeypatch.setattr(module, "native_integer_products", lambda unit=unit: unit)
            torch._dynamo.reset()
            counters.clear()
            run: Any = torch.compile(
                nn.Linear(32, 16), backend="qsync", options={"precision": "int8"}, dynamic=False
            )
            run(torch.randn(8, 32)).sum().backward()
            lookups.append("hit" if counters["aot_autograd"]["autograd_cache_hit"] else "miss")
    assert lookups == ["miss", "hit", "miss", "hit"]
