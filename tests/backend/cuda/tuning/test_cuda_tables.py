"""Tables and recordings of the tuner: validation of untrusted files, and writes that are atomic and
lose no data.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qsync_fx.backend.cuda import tuning
from qsync_fx.backend.cuda.tuning import RecordingTimer, TunedChoice, TuningError, tune
from tests.support import tiers
from tests.support.cuda.tuning_samples import BF16, CONV, HERE, INT8, recording, timer


def test_tables_are_saved_and_merged(tmp_path: Path) -> None:
    path = tuning.path_in(tmp_path / "tuning", HERE)
    first = TunedChoice(INT8, "torch", {"torch": 0.5}, {"other": "why"}, True)
    tuning.save_table(path, HERE, [first, TunedChoice(BF16, "torch", {"torch": 1.0})])
    second = replace(first, seconds={"torch": 0.25})
    tuning.save_table(path, HERE, [second, TunedChoice(CONV, "torch", {"torch": 2.0})])
    table = tuning.load_table(path, HERE)
    assert table.choices == {
        INT8: second,
        BF16: TunedChoice(BF16, "torch", {"torch": 1.0}),
        CONV: TunedChoice(CONV, "torch", {"torch": 2.0}),
    }
    assert (
        table.choice(replace(INT8, m=4001)) == second and table.choice(replace(INT8, m=9)) is None
    )
    assert [p.suffix for p in path.parent.iterdir() if p.name.startswith(".")] == []


def test_without_a_file_a_table_is_empty(tmp_path: Path) -> None:
    assert tuning.load_table(tmp_path / "none.json", HERE).choices == {}
    with pytest.raises(TuningError, match="No such file"):
        tuning.load_table(tmp_path / "none.json")


@tiers.ALL
def test_two_processes_write_one_table(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    program = f"""
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[4])!r})
from tests.support.cuda.tuning_samples import BF16, HERE
from qsync_fx.backend.cuda import tuning
from qsync_fx.backend.cuda.tuning import TunedChoice
for at in range(10):
    problem = replace(BF16, m=1024 << int(sys.argv[1]), n=1024 << at)
    tuning.save_table(Path({str(path)!r}), HERE, [TunedChoice(problem, "torch", {{"torch": 1.0}})])
"""
    writers = [subprocess.Popen([sys.executable, "-c", program, str(index)]) for index in range(2)]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    assert len(tuning.load_table(path, HERE).choices) == 20


def _whole(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "table.json"
    tuning.save_table(path, HERE, [TunedChoice(INT8, "torch", {"torch": 0.5})])
    return path, json.loads(path.read_text())


def _row(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["choices"][0].update(fields)


def _problem(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["choices"][0]["problem"].update(fields)


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another format": lambda data: data.update(format="plan"),
    "a later version": lambda data: data.update(version=2),
    "no environment": lambda data: data.pop("environment"),
    "an environment with more": lambda data: data["environment"].update(extra="1"),
    "an environment of lists": lambda data: data["environment"].update(gpu=["a"]),
    "choices that are no list": lambda data: data.update(choices={"a": 1}),
    "a choice that is text": lambda data: data.update(choices=["x"]),
    "a winner without a time": _row(name="gemm_somewhere"),
    "a winner that is a list": _row(name=["torch"]),
    "no seconds": _row(seconds={}),
    "negative seconds": _row(seconds={"torch": -1.0}),
    "infinite seconds": _row(seconds={"torch": float("inf")}),
    "seconds that are true": _row(seconds={"torch": True}),
    "endless names": _row(seconds={"torch": 1.0, "x" * 10**6: 1.0}),
    "an answer that is text": _row(faster_than_bf16="yes"),
    "half a round": _row(rounds=0.5),
    "a problem that is none": _row(problem=[]),
    "a size of text": _problem(m="4096"),
    "a size of zero": _problem(n=0),
    "a size beyond INT32": _problem(k=2**31),
    "a size that is true": _problem(k=True),
    "a size between buckets": _problem(m=4095),
    "an unknown format": _problem(a="int8; rm"),
    "another field": _problem(config={"schedule": "x"}),
    "a bias that is a number": _problem(bias=1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tables_are_rejected_completely(tmp_path: Path, name: str) -> None:
    path, data = _whole(tmp_path)
    HOSTILE[name](data)
    path.write_text(json.dumps(data))
    with pytest.raises(TuningError):
        tuning.load_table(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 10**5,
        '{"format": 1e999}',
        "\ud800".encode("utf-8", "surrogatepass"),
    ],
)
def test_files_that_are_no_tables(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(TuningError):
        tuning.load_table(path)


def test_a_table_of_another_environment_is_not_used(tmp_path: Path) -> None:
    path, _ = _whole(tmp_path)
    with pytest.raises(TuningError, match="another environment"):
        tuning.load_table(path, replace(HERE, driver="999"))
    assert tuning.path_in(tmp_path, HERE) != tuning.path_in(tmp_path, replace(HERE, driver="999"))


def test_unreadable_table_is_preserved_next_to_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text("what somebody wrote")
    tuning.save_table(path, HERE, [TunedChoice(INT8, "torch", {"torch": 0.5})])
    assert tuning.load_table(path, HERE).choice(INT8) is not None
    assert (tmp_path / "table.json.unreadable").read_text() == "what somebody wrote"


def test_a_run_that_fails_leaves_the_table(tmp_path: Path) -> None:
    path, _ = _whole(tmp_path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        tuning.save_table(
            path, HERE, [replace(TunedChoice(CONV, "torch", {"torch": 1.0}), name=object())]
        )  # type: ignore[arg-type]
    assert path.read_bytes() == before and sorted(
        p.name for p in tmp_path.iterdir() if p.suffix != ".lock"
    ) == [path.name]


def test_recordings_are_read_back(tmp_path: Path) -> None:
    kernels, times = timer([1.0, 1.1], [0.5, 0.6])
    recorder = RecordingTimer(times)
    tune(INT8, kernels, recorder, rounds=2)
    path = tmp_path / "recorded.json"
    tuning.save_recording(path, recording({INT8: recorder.seconds}))
    loaded = tuning.load_recording(path)
    assert loaded.environment == HERE and loaded.arch == "sm_90a"
    again = tune(INT8, kernels, loaded.timer(INT8), rounds=1)
    assert (
        again.name == kernels[0].name
        and again.seconds == tune(INT8, kernels, times, rounds=1).seconds
    )
    # A problem uses the timings of its bucket.
    assert loaded.timer(replace(INT8, m=4090)).seconds == recorder.seconds


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(arch="sm_120"),
        lambda data: data.update(timings=1),
        lambda data: data.update(timings=[{"problem": {}, "seconds": {"torch": [1.0]}}]),
        lambda data: data["timings"][0].update(seconds={"torch": []}),
        lambda data: data["timings"][0].update(seconds={"torch": ["fast"]}),
        lambda data: data["timings"][0].update(seconds=[1.0]),
        lambda data: data.update(format="qsync tuning table"),
    ],
)
def test_hostile_recordings_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    path = tmp_path / "recorded.json"
    tuning.save_recording(path, recording({INT8: {"torch": [1.0]}}))
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(TuningError):
        tuning.load_recording(path)
