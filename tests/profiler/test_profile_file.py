"""Profile files: round trips, and errors for invalid files and for other models and machines."""

from __future__ import annotations

import functools
import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qsync_fx
from qsync_fx.devices.machine import this_machine
from qsync_fx.errors import ProfileError
from qsync_fx.predictor.cost_mapper import CostMapper, states
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
from qsync_fx.predictor.memory import SGD, LossMemory, TrainingMemory, peak_bytes
from qsync_fx.predictor.model.model_file import StoredGraph, stored
from qsync_fx.predictor.replayer.cluster import Exchange
from qsync_fx.profiler.model_graph_builder import build_model_graph
from qsync_fx.profiler.profile import PROFILE, CodecSpeed, Collective, Model, Profile
from qsync_fx.profiler.run_statistics import MeasuredOperator, MeasuredRun, Quantized
from tests.support.planning.peaks import most_bytes


@functools.cache
def stored_graph() -> StoredGraph:
    model = nn.Sequential(OrderedDict(fc=nn.Linear(64, 32), relu=nn.ReLU()))
    return stored(build_model_graph(qsync_fx.explain(model, torch.randn(8, 64)), ["fp32", "bf16"]))


def taken() -> Profile:
    runs = [
        MeasuredRun(
            name,
            steps=[(0.011 * scale, 0.019 * scale, 0.004)] * 3,
            peak_bytes=4096,
            operators=[
                MeasuredOperator("fc/linear", name, name, 0.008 * scale, 0.015 * scale),
                MeasuredOperator("relu/relu", name, name, 0.002 * scale, 0.002 * scale),
            ],
            quantized=[Quantized("fc/linear", name, "int8", 4096, False, 1e-5)],
        )
        for name, scale in (("fp32", 1.0), ("bf16", 0.5))
    ]
    return Profile(
        this_machine(),
        Model("Net", "0123456789abcdef", 2080),
        stored_graph(),
        ["fp32", "bf16"],
        runs,
        optimizer="AdamW",
        collectives=[
            Collective(
                "gloo",
                2,
                [(1024, 1e-4), (1048576, 2e-3)],
                0.9,
                copies=1e-10,
                buffers=8e-4,
                exchanges=[
                    Exchange("point_to_point", "all", 2, [(1024.0, 2e-4), (16777216.0, 3e-2)]),
                    Exchange("collective", "all", 2, [(1024.0, 3e-4), (16777216.0, 2e-2)]),
                ],
            )
        ],
        sensitivity=Sensitivity("second_order", "Net", {"fc/linear": {"bf16": 0.125}}, steps=50),
        codecs=[CodecSpeed("qsgd8", 11e9, 19e9), CodecSpeed("fp32", 10e9, 12e9)],
        loss_memory=LossMemory(held=1024, most=4096),
    )


def test_profile_is_saved_and_loaded(tmp_path: Path) -> None:
    profile = taken()
    profile.save(tmp_path / "net.json")
    assert Profile.load(tmp_path / "net.json") == profile


def test_notebook_representation_has_one_line() -> None:
    text = repr(taken())
    assert (
        text.startswith("Profile(Net of ")
        and "operators, " in text
        and text.endswith(" ms in fp32)")
    )
    assert len(text) < 150 and "\n" not in text


def test_file_without_loss_memory_is_loaded_as_unknown(
    tmp_path: Path,
) -> None:
    tree: Any = PROFILE.plain(taken())
    del tree["loss_memory"]
    (tmp_path / "net.json").write_text(json.dumps(tree))
    profile = Profile.load(tmp_path / "net.json")
    assert profile == replace(taken(), loss_memory=None)
    assert "memory of the loss: not known" in str(profile) and "not known" not in str(taken())


def test_file_without_copies_and_buffers_is_loaded_as_unknown(
    tmp_path: Path,
) -> None:
    tree: Any = PROFILE.plain(taken())
    for name in ("slowdown", "copies", "buffers"):
        del tree["collectives"][0][name]
    (tmp_path / "net.json").write_text(json.dumps(tree))
    (collective,) = Profile.load(tmp_path / "net.json").collectives
    assert (collective.slowdown, collective.copies, collective.buffers) == (1.0, None, 0.0)


def test_profile_contains_communication_times() -> None:
    text = str(taken())
    assert (
        "delays computation by 90% of that; copies into and out of buckets at 10GB/s; "
        "buffers in 0.8 ms" in text
    )
    kinds = [
        (line, "all ranks, 2 ranks each: 16.8MB in" in line)
        for line in text.splitlines()
        if line.startswith("exchange of coded gradients by ")
    ]
    assert len(kinds) == 2 and all(sized for _, sized in kinds), text


@pytest.mark.parametrize("loss", [None, LossMemory(), LossMemory(held=100_000, most=500_000)])
def test_peaks_use_the_loss_memory_of_the_profile(
    loss: LossMemory | None,
) -> None:
    profile = replace(taken(), optimizer_memory=SGD, loss_memory=loss)
    plan = qsync_fx.Plan.uniform("fp32")
    (peak,) = qsync_fx.replay(plan, profile).peak_bytes.values()
    assert peak == peak_bytes(states(profile.graph, plan), TrainingMemory(SGD, loss=loss))
    chosen = qsync_fx.find_plan(profile, objective="fastest", budget=1e9, memory=1e9)
    (figures,) = chosen.evaluation.classes.values()
    (selected,) = chosen.plans.values()
    assert figures.peak_bytes == most_bytes(
        states(profile.graph, selected), TrainingMemory(SGD, loss=loss)
    )


def test_a_loaded_profile_is_replayed_without_the_model(tmp_path: Path) -> None:
    taken().save(tmp_path / "net.json")
    profile = Profile.load(tmp_path / "net.json")
    mapper = CostMapper(profile.graph, profile.times(), qsync_fx.Plan.uniform("bf16"))
    operators, outside, optimizer = 0.0135, (0.00099 + 0.002 + 0.00049 + 0.001) / 2, 0.004
    assert mapper.seconds == pytest.approx(operators + outside + optimizer)
    timeline = qsync_fx.replay(qsync_fx.Plan.uniform("fp32"), profile)
    assert timeline.seconds > mapper.seconds


def test_unmeasured_states_are_reported() -> None:
    profile = taken()
    assert profile.interpolated(qsync_fx.Plan.uniform("bf16")) == []
    narrow = replace(profile, runs=profile.runs[1:])
    assert narrow.interpolated(qsync_fx.Plan.uniform("bf16")) == []
    assert narrow.interpolated(qsync_fx.Plan.uniform("fp32")) == ["fc/linear", "relu/relu"]


def changed(tmp_path: Path, *keys: str | int, to: Any) -> Path:
    """Write a profile whose value at a path of keys is replaced."""
    tree: Any = PROFILE.plain(taken())
    part = tree
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = to
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(tree))
    return path


@pytest.mark.parametrize(
    ("keys", "to", "message"),
    [
        (("runs", 0, "operators", 1, "forward"), -1e-3, "forward -0.001"),
        (("runs", 1, "steps", 2, 1), float("nan"), "the number nan"),
        (("runs", 1, "steps", 0), [0.1, -0.1, 0.0], "-0.1"),
        (("runs", 1, "steps"), [], "no step"),
        (("runs", 0, "quantized", 0, "seconds"), float("inf"), "the number inf"),
        (("collectives", 0, "seconds"), [[1024, -1e-4]], "seconds"),
        (("collectives", 0, "busy"), -0.5, "busy -0.5"),
        (("collectives", 0, "exchanges", 0, "seconds"), [[1.0, 0.0]], "that is not above 0"),
        (("collectives", 0, "exchanges", 0, "group"), "some", "'all' or 'inside' or 'between'"),
        (("collectives", 0, "exchanges", 1, "ranks"), 1, "fewer than 2 ranks"),
        (("collectives", 0, "slowdown"), 0.0, "slowdown 0"),
        (("collectives", 0, "copies"), -1e-10, "copies -1e-10"),
        (("collectives", 0, "buffers"), float("inf"), "the number inf"),
        (("runs",), [], "no run"),
        (("runs", 1, "operators"), [], "other operators"),
        (("runs", 0, "peak_bytes"), -1, "peak_bytes -1"),
        (("loss_memory", "held"), -1, "held -1"),
        (("loss_memory", "most"), -1, "most -1"),
        (("loss_memory", "held"), 0.5, "held"),
        (("loss_memory", "most"), float("inf"), "the number inf"),
        (("loss_memory",), [1, 2], "loss_memory"),
        (("stored", "operators", 0, "id"), "other/linear", "another model"),
        (("stored", "operators", 0, "reads", 0, "value"), 99, "99"),
        (("surprise",), 1, "surprise"),
        (("version",), 99, "version 99"),
    ],
)
def test_invalid_number_is_rejected_by_name(
    tmp_path: Path, keys: tuple[str | int, ...], to: Any, message: str
) -> None:
    path = changed(tmp_path, *keys, to=to)
    with pytest.raises(ProfileError, match=message) as caught:
        Profile.load(path)
    assert str(path) in str(caught.value) and caught.value.do


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    taken().save(path)
    text = path.read_text()
    for end in (0, 1, len(text) // 2, len(text) - 3):
        path.write_text(text[:end])
        with pytest.raises(ProfileError, match=r"empty|is truncated"):
            Profile.load(path)


def test_profile_of_another_machine_is_rejected_by_default(tmp_path: Path) -> None:
    elsewhere = replace(this_machine(), name="a faster one", threads=64)
    profile = replace(taken(), machine=elsewhere)
    profile.save(tmp_path / "elsewhere.json")
    with pytest.raises(ProfileError, match="threads 64") as caught:
        Profile.load(tmp_path / "elsewhere.json")
    assert "a faster one" in caught.value.what and "any_machine" in (caught.value.do or "")
    assert Profile.load(tmp_path / "elsewhere.json", any_machine=True) == profile


def test_table_shows_the_gain_of_narrow_formats() -> None:
    text = str(taken())
    linear = next(line for line in text.splitlines() if "fc/linear" in line).split()
    # A linear layer saves a copy of its input in BF16; in FP32, the input is live anyway.
    assert linear == ["fc/linear", "76.7%", "23", "-", "11.5", "1.02KB", "0.12", "11.5"]
    assert text.index("fc/linear") < text.index("relu/relu"), "the most expensive operator is first"
    assert "optimizer AdamW: 4 ms" in text and "gloo, 2 ranks" in text
