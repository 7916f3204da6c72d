"""The main job, as a user runs it: two processes, two plans, one set of weights; and what happens when something is wrong.

Every run is the real one, on scikit-learn's digits.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tiers
import torch
from hypothesis import given, settings, strategies as st

from qsync_fx import ClusterPlan, Plan, Profile

EXAMPLES = Path(__file__).parents[1] / "examples"
DIGITS = ("--data", "digits")
INT8 = Plan("int8", patterns=[("stem", "fp32"), ("**.shortcut", "bf16"), ("head", "fp32")])
EAGER = ("--inner", "aot_eager")
"""Where the plan is given nothing is measured, and no kernel is compiled."""


def run(
    *arguments: str, output: Path, python: tuple[str, ...] = (), seconds: float = 240
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *python, str(EXAMPLES / "demo.py"), *arguments, "--output", str(output)]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=wide())


def wide() -> dict[str, str]:
    """An environment in which rich breaks no line."""
    return {**os.environ, "COLUMNS": "300"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    output = tmp_path_factory.mktemp("first run") / "demo"
    plan = output.parent / "given.json"
    INT8.save(plan)
    return run(*DIGITS, *EAGER, "--plan", str(plan), "--epochs", "2", output=output), output


def weights_of(finished: subprocess.CompletedProcess[str]) -> list[str]:
    """What tells the weights of both runs."""
    found = re.findall(r"equal to the last bit .*SHA-256 ([0-9a-f]+)", finished.stdout)
    assert len(found) == 2, finished.stdout + finished.stderr
    return found


def test_both_ranks_end_with_the_same_weights_that_have_learned_something(demo: Any) -> None:
    finished, _ = demo
    assert finished.returncode == 0, finished.stdout + finished.stderr
    uniform, planned = weights_of(finished)
    assert uniform != planned
    accuracy = re.search(r"Test accuracy ([\d.]+)%", finished.stdout)
    assert accuracy and float(accuracy[1]) > 80, finished.stdout
    assert finished.stderr == ""


def test_each_rank_ran_its_own_plan_and_explains_it(demo: Any) -> None:
    finished, output = demo
    explained = [(output / f"explain-rank{rank}.txt").read_text() for rank in (0, 1)]
    assert "17 adjustable operators: 17 in fp32" in explained[0]
    assert re.search(r"stage1\.conv1/conv2d +adjustable +int8", explained[1])
    assert re.search(r"stem/conv2d +adjustable +fp32", explained[1])
    assert re.search(r"stage2\.shortcut/conv2d +adjustable +bf16", explained[1])
    assert re.search(r"operators +17 in fp32 +17 in fp32 +17 in bf16 +2 in fp32", finished.stdout)
    assert "6 in int8" in finished.stdout
    for rank in (0, 1):
        assert (output / f"explain-rank{rank}.dot").read_text().startswith("digraph")


def test_both_runs_are_timed_and_their_memory_is_counted(demo: Any) -> None:
    _, output = demo
    found = json.loads((output / "outcome.json").read_text())
    assert found["foreseen"] == {} and found["batches"] == [24, 32]
    for run in found["measured"].values():
        for took, peak in zip(run["ranks"], run["peak"], strict=True):
            assert min(took.values()) > 0 and peak > 10**6
            assert max(took["computing"], took["waiting"]) < took["seconds"]
        assert run["steps"] == 2 * (1438 // 56) - 5
    peaks = [found["measured"][run]["peak"][1] for run in ("uniform", "planned")]
    assert peaks[0] < found["measured"]["uniform"]["peak"][0], "BF16 with a third more images holds less than FP32"


@tiers.ALL
@pytest.mark.timeout(900)
def test_ranks_measure_themselves_plan_and_train_under_the_plan_within_its_memory(tmp_path: Path) -> None:
    finished = run("--quick", output=tmp_path, seconds=800)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    plan = ClusterPlan.load(tmp_path / "plan.json")
    assert plan.ranks == ("training", "inference")
    assert {fmt.name for fmt in plan.classes["training"].operators.values()} == {"fp32"}
    assert {fmt.name for fmt in plan.classes["inference"].operators.values()} <= {"fp32", "bf16"}
    for role in plan.ranks:
        assert Profile.load(tmp_path / f"profile-{role}.json").collectives
    for which in ("uniform", "planned"):
        trace = json.loads((tmp_path / f"timeline-{which}.json").read_text())
        assert {event["pid"] for event in trace["traceEvents"]} == {1, 2}
    found = json.loads((tmp_path / "outcome.json").read_text())
    foreseen, real = found["foreseen"]["planned"], found["measured"]["planned"]
    assert foreseen["variance"] <= found["foreseen"]["uniform"]["variance"]
    assert real["operators"][1] == Counter(fmt.name for fmt in plan.classes["inference"].operators.values())
    assert max(foreseen["peak"][1], real["peak"][1]) <= found["memory"]
    assert "is recovered" in finished.stdout or "are recovered" in finished.stdout


@tiers.ALL
def test_the_same_seed_and_plan_give_the_same_weights(demo: Any, tmp_path: Path) -> None:
    finished, _ = demo
    plan = tmp_path / "both.json"
    ClusterPlan({"training": Plan.uniform("fp32"), "inference": INT8}).save(plan)
    again = run(*DIGITS, *EAGER, "--epochs", "2", "--plan", str(plan), output=tmp_path / "out")
    assert weights_of(again) == weights_of(finished)


@tiers.ALL
def test_a_plan_for_another_model_ends_both_ranks_and_is_named(tmp_path: Path) -> None:
    plan = tmp_path / "other.json"
    Plan("int8", operators={"stage9.conv1/conv2d": "fp32"}).save(plan)
    finished = run(*DIGITS, *EAGER, "--plan", str(plan), output=tmp_path / "out")
    assert finished.returncode == 1
    assert "rank 1 failed" in finished.stderr and "stage9.conv1/conv2d" in finished.stderr
    assert str(plan) in finished.stderr and "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--plan", "cut.json"),
        ("--data", "nowhere"),
        ("--batch", "5000"),
        ("--inner", "eager"),
        ("--output", "a file/out"),
    ],
)
def test_wrong_arguments_are_told_before_a_process_starts(option: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('{"format": "qsync')
    (tmp_path / "a file").write_text("")
    given = value if option in ("--batch", "--inner") else str(tmp_path / value)
    finished = run(*DIGITS, option, given, output=Path(given) if option == "--output" else tmp_path / "out")
    assert finished.returncode == 2
    assert (option if given == value else given) in finished.stderr
    assert "do:" in finished.stderr and "Traceback" not in finished.stderr
    assert not list(tmp_path.glob("out/*.log"))


def test_without_the_package_it_says_what_to_run(tmp_path: Path) -> None:
    finished = run(*DIGITS, output=tmp_path, python=("-S",))
    assert finished.returncode == 2 and "make setup" in finished.stderr and "Traceback" not in finished.stderr


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo that would train for long."""
    INT8.save(tmp_path / "given.json")
    arguments = (*EAGER, "--plan", str(tmp_path / "given.json"), "--epochs", "5000")
    with started(*arguments, output=tmp_path) as process:
        yield process


@contextlib.contextmanager
def started(*arguments: str, output: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(EXAMPLES / "demo.py"), *DIGITS, *arguments, "--output", str(output)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=wide()) as process:
        try:
            yield process
        finally:
            process.kill()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes of the two ranks, in order."""
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        found = [pid for pid in children if b"rank.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        if len(found) == 2:
            return sorted(found)
        time.sleep(0.1)
    raise AssertionError("the ranks did not start")


def gone(pids: list[int]) -> bool:
    return not any(map(runs, pids))


def soon_gone(pids: list[int]) -> bool:
    """Whether processes end by themselves: a rank may outlive its launcher by the time that Python takes to end."""
    until = time.monotonic() + 60
    while not gone(pids) and time.monotonic() < until:
        time.sleep(0.1)
    return gone(pids)


def runs(pid: int) -> bool:
    """Whether a process runs. One that has ended stays in /proc until somebody asks for its status, which init may be slow to do."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


linux = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the ranks in /proc")


@tiers.ALL
@linux
def test_a_rank_that_is_killed_in_training_ends_the_run(running: subprocess.Popen[str]) -> None:
    assert running.stdout is not None
    while "epoch" not in running.stdout.readline():
        assert running.poll() is None
    ranks = ranks_of(running)
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = running.communicate(timeout=200)
    assert running.returncode == 1
    assert "rank 1 failed" in errors and "SIGKILL" in errors
    assert gone(ranks)


@linux
def test_ctrl_c_ends_both_ranks_also_while_they_measure(tmp_path: Path) -> None:
    with started(output=tmp_path) as process:
        ranks = ranks_of(process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 130 and "interrupted" in errors and "Traceback" not in errors
        assert soon_gone(ranks)


@tiers.ALL
@linux
def test_a_rank_that_is_killed_while_it_measures_ends_the_run(tmp_path: Path) -> None:
    with started(output=tmp_path) as process:
        ranks = ranks_of(process)
        while b"profiler_start" not in (tmp_path / "rank1.log").read_bytes():
            assert process.poll() is None
            time.sleep(0.1)
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 1 and "rank 1 failed" in errors and "SIGKILL" in errors
        assert gone(ranks)


@tiers.ALL
@linux
def test_ranks_end_when_their_launcher_is_killed(running: subprocess.Popen[str]) -> None:
    ranks = ranks_of(running)
    running.kill()
    running.wait()
    assert soon_gone(ranks)


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """Imports modules of the example, whose names are too general to stay in a process that tests other things."""
    before = set(sys.modules)
    sys.path.insert(0, str(EXAMPLES))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    sys.path.remove(str(EXAMPLES))
    for path in EXAMPLES.glob("*.py"):
        if path.stem not in before:
            sys.modules.pop(path.stem, None)


def test_the_digest_sees_a_single_bit(example: Any) -> None:
    model = example("models").ResNet(10)
    digest = example("training").digest
    before = digest(model)
    assert digest(model) == before
    names = list(model.state_dict())
    for name in (names[0], names[-1], "norm.running_var", "norm.num_batches_tracked"):
        tensor = model.state_dict()[name].view(-1).view(torch.uint8)
        tensor[0] ^= 1
        assert digest(model) != before, name
        tensor[0] ^= 1
    assert digest(model) == before


def idx(values: np.ndarray[Any, Any]) -> bytes:
    return bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def write(folder: Path, zipped: bool = False, **changed: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """Writes a data set of random images, with other content where `changed` says so; returns what is in it."""
    random = np.random.default_rng()
    values: dict[str, np.ndarray[Any, Any]] = {}
    for part, count in (("train", 7), ("t10k", 3)):
        values[f"{part}-images-idx3-ubyte"] = random.integers(0, 256, (count, 9, 13), np.uint8)
        values[f"{part}-labels-idx1-ubyte"] = random.integers(0, 10, count, np.uint8)
    folder.mkdir(exist_ok=True)
    for name, value in values.items():
        content = changed.get(name.partition("-idx")[0].replace("-", "_"), idx(value))
        (folder / f"{name}.gz").unlink(missing_ok=True)
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return values


@pytest.mark.parametrize("zipped", [False, True])
def test_files_of_mnists_format_are_read(zipped: bool, tmp_path: Path, example: Any) -> None:
    values = write(tmp_path, zipped)
    found = example("data").load(str(tmp_path))
    for part, (images, labels) in (("train", found.train), ("t10k", found.test)):
        assert np.array_equal(images.squeeze(1).numpy(), values[f"{part}-images-idx3-ubyte"])
        assert np.array_equal(labels.numpy(), values[f"{part}-labels-idx1-ubyte"])
    normal = found.normalized(found.train[0])
    assert abs(normal.mean()) < 1e-5 and abs(normal.std(correction=0) - 1) < 1e-5


IMAGES = idx(np.zeros((7, 9, 13), np.uint8))


@settings(max_examples=50)
@given(
    damaged=st.one_of(
        st.binary(max_size=40),
        st.integers(0, len(IMAGES) - 1).map(lambda end: IMAGES[:end]),
        st.binary(min_size=1, max_size=9).map(lambda more: IMAGES + more),
        st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3).map(
            lambda sizes: b"\0\0\10\3" + struct.pack(">3I", *sizes) + IMAGES[16:]
        ),
    )
)
def test_damaged_images_are_named_and_never_half_read(
    damaged: bytes, tmp_path_factory: pytest.TempPathFactory, example: Any
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    write(folder, train_images=damaged)
    data = example("data")
    if len(damaged) == len(IMAGES) and struct.unpack(">3I", damaged[4:16]) == (7, 9, 13):
        return
    with pytest.raises(data.DataError, match="train-images-idx3-ubyte"):
        data.load(str(folder))


def test_a_zip_that_is_cut_off_and_labels_of_other_images_are_named(tmp_path: Path, example: Any) -> None:
    data = example("data")
    write(tmp_path, zipped=True)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(data.DataError, match="t10k-images"):
        data.load(str(tmp_path))
    write(tmp_path, train_labels=idx(np.zeros(6, np.uint8)))
    with pytest.raises(data.DataError, match="7 images have 6 labels"):
        data.load(str(tmp_path))


def test_a_subset_is_drawn_by_the_seed(example: Any) -> None:
    digits = example("data").load("digits")
    first, again, other = digits.subset(100, 1), digits.subset(100, 1), digits.subset(100, 2)
    assert len(first.train[1]) == 100 and torch.equal(first.train[0], again.train[0])
    assert not torch.equal(first.train[0], other.train[0])
    assert torch.equal(first.test[1], digits.test[1])
