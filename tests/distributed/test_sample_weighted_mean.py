"""Gradients of ranks with unequal batches: the mean over all samples in every reduction."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import tiers
from tests.support.distributed import unequal_rank
from tests.support.processes import ranks

EXACT = ("plain", "once", "dictionaries", "compiled", "duo", "fsdp")
CODED = ("hook", "codec", "codec of a weighted model", "fsdp with a codec")


def test_gradients_are_the_mean_over_the_samples_of_all_passes(tmp_path: Path) -> None:
    model = unequal_rank.network()
    parts = [data for rank in range(2) for data in unequal_rank.passes(rank)]
    unequal_rank.loss_of(model, torch.cat(parts)).backward()
    exact = torch.tensor(unequal_rank.gradients(model))
    model.zero_grad()
    sum(unequal_rank.loss_of(model, data) / 4 for data in parts).backward()
    unweighted = torch.tensor(unequal_rank.gradients(model))
    first, second = ranks.results(
        "weighted", 2, tmp_path, script="unequal_rank.py", ways=[*EXACT, *CODED]
    )
    assert first == second
    for name in (*EXACT, *CODED):
        error = torch.linalg.vector_norm(torch.tensor(first[name]) - exact) / exact.norm()
        limit = 2e-6 if name in EXACT else 0.02
        assert error < limit, name
    assert (unweighted - exact).norm() / exact.norm() > 0.1


def test_uses_in_which_weights_would_be_wrong_are_refused(tmp_path: Path) -> None:
    first, second = ranks.results("refused", 2, tmp_path, script="unequal_rank.py")
    texts = {
        "second hook": "already has a communication hook",
        "twice": "already averaged over samples",
        "evaluation": "counted no samples of this rank",
        "no samples": "finds no samples in the arguments",
        "several meshes": "not one shard on each rank",
        "outputs": "finds no tensor with a gradient in SimpleNamespace",
    }
    for messages in (first, second):
        assert messages.keys() == texts.keys()
        for name, text in texts.items():
            assert text in messages[name]


@tiers.ALL
@pytest.mark.timeout(450)
def test_ranks_plan_their_batches_and_train_with_them(tmp_path: Path) -> None:
    first, second = ranks.results("planned", 2, tmp_path, script="unequal_rank.py", seconds=400)
    batches = first["batches"]
    assert batches == second["batches"] and sum(batches.values()) == 16
    assert min(batches.values()) >= 2
    # The first step leaves a sample for each rank in the second.
    assert len(first["samples"][0]) + len(second["samples"][0]) == 15
    assert len(first["samples"][0]) <= batches["fast"]
    assert len(second["samples"][0]) <= batches["slow"]
    samples = [index for rank in (first, second) for step in rank["samples"] for index in step]
    assert sorted(samples) == list(range(unequal_rank.SAMPLES))
    assert first["weights"] == second["weights"]
    # Both ranks ran their plans with the planned batches, and later plans have the same batches.
    assert first["trials"] == [2]
    assert first["profiles"] == first["again"] == first["answer"] == batches


@tiers.ALL
@pytest.mark.timeout(600)
def test_ranks_plan_batches_and_codecs_together(tmp_path: Path) -> None:
    first, second = ranks.results("coded_plan", 2, tmp_path, script="unequal_rank.py", seconds=500)
    for name in ("batches", "codecs"):
        assert first[name] == second[name]
    assert sum(first["batches"].values()) == 16 and min(first["batches"].values()) >= 2
    assert set(first["codecs"].values()) == {"qsgd8"} and first["note"] == "fp32 qsgd8"
    for name in ("planned", "unequal"):
        assert first[name] == second[name], "replicas and gradients are bit-identical"
        assert first[name]["checks"] == len(first[name]["errors"]) > 1
        assert max(first[name]["errors"]) < 0.02
    assert min(first["unequal"]["of ranks"]) > 0.05, (
        "gradients are not the unweighted mean over ranks"
    )
