"""Wrapper lines of code from torch's graph caches, compared with lines of compiled code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from qsync_fx.backend.inductor import inductor_config
from qsync_fx.profiler.timing import inductor_lines
from qsync_fx.profiler.timing.inductor_lines import WatchedLowering, watching
from tests.support.planning.measured_layer import BATCH, layer


@pytest.fixture
def caches() -> Iterator[None]:
    with fresh_cache():
        yield


def compiled(files: WatchedLowering) -> dict[str, int]:
    """Train a layer for a step as in a new process; return torch's graph cache counters."""
    torch._dynamo.reset()
    counters.clear()
    run: Any = torch.compile(layer(), backend="qsync", options={"precision": "bf16"}, dynamic=False)
    run(BATCH[0]).sum().backward()
    return {
        name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")
    }


def test_cached_kernels_have_the_lines_of_their_compilation(caches: None) -> None:
    with watching("a layer") as first:
        assert compiled(first) == {"hit": 0, "miss": 2, "bypass": 0}
    with watching("a layer") as second:
        assert compiled(second) == {"hit": 2, "miss": 0, "bypass": 0}
    assert first == second and len(first) == 2 and not second.unknown
    owners = {
        node.owner
        for lines in second.values()
        for kernel in lines.values()
        for node in kernel.nodes
    }
    assert "/linear" in owners


def test_model_with_an_equal_graph_has_separate_operators(caches: None) -> None:
    with watching("a layer") as first:
        compiled(first)
    with watching("another") as second:
        assert compiled(second) == {"hit": 0, "miss": 2, "bypass": 0}
    assert not second.unknown


@pytest.mark.parametrize("damage", ["gone", "torn", "of other code"])
def test_lost_cache_entries_are_recompiled(damage: str, caches: None) -> None:
    with watching("a layer") as first:
        compiled(first)
    for wrapper in first:
        note = inductor_lines._path(wrapper, "a layer")
        if damage == "gone":
            note.unlink()
        elif damage == "torn":
            note.write_text(note.read_text()[:40])
        else:
            note.write_text(note.read_text().replace(inductor_lines._digest(wrapper), "0" * 16))
    with watching("a layer") as second:
        compiled(second)
        assert second.unknown == set(first) and not second
        with second.anew():
            compiled(second)
    assert list(second.values()) == list(first.values()) and not second.unknown


def test_unwritable_cache_stores_no_lines(tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text("pass")
    inductor_lines._path(str(wrapper), "a layer").mkdir()
    inductor_lines.keep(
        str(wrapper), "a layer", {1: inductor_lines.InductorKernel("extern_kernels.mm", True, ())}
    )
    assert inductor_lines.lines_of(str(wrapper), "a layer") is None


def test_unobserved_compilations_are_found_in_caches(
    caches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.13's cache key pickles the decomposition table; if that fails, no graph hits."""
    assert compiled(WatchedLowering())["miss"] == 2
    assert compiled(WatchedLowering()) == {"hit": 2, "miss": 0, "bypass": 0}
    monkeypatch.setattr(inductor_config, "_revision", lambda: "of another version")
    assert compiled(WatchedLowering()) == {"hit": 0, "miss": 2, "bypass": 0}
