"""Plan files: a saved plan is loaded unchanged, a failed write preserves the old file, and invalid
paths are errors.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from qsync_fx.errors import PlanError
from qsync_fx.plan import ClusterPlan, Plan
from qsync_fx.plan.cluster_plan import read_plan
from qsync_fx.plan.operator_id import OpId


def test_save_and_load(tmp_path: Path) -> None:
    plan = Plan("int8", [("encoder", "bf16")], {OpId("", "relu", 1, "pooler"): "fp32"})
    for path in (tmp_path / "a plan.json", os.fspath(tmp_path / "é.json")):
        Plan.uniform("fp32").save(path)
        plan.save(path)
        assert Plan.load(path) == plan
    assert sorted(os.listdir(tmp_path)) == ["a plan.json", "é.json"]


def test_save_writes_through_links_and_for_others_to_read(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    Plan.uniform("int8").save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "real.json").stat().st_mode) == 0o666 & ~umask


def test_save_to_a_bare_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Plan.uniform("int8").save("plan.json")
    assert Plan.load("plan.json") == Plan.uniform("int8")


FAILED_WRITE = """
import resource, sys
from qsync_fx.errors import PlanError
from qsync_fx.plan import ClusterPlan, Plan
plan = Plan(operators={f"layer.{n}/linear": "int8" for n in range(1000)})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    plan.save(sys.argv[1])
except PlanError as error:
    print(error)
    sys.exit(3)
"""


def test_a_failed_write_leaves_the_old_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    Plan.uniform("fp32").save(path)
    done = subprocess.run(
        [sys.executable, "-c", FAILED_WRITE, path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    assert "the plan cannot be saved: the file cannot be written: File too large" in done.stdout
    assert Plan.load(path) == Plan.uniform("fp32")
    assert os.listdir(tmp_path) == ["plan.json"]


def test_saving_a_plan_is_atomic(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    small, large = (
        Plan.uniform("fp32"),
        Plan(operators={f"layer.{n}/linear": "int8" for n in range(500)}),
    )
    small.save(path)

    def write() -> None:
        for _ in range(10):
            large.save(path)
            small.save(path)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert Plan.load(path) in (small, large)
    for writer in writers:
        writer.join()
    assert os.listdir(tmp_path) == ["plan.json"]


def test_save_where_no_plan_can_be(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (
        tmp_path,
        tmp_path / "no folder" / "plan.json",
        tmp_path / "pipe",
        f"{tmp_path}/\0",
        tmp_path / ("x" * 300),
    ):
        with pytest.raises(PlanError) as caught:
            Plan.uniform("int8").save(path)
        assert caught.value.where
        assert caught.value.do
    assert os.listdir(tmp_path) == ["pipe"]
    with pytest.raises(PlanError, match="must be a string or path, not null"):
        Plan.uniform("int8").save(None)  # type: ignore[arg-type]


def test_load_where_no_plan_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (
        tmp_path,
        tmp_path / "none.json",
        tmp_path / "pipe",
        tmp_path / "loop",
        "\0",
        "\ud800",
        "/dev/null",
        "",
    ):
        with pytest.raises(PlanError) as caught:
            Plan.load(path)
        assert caught.value.where
        assert caught.value.do
        assert str(caught.value).encode()
    for value in (None, 0, b"plan.json", ["plan.json"]):
        with pytest.raises(PlanError, match="must be a string or path"):
            Plan.load(value)  # type: ignore[arg-type]


def test_plan_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[object] = []
    loads = json.loads
    monkeypatch.setattr(
        json, "loads", lambda *args, **kwargs: (parsed.append(args), loads(*args, **kwargs))[1]
    )
    for plan in (Plan.uniform("int8"), ClusterPlan({"t4": Plan.uniform("int8")})):
        parsed.clear()
        plan.save(tmp_path / "plan.json")
        assert read_plan(tmp_path / "plan.json") == plan and len(parsed) == 1
