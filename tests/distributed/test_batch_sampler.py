"""Batch sampler with unequal local batches: each sample once, and the same steps on all ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader

from qsync_fx import ClusterPlan, OptionError, Plan
from qsync_fx.distributed import DistributedBatchSampler
from qsync_fx.distributed.batch_sampler import shares
from tests.support.distributed import unequal_rank
from tests.support.processes import ranks

BATCHES = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def samplers(samples: int, batches: list[int], **settings: Any) -> list[DistributedBatchSampler]:
    return [
        DistributedBatchSampler(range(samples), batches, rank=rank, **settings)
        for rank in range(len(batches))
    ]


@given(
    batches=BATCHES,
    samples=st.integers(0, 200),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_every_sample_has_one_rank_and_every_rank_all_steps(
    batches: list[int], samples: int, shuffle: bool, drop_last: bool, epoch: int
) -> None:
    total, world = sum(batches), len(batches)
    steps = samples // total if drop_last else -(-samples // total)
    if steps == 0 or (not drop_last and samples < steps * world):
        with pytest.raises(OptionError):
            samplers(samples, batches, drop_last=drop_last)
        return
    members = samplers(samples, batches, shuffle=shuffle, drop_last=drop_last)
    for member in members:
        member.set_epoch(epoch)
    rows = [list(member) for member in members]
    assert {len(row) for row in rows} == {len(member) for member in members} == {steps}
    used = list(itertools.chain.from_iterable(itertools.chain.from_iterable(rows)))
    assert len(set(used)) == len(used) == (steps * total if drop_last else samples)
    for step, parts in enumerate(zip(*rows, strict=True)):
        sizes = [len(part) for part in parts]
        assert all(1 <= size <= batch for size, batch in zip(sizes, batches, strict=True))
        if sum(sizes) == total:
            assert sizes == batches
        else:  # only if the last samples are too few for all ranks
            assert step == steps - 1 or samples % total < world
        if not shuffle:
            assert sorted(itertools.chain(*parts)) == list(
                range(min(itertools.chain(*parts)), max(itertools.chain(*parts)) + 1)
            )
    first = min(2, steps)
    for member, row in zip(members, rows, strict=True):
        assert list(member) == row, "the order of samples is reproducible"
        member.set_epoch(epoch, first)
        assert (len(member), list(member)) == (steps - first, row[first:])


@given(batches=BATCHES, samples=st.integers(0, 200), drop_last=st.booleans(), data=st.data())
def test_a_change_of_batch_sizes_keeps_the_samples_of_each_step(
    batches: list[int], samples: int, drop_last: bool, data: st.DataObject
) -> None:
    try:
        members = samplers(samples, batches, drop_last=drop_last)
        unchanged = samplers(samples, batches, drop_last=drop_last)
    except OptionError:
        return
    steps = len(members[0])
    changed = data.draw(st.permutations(batches))
    iterators = [iter(member) for member in members]
    # Loaders of ranks prefetch different numbers of batches.
    yielded = [data.draw(st.integers(0, steps)) for _ in members]
    rows = [list(itertools.islice(it, n)) for it, n in zip(iterators, yielded, strict=True)]
    start = max(member.position for member in members)
    assert start == (0, max(yielded))
    for member, row, iterator in zip(members, rows, iterators, strict=True):
        member.change(changed, start)
        row += iterator
        assert member.batch_size == changed[member.rank]
        member.set_epoch(1)
        row += member
    for member in unchanged:
        member.set_epoch(0)
    before = [list(member) for member in unchanged]
    for row, member in zip(before, unchanged, strict=True):
        member.set_epoch(1)
        row += member
    for step, (parts, others) in enumerate(
        zip(zip(*rows, strict=True), zip(*before, strict=True), strict=True)
    ):
        used, exact = (sorted(itertools.chain(*each)) for each in (parts, others))
        assert used == exact
        sizes = changed if step >= start[1] else batches
        assert [len(part) for part in parts] == shares(len(used), sizes)


def test_wrong_changes_of_batch_sizes_are_refused() -> None:
    member = samplers(31, [3, 2])[0]
    next(iter(member))
    for wrong in ([3, 3], [5], [2, 2, 1]):
        with pytest.raises(OptionError, match="do not replace"):
            member.change(wrong, (0, 1))
    with pytest.raises(OptionError, match="step 0 of epoch 0 has its batch already"):
        member.change([2, 3], (0, 0))
    member.set_epoch(1, 2)
    assert member.position == (1, 2) and member.batches == (3, 2)


@given(batches=BATCHES, data=st.data())
def test_shares_are_proportional_to_the_batches(batches: list[int], data: st.DataObject) -> None:
    samples = data.draw(st.integers(len(batches), sum(batches)))
    result = shares(samples, batches)
    assert sum(result) == samples
    spare = max(sum(batches) - len(batches), 1)
    for share, batch in zip(result, batches, strict=True):
        exact = 1 + (samples - len(batches)) * (batch - 1) / spare
        assert 1 <= share <= batch and abs(share - exact) < 1


def test_a_last_step_of_too_few_samples_takes_some_of_the_step_before() -> None:
    sizes = [[len(batch) for batch in member] for member in samplers(17, [5, 2, 1])]
    assert sizes == [[5, 3, 1], [2, 2, 1], [1, 1, 1]]


def test_epochs_have_other_orders_and_seeds_too() -> None:
    first, other = samplers(60, [10]), samplers(60, [10], seed=1)
    before = list(first[0])
    first[0].set_epoch(1)
    assert list(first[0]) != before != list(other[0])


def test_loader_gives_the_batches_of_a_rank() -> None:
    member = samplers(17, [6, 3])[1]
    loader = DataLoader(unequal_rank.dataset(), batch_sampler=member)
    rows = [indices.tolist() for _, indices in loader]
    assert rows == list(member)
    assert member.batch_size == 3 and member.sampler is member


@pytest.mark.parametrize(
    ("batches", "settings", "text"),
    [
        ([], {}, "must be a list, not"),
        ([4, 0], {"rank": 0}, "batch size of rank 1 must be a positive integer, not 0"),
        ([4, 4], {}, "the rank of this process is unknown"),
        ([4, 4], {"rank": 2}, "rank 2 has no batch size among 2"),
        ([4], {"device_class": "t4"}, "no batch size without a plan"),
        ([1, 1], {"rank": 0}, "31 samples cannot be divided into 16 steps"),
        ([40], {"drop_last": True}, "31 samples, but a step needs 40"),
        (ClusterPlan({"t4": Plan.uniform("fp32")}), {}, "no local batch for the class t4"),
    ],
)
def test_wrong_arguments_are_refused(batches: Any, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        DistributedBatchSampler(range(31), batches, **settings)
    with pytest.raises(OptionError, match="cannot begin at step 8"):
        samplers(31, [3, 2])[0].set_epoch(0, 8)


def test_a_process_without_others_takes_the_batch_of_its_class(tmp_path: Path) -> None:
    unequal_rank.PLAN.save(path := tmp_path / "plan.json")
    member = DistributedBatchSampler(range(9), str(path), device_class="slow")
    assert (member.batches, len(member)) == ((2,), 5)


def test_ranks_train_as_one_process_with_the_global_batch(tmp_path: Path) -> None:
    first, second = ranks.results("sampled", 2, tmp_path, script="unequal_rank.py")
    assert first["batches"] == second["batches"] == [5, 2]
    assert [len(batch) for batch in first["steps"]] == [5, 5, 2] * 2
    assert [len(batch) for batch in second["steps"]] == [2, 2, 1] * 2
    assert first["weights"] == second["weights"]
    model, data = unequal_rank.network(), unequal_rank.dataset()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parts in zip(first["steps"], second["steps"], strict=True):
        optimizer.zero_grad()
        unequal_rank.loss_of(model, data[[*itertools.chain(*parts)]][0]).backward()
        optimizer.step()
    torch.testing.assert_close(first["weights"], unequal_rank.values(model), rtol=1e-5, atol=1e-6)


def test_every_rank_learns_that_a_plan_lacks_a_batch(tmp_path: Path) -> None:
    first, second = ranks.results("unplanned", 2, tmp_path, script="unequal_rank.py")
    assert second == {
        "type": "OptionError",
        "what": "the plan has no local batch for the class slow",
    }
    assert first["type"] == "RankError" and second["what"] in first["what"]


def test_a_guard_reports_batches_that_are_not_the_plans(tmp_path: Path) -> None:
    first, second = ended = ranks.run("unequal_rank.py", 2, tmp_path, name="watched")
    assert [rank.code for rank in ended] == [0, 0], first.log + second.log
    text = "rank 1 (slow): a step has 3 samples, but the plan's local batch is 2"
    assert "local batch is" not in first.log.partition("PlanError")[0]
    assert second.log.count(text) >= 1 and "DistributedBatchSampler(dataset, plan)" in second.log
    assert second.result["raised"][0] == "PlanError" and text in second.result["raised"][1]
    assert first.result["raised"][0] == "RankError" and text in first.result["raised"][1]
