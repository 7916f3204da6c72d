"""The main job, as a user runs it: two processes, two plans, one set of weights; and what happens when something is wrong.

Every run is the real one, on scikit-learn's digits.
"""

from __future__ import annotations

import gzip
import importlib
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tiers
import torch
from hypothesis import given, settings, strategies as st

from qsync_fx import Plan

EXAMPLES = Path(__file__).parents[1] / "examples"
DIGITS = ("--data", "digits")


def run(*arguments: str, output: Path, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *python, str(EXAMPLES / "demo.py"), *arguments, "--output", str(output)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=wide())


def wide() -> dict[str, str]:
    """An environment in which rich breaks no line."""
    return {**os.environ, "COLUMNS": "300"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    output = tmp_path_factory.mktemp("first run") / "demo"
    return run(*DIGITS, "--epochs", "2", output=output), output


def weights_of(finished: subprocess.CompletedProcess[str]) -> str:
    found = re.search(r"equal to the last bit: .*SHA-256 ([0-9a-f]+)", finished.stdout, re.DOTALL)
    assert found, finished.stdout + finished.stderr
    return found[1]


def test_both_ranks_end_with_the_same_weights_that_have_learned_something(demo: Any) -> None:
    finished, _ = demo
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert weights_of(finished)
    accuracy = re.search(r"Test accuracy ([\d.]+)%", finished.stdout)
    assert accuracy and float(accuracy[1]) > 80, finished.stdout
    assert finished.stderr == ""


def test_each_rank_ran_its_own_plan_and_explains_it(demo: Any) -> None:
    finished, output = demo
    plans = [Plan.load(output / f"plan-rank{rank}.json") for rank in (0, 1)]
    assert plans[0] == Plan.uniform("fp32") and str(plans[1].default) == "int8" and plans[1].patterns
    explained = [(output / f"explain-rank{rank}.txt").read_text() for rank in (0, 1)]
    assert "17 adjustable operators: 17 in fp32" in explained[0]
    assert re.search(r"stage1\.conv1/conv2d +adjustable +int8", explained[1])
    assert re.search(r"stem/conv2d +adjustable +fp32", explained[1])
    assert re.search(r"stage2\.shortcut/conv2d +adjustable +bf16", explained[1])
    assert re.search(r"operators +17 in fp32 +2 in fp32", finished.stdout) and "6 in int8" in finished.stdout
    for rank in (0, 1):
        assert (output / f"explain-rank{rank}.dot").read_text().startswith("digraph")


@tiers.ALL
def test_the_same_seed_and_plan_give_the_same_weights(demo: Any, tmp_path: Path) -> None:
    finished, output = demo
    again = run(*DIGITS, "--epochs", "2", "--plan", str(output / "plan-rank1.json"), output=tmp_path)
    assert weights_of(again) == weights_of(finished)


@tiers.ALL
def test_a_plan_for_another_model_ends_both_ranks_and_is_named(tmp_path: Path) -> None:
    plan = tmp_path / "other.json"
    Plan("int8", operators={"stage9.conv1/conv2d": "fp32"}).save(plan)
    finished = run(*DIGITS, "--plan", str(plan), output=tmp_path / "out")
    assert finished.returncode == 1
    assert "rank 1 failed" in finished.stderr and "stage9.conv1/conv2d" in finished.stderr
    assert str(plan) in finished.stderr and "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [("--plan", "cut.json"), ("--data", "nowhere"), ("--batch", "5000"), ("--output", "a file/out")],
)
def test_wrong_arguments_are_told_before_a_process_starts(option: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('{"format": "qsync')
    (tmp_path / "a file").write_text("")
    given = value if value.isdecimal() else str(tmp_path / value)
    finished = run(*DIGITS, option, given, output=Path(given) if option == "--output" else tmp_path / "out")
    assert finished.returncode == 2
    assert (option if value.isdecimal() else given) in finished.stderr
    assert "do:" in finished.stderr and "Traceback" not in finished.stderr
    assert not list(tmp_path.glob("out/*.log"))


def test_without_the_package_it_says_what_to_run(tmp_path: Path) -> None:
    finished = run(*DIGITS, output=tmp_path, python=("-S",))
    assert finished.returncode == 2 and "make setup" in finished.stderr and "Traceback" not in finished.stderr


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo that would run for long."""
    command = [sys.executable, str(EXAMPLES / "demo.py"), *DIGITS, "--epochs", "5000", "--output", str(tmp_path)]
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
def test_ctrl_c_ends_both_ranks(running: subprocess.Popen[str]) -> None:
    ranks = ranks_of(running)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=200)
    assert running.returncode == 130 and "interrupted" in errors and "Traceback" not in errors
    assert soon_gone(ranks)


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
    digest = example("rank").digest
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
