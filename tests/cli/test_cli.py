"""Output of the command line."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from qsync_fx import __version__
from qsync_fx.cli.model_args import load
from qsync_fx.diagnostics import explain
from qsync_fx.formats import FORMATS
from qsync_fx.ops import Kind
from qsync_fx.option_help import DOCUMENTED
from qsync_fx.plan import Plan
from qsync_fx.plan.operator_id import OpId
from tests.support import tiers
from tests.support.processes.command_line import run

pytestmark = pytest.mark.usefixtures("folder")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith(
        f"qsync_fx {__version__}, torch {metadata.version('torch')}, Python 3."
    )


def test_help_lists_every_option_with_its_documented_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("--help") == 0
    overview = capsys.readouterr().out
    assert "inspect" in overview
    assert "doctor" in overview
    assert run("inspect", "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    for name in ("precision", "rounding", "gradient_rounding", "scaling"):
        assert DOCUMENTED[name] in text
    for flag in (
        "--plan FILE",
        "--emulate-unsupported",
        "--pass NAME",
        "--kind {adjustable,dependent,fixed}",
        "--after PASS",
        "--diff A B",
        "--dot FILE",
        "--plan-out FILE",
        "--json",
    ):
        assert flag in text


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "models_of_test:small", "--precision", "int8") == 0
    captured = capsys.readouterr()
    rows = {line.split()[0]: line.split() for line in captured.out.splitlines() if "/" in line}
    assert rows["body/linear"][1:3] == ["adjustable", "int8"]
    assert rows["head/linear"][1:3] == ["adjustable", "int8"]
    assert "uniform int8" in captured.out
    assert "2 adjustable operators: 2 in int8" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize("kind", list(Kind))
def test_operators_of_one_kind(kind: Kind, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "models_of_test:small", "--kind", kind) == 0
    table = capsys.readouterr().out
    assert {line.split()[1] for line in table.splitlines() if "/" in line} <= {kind}
    assert run("inspect", "models_of_test:small", "--kind", kind, "--json") == 0
    kinds = [operator["kind"] for operator in json.loads(capsys.readouterr().out)["operators"]]
    assert kinds == [kind] * {"adjustable": 2, "dependent": 3, "fixed": 0}[kind]
    assert f"{len(kinds)} of 5 operators are {kind} and shown" in table
    assert "2 adjustable operators: 2 in" in table, "notes cover all operators of the model"


def test_a_graph_is_not_cut_down_to_a_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "models_of_test:small", "--kind", "fixed", "--after", "lower") == 2
    assert "qsync: --kind does not apply to the graph" in capsys.readouterr().err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "models_of_test:Factory.make", "--json", "--precision", "fp32") == 0
    result = json.loads(capsys.readouterr().out)
    operators = {operator["id"]: operator for operator in result["operators"]}
    body = operators["body/linear"]
    assert (body["kind"], body["planned"], body["precision"], body["output"]) == (
        "adjustable",
        "fp32",
        "fp32",
        "fp32",
    )
    assert body["flops"] == 2 * (2 * 3 * 8 * 16), "FLOPs include the output and the weight gradient"
    assert body["reason"] == "plan: uniform fp32"
    assert (
        body["source"]["code"] == "return self.head(self.dropout(torch.relu(self.body(x)))) * scale"
    )
    assert body["source"]["file"].endswith("models_of_test.py")
    assert result["graphs"] == 1
    assert result["breaks"] == []
    assert result["device"] == "cpu"
    assert {"normalize", "assign", "lower"} <= {step["name"] for step in result["passes"]}


def test_graph_after_a_pass_and_diff(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "models_of_test:small", "--precision", "bf16", "--after", "classify") == 0
    graph = capsys.readouterr().out
    assert "aten.linear" in graph
    assert "bf16[" not in graph
    assert (
        run(
            "inspect",
            "models_of_test:small",
            "--precision",
            "bf16",
            "--diff",
            "classify",
            "insert_casts",
        )
        == 0
    )
    diff = capsys.readouterr().out.splitlines()
    assert diff[:2] == ["--- classify", "+++ insert_casts"]
    assert any(line.startswith("+") and "bf16[3, 16] = aten.linear" in line for line in diff)


def test_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "--dot graph.dot --model-explorer graph.json --plan-out plan.json".split()
    assert run("inspect", "models_of_test:small", "--precision", "int8", *names) == 0
    assert capsys.readouterr().err == "".join(f"qsync: wrote {name}\n" for name in names[1::2])
    assert (folder / "graph.dot").read_text().startswith("digraph")
    assert json.loads((folder / "graph.json").read_text())["label"] == "graph"
    plan = Plan.load("plan.json")
    assert plan == Plan(operators={OpId("body", "linear"): "int8", OpId("head", "linear"): "int8"})

    plan.with_precision("head", "fp32").save("edited.json")
    assert run("inspect", "models_of_test:small", "--plan", "edited.json") == 0
    assert "2 adjustable operators: 1 in int8, 1 in fp32" in capsys.readouterr().out


def test_mode(capsys: pytest.CaptureFixture[str]) -> None:
    """Rounding is stochastic only in training; --train and --eval override the model's mode."""
    modes = {
        ("models_of_test:small", "--eval"): "nearest",
        ("models_of_test:evaluated", "--train"): "stochastic",
    }
    for (model, mode), rounding in modes.items():
        assert run("inspect", model, mode, "--precision", "int8", "--after", "insert_casts") == 0
        graph = capsys.readouterr().out
        assert f"'{rounding}'" in graph
        assert f"aten.dropout(%relu, 0.5, {mode == '--train'})" in graph


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor") == 0
    captured = capsys.readouterr()
    rows = [line.split() for line in captured.out.splitlines()]
    assert ["torch", torch.__version__ + ","] in [row[:2] for row in rows]
    for name in FORMATS:
        assert [name, "cpu"] in [row[:2] for row in rows]
    assert captured.err == ""


def test_a_function_for_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "models_of_test:function", "--eval") == 0
    assert "/relu" in capsys.readouterr().out


@tiers.ALL
def test_a_terminal_gets_a_table_of_its_width(folder: Path) -> None:
    main_end, terminal = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "qsync_fx.cli",
        "inspect",
        "models_of_test:small",
        "--precision",
        "int8",
    ]
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"}
    with subprocess.Popen(
        command, stdout=terminal, stderr=subprocess.PIPE, cwd=folder, env=environment
    ) as process:
        os.close(terminal)
        output = b""
        # Reading the end of a closed terminal is an error on Linux.
        while chunk := _read(main_end):
            output += chunk
        assert process.stderr is not None
        assert (process.wait(), process.stderr.read()) == (0, b"")
    os.close(main_end)
    fits(re.sub(r"\x1b\[[0-9;]*m", "", output.decode()))


def fits(text: str) -> None:
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "body/linear" in text
    assert "…" not in text
    assert "flops" not in text, "cost columns are omitted from narrow tables"


def test_columns_sets_the_width_of_a_table_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("inspect", "models_of_test:small", "--precision", "int8")
    assert run(*arguments) == 0
    unlimited = capsys.readouterr().out
    assert max(map(len, unlimited.splitlines())) > 130
    for invalid in ("", "0", "-80", "eighty", "8e1"):
        monkeypatch.setenv("COLUMNS", invalid)
        assert run(*arguments) == 0
        assert capsys.readouterr().out == unlimited
    monkeypatch.setenv("COLUMNS", "80")
    assert run(*arguments) == 0
    table = capsys.readouterr().out
    fits(table)
    column = next(line.index("reason") for line in table.splitlines() if "reason" in line)
    rows = " ".join(line[column:] for line in table.splitlines())
    assert "an activation function: it takes the precision of its inputs" in " ".join(
        rows.split()
    ), "long reasons are wrapped"
    monkeypatch.setenv("COLUMNS", "30")
    assert run(*arguments) == 0
    table = capsys.readouterr().out
    assert max(map(len, table.splitlines())) <= 30
    assert {"int8", "reason"} <= set(table.split())
    monkeypatch.setenv("COLUMNS", "80")
    assert run("doctor") == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_print_does_not_depend_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, _ = load("models_of_test:small")
    explanation = explain(model, *args)
    text = str(explanation)
    monkeypatch.setenv("COLUMNS", "80")
    assert str(explanation) == explanation.table() == text
    fits(explanation.table(width=80))
    assert explanation.table(width=1000) == text


def test_a_long_reason_is_not_cut() -> None:
    model, args, _ = load("models_of_test:small")
    pattern = "body" + "*" + "/linea[" + "r" * 900 + "]"
    text = str(explain(model, *args, options={"plan": Plan("bf16", [(pattern, "fp32")])}))
    assert f'plan: pattern "{pattern}"' in text


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, 65536)
    except OSError:
        return b""


@tiers.ALL
def test_closed_pipe_ends_the_command_without_an_error(folder: Path) -> None:
    """The read end is closed before the first write; no traceback and no second error at exit."""
    command = [sys.executable, "-m", "qsync_fx.cli", "inspect", "models_of_test:small", "--json"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            command, stdout=write_end, stderr=subprocess.PIPE, cwd=folder, check=False
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")
