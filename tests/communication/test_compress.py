"""Gradient compression in processes over gloo: equal replicas, resumed training and errors."""

from __future__ import annotations

import functools
import signal
from pathlib import Path

import pytest
from torch import nn

import qsync_fx
from qsync_fx.communication.codecs import NAMES
from qsync_fx.distributed import compress
from tests.support import tiers
from tests.support.processes import ranks

run = functools.partial(ranks.results, script="compressed_rank.py")
FAULTS = "compressed_faults_rank.py"


@pytest.mark.parametrize(
    ("world", "codecs"),
    tiers.chosen(
        [(2, ["fp32", "fp16", "qsgd8", "1bit*"])],
        [(1, NAMES[::2]), (2, NAMES), (3, NAMES), (4, NAMES[1::3])],
        [(1, NAMES), (2, NAMES), (3, NAMES), (4, NAMES)],
    ),
)
def test_codecs_train_replicas_that_are_equal(
    world: int, codecs: list[str], tmp_path: Path
) -> None:
    first, *others = run("codecs", world, tmp_path, codecs=codecs)
    for name in codecs:
        result = first[name]
        assert all(other[name]["weights"] == result["weights"] for other in others), name
        assert result["steps"] == 6
        if world == 1:
            assert result["weights"] == first["plain"]
            assert result["wire"] == 0
            continue
        if name != "aqgb":  # its levels depend on measured times
            assert (result["weights"] == first["plain"]) == (
                name in ("fp32", "aqgb32") and world == 2
            )
        # AQGB's first step is sent in FP32, so the second one is checked, too.
        assert result["checks"] == 3 + (name == "aqgb")
        assert result["buckets"] > 6
        headers = 36 * result["buckets"] * (world - 1) * (1 if world == 2 and name != "aqgb" else 2)
        small = 40 * 6 * 9 * world if name.startswith(("1bit", "qsgd", "aqgb")) else 0
        assert result["wire"] <= 1.03 * result["theory"] + headers + small
        assert result["distance"] < {
            "fp32": 1e-5,
            "fp16": 0.01,
            "bf16": 0.05,
            "qsgd16": 0.01,
            "qsgd8": 0.1,
        }.get(name, 2)
        assert (result["variance"] == 0) == (name in ("fp32", "aqgb32")) or name == "aqgb"
        assert f"{name} on rank 0 of {world}: 6 steps" in result["printed"]
        if name.startswith("qsgd8"):
            assert result["wire"] < 0.5 * result["raw"]
    for name in {"fp16", "bf16"} & set(codecs):
        # torch sums in the format, qsync_fx in FP32.
        assert first[name]["from torch's"] < {"fp16": 3e-3, "bf16": 2e-2}[name]


@pytest.mark.parametrize(
    ("world", "codecs"),
    tiers.chosen(
        [(2, ["qsgd4", "1bit*"])],
        [
            (2, ["qsgd8", "qsgd4h", "1bit", "bf16", "aqgb12", "duo2"]),
            (3, ["qsgd2", "qsgd2h", "1bit", "1bit*", "fp16", "aqgb16", "duo4"]),
        ],
        [(world, [*NAMES, "duo0", "duo1", "duo8"]) for world in (2, 3, 4)],
    ),
)
def test_gradients_on_another_device_train_the_same_replicas(
    world: int, codecs: list[str], tmp_path: Path
) -> None:
    """Torch operators encode there, and hosts exchange the bytes. The test uses them on the CPU."""
    for results in run(
        "elsewhere",
        world,
        tmp_path,
        codecs=[name for name in codecs if name != "aqgb"],
        buckets=0.02,
    ):
        for name, result in results.items():
            assert result["kernels"] == result["operators"], name
            assert result["wire"][0] == result["wire"][1], name


def test_gpu_code_path_runs_on_the_cpu(tmp_path: Path) -> None:
    """Run the jobs of tests/gpu/test_gradients.py."""
    first, second = run("placed", 2, tmp_path, codecs=["qsgd4", "1bit*"], devices=["cpu", "cpu"])
    assert first["qsgd4"] == second["qsgd4"]
    assert first["1bit*"][-2:] == second["1bit*"][-2:]
    first, second = run(
        "trains", 2, tmp_path / "trains", forked=False, codecs=["qsgd8", "duo2"], device="cpu"
    )
    assert [first[name]["weights"] for name in first] == [
        second[name]["weights"] for name in second
    ]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=tiers.ALL)])
def test_result_does_not_depend_on_buckets(world: int, tmp_path: Path) -> None:
    first, *others = run("buckets", world, tmp_path)
    assert all(other == first for other in others)
    for codec in ("qsgd4", "1bit*", "1bit"):
        assert len({value for name, value in first.items() if name.startswith(codec + ",")}) == 1


@tiers.ALL
@pytest.mark.parametrize("world", [2, 3])
def test_resumed_training_is_bit_equal(world: int, tmp_path: Path) -> None:
    first, *others = run("resumed", world, tmp_path, where=str(tmp_path))
    assert all(other == first for other in others)
    for codec, (expected, again, without) in first.items():
        assert again == expected, codec
        assert without != expected, "training depends on the saved error feedback or random stream"
    if world == 2:
        for result in run("loaded", 3, tmp_path / "more", where=str(tmp_path)):
            assert len(result["warned"]) == 1
            assert "of 2, but this is rank" in result["warned"][0]
            assert "the state belongs to" in result["refused"]["text"]


def test_different_ranks_are_an_error_before_communication(tmp_path: Path) -> None:
    first, *others = run("disagreement", 3, tmp_path)
    assert all(other == first for other in others)
    assert "rank 1 has another gradient codec than rank 0" in first["codec"]["text"]
    assert "bits=4" in first["codec"]["text"]
    assert first["codec"]["rank"] == 1
    assert "another gradient seed" in first["seed"]["text"]
    assert "another tensor codec than" in first["least"]["text"]
    assert "already has a communication hook" in first["twice"]["text"]


@tiers.ALL
@pytest.mark.parametrize("world", [2, 3])
def test_replicas_stay_equal(world: int, tmp_path: Path) -> None:
    first, *others = run("cases", world, tmp_path)
    assert all(other == first for other in others)
    assert all(value is True for name, value in first.items() if isinstance(value, bool)), first
    for codec in ("1bit*", "1bit", "qsgd8", "fp16"):
        assert first[f"scale {codec}"] == 4, (
            "all ranks skip only the step with an infinity on one rank"
        )


@tiers.ALL
@pytest.mark.parametrize("world", [3, pytest.param(2, marks=tiers.EVERY)])
def test_any_size_is_coded_and_nan_reaches_all_ranks(world: int, tmp_path: Path) -> None:
    units = {"qsgd2": 128, "qsgd8": 512, "qsgd16": 1031, "1bit*": 64, "1bit": 1031}
    codecs = {"fp32": 1, "fp16": 1, "aqgb": 1, "aqgb12": 1, **units}
    first, *others = run("sizes", world, tmp_path, codecs=list(codecs))
    assert all(other == first for other in others)
    for codec, unit in codecs.items():
        result = first[codec]
        assert result["coded"] == [1197, 0]
        assert 700 in result["nan"], codec
        assert len(result["nan"]) <= unit, "NaN affects only its unit of the codec"
        assert result["others"], codec


@tiers.ALL
@pytest.mark.parametrize("codec", ["qsgd8", "1bit*", "aqgb", "duo4"])
def test_torch_distributed_debug_reports_no_error(codec: str, tmp_path: Path) -> None:
    """The ranks run with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    first, *others = run("detail", 2, tmp_path, codec=codec)
    assert all(other == first for other in others)
    assert first["looked at"] == "_ProcessGroupWrapper"
    assert first["steps"] == 4


@tiers.ALL
@pytest.mark.parametrize(
    ("world", "codec", "steps"),
    tiers.chosen([], [(2, "qsgd4", 100), (3, "1bit*", 40)], [(2, "qsgd4", 500), (3, "1bit*", 120)]),
)
def test_many_buckets_in_flight_for_many_steps(
    world: int, codec: str, steps: int, tmp_path: Path
) -> None:
    first, *others = run("many", world, tmp_path, codec=codec, steps=steps)
    assert all(other == first for other in others)
    assert first["steps"] == steps
    assert first["buckets"] >= 10 * steps
    assert first["checks"] == steps / 10


HARMED = {
    "magic": "rank 0 cannot read the message of rank 1 for bucket 1 of step 2: it begins with",
    "length": "rank 0 cannot read the message of rank 1 for bucket 1 of step 2: its length",
    "late": "rank 0 cannot read the message of rank 1 for bucket 1 of step 2: its step is",
    "payload": "the averaged gradients of rank 1 differ from those of rank 0",
}


@pytest.mark.parametrize(
    ("damage", "world"),
    tiers.chosen(
        [("magic", 2)],
        [("magic", 2), ("length", 3), ("late", 2), ("payload", 3)],
        [(damage, world) for damage in HARMED for world in (2, 3)],
    ),
)
def test_corrupt_message_is_an_error_on_all_ranks(damage: str, world: int, tmp_path: Path) -> None:
    for result in run("faults", world, tmp_path, script=FAULTS, how=damage):
        assert result["kind"] == "RankError"
        assert HARMED[damage] in result["text"] or (
            damage == "payload" and "they must be bit-identical" in result["text"]
        )


@tiers.ALL
@pytest.mark.parametrize(
    "world", [3, pytest.param(2, marks=tiers.EVERY), pytest.param(4, marks=tiers.EVERY)]
)
def test_a_rank_that_is_killed_is_an_error_on_all_others(world: int, tmp_path: Path) -> None:
    ended = ranks.run(FAULTS, world, tmp_path, name="faults", how="kill", limit=30)
    assert ended[1].code == -signal.SIGKILL
    for rank in (0, *range(2, world)):
        assert ended[rank].code == 0, ended[rank].log
        assert ended[rank].result["kind"] == "RankError"
        assert "no longer responds" in ended[rank].result["text"]


@pytest.mark.parametrize(
    ("codec", "failure", "world", "fsdp"),
    [
        ("qsgd8", "raise", 2, False),
        *(
            pytest.param(*case, marks=tiers.ALL)
            for case in (
                ("qsgd8", "raise", 3, False),
                ("qsgd8", "kill", 2, False),
                ("aqgb", "raise", 2, False),
                ("duo4", "raise", 2, False),
                ("qsgd8", "raise", 2, True),
            )
        ),
    ],
)
def test_under_a_guard_the_other_ranks_raise_the_reason(
    codec: str, failure: str, world: int, fsdp: bool, tmp_path: Path
) -> None:
    job = {"name": "guarded", "codec": codec, "how": failure, "fsdp": fsdp}
    *others, last = ranks.run(FAULTS, world, tmp_path, limit=600, **job)
    assert last.code == {"raise": 1, "kill": -signal.SIGKILL}[failure], last.log
    reason = {
        "raise": "has failed: ValueError: this batch is broken",
        "kill": "has ended without a report",
    }[failure]
    for rank in others:
        assert rank.code == 0, rank.log
        assert rank.result["rank"] == world - 1
        assert f"rank {world - 1} {reason}" in rank.result["text"]
        assert "no longer responds" not in rank.result["text"]


@pytest.mark.parametrize(
    ("world", "feedback"),
    [(2, False), pytest.param(2, True, marks=tiers.ALL), pytest.param(4, True, marks=tiers.ALL)],
)
def test_ranks_with_adaptive_levels_stay_equal(world: int, feedback: bool, tmp_path: Path) -> None:
    """Decisions follow the rule for simulated times and the sizes of real messages."""
    rates = [10_000.0, 20_000.0, 40_000.0, 1e9][:world]
    results = run(
        "adapting", world, tmp_path, script="adapting_rank.py", rates=rates, feedback=feedback
    )
    assert len({rank["weights"] for rank in results}) == 1
    for rate, rank in zip(rates, results, strict=True):
        decided = [entry for entry in rank["entries"] if entry[2] is not None]
        assert len(decided) >= 3 * len({entry[1] for entry in decided})
        for _, size, gap, ratio in decided:
            assert gap == pytest.approx(1.0)
            assert ratio == pytest.approx(min(1.0, max(0.375, rate / size)))
        assert all(ratio == 1.0 for _, _, gap, ratio in rank["entries"] if gap is None)
        assert rank["wire"] <= 1.03 * rank["theory"] + (world - 1) * rank["buckets"] * (
            72 * 4 + 40 * 6
        )
        assert rank["theory"] == pytest.approx(
            (world - 1) * sum(size * ratio for _, size, _, ratio in rank["entries"]), rel=0.03
        )
        assert rank["raw"] == (world - 1) * sum(size for _, size, _, _ in rank["entries"])
        # The first step is sent in FP32: the variance of truncation is known after the second one.
        assert (rank["variance"] == 0) == (rate == 1e9)
        assert rank["checks"] == 2
        assert f"{len(decided)} decisions: " in rank["printed"]
        assert f"link bandwidth {rate / 1e6:.1f} MB/s" in rank["printed"]
        assert bool(rank["sent"]) == feedback
        assert rank["learnt"]
    assert len({tuple(entry[3] for entry in rank["entries"]) for rank in results}) == world


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=tiers.ALL)])
def test_truncation_remainder_is_sent_later(world: int, tmp_path: Path) -> None:
    first, *others = run("feedback", world, tmp_path, script="adapting_rank.py")
    for result in (first, *others):
        assert result["without"]["lost"] > 1
        for name in ("with", "adaptive"):
            assert result[name]["unexplained"] < 1e-3 < result[name]["lost"] < 1
        assert len(result["adaptive"]["bits"]) > 1


@pytest.mark.parametrize(
    ("damage", "codec"),
    tiers.chosen(
        [("length", "aqgb")],
        [("length", "aqgb"), ("magic", "aqgb16"), ("payload", "aqgb")],
        [
            (damage, codec)
            for damage in ("length", "magic", "payload")
            for codec in ("aqgb", "aqgb16")
        ],
    ),
)
def test_corrupt_message_of_any_length_is_an_error_on_all_ranks(
    damage: str, codec: str, tmp_path: Path
) -> None:
    for result in run("faults", 2, tmp_path, script=FAULTS, how=damage, codec=codec):
        assert result["kind"] == "RankError"
        assert (
            "rank 0 cannot read the message of rank 1 for bucket 1 of step 2: " in result["text"]
            or damage == "payload"
        )


def test_unsupported_compression_is_an_error() -> None:
    with pytest.raises(
        qsync_fx.OptionError, match="requires a DistributedDataParallel or FSDP model, not Linear"
    ):
        compress(nn.Linear(3, 3), "qsgd8")
