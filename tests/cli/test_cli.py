"""The command line: what it prints, and how it fails."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qsync_fx import __version__
from qsync_fx.cli import main
from qsync_fx.cli.reference import load
from qsync_fx.errors import OptionError
from qsync_fx.explanation import explain
from qsync_fx.ops import Kind
from qsync_fx.options import DOCUMENTED
from qsync_fx.plan import Plan
from qsync_fx.plan.opid import OpId
from qsync_fx.precision import FORMATS

MODELS = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, scale=1.0):
        return self.head(self.dropout(torch.relu(self.body(x)))) * scale

def small():
    return Small(), (torch.randn(3, 8),)

def evaluated():
    return Small().eval(), [torch.randn(3, 8)], {"scale": 2.0}

class Factory:
    @staticmethod
    def make(batch=3):
        return Small(), (torch.randn(batch, 8),)

def function():
    return (lambda x: torch.relu(x)), (torch.randn(3),)

def broken():
    raise RuntimeError("from the user's function")

def needs(batch, *, width):
    return small()

number = 3
alone = lambda: Small()
four = lambda: (Small(), (), {}, None)
tensor = lambda: (Small(), torch.randn(3, 8))
text = lambda: (Small(), "x")
swapped = lambda: ((torch.randn(3, 8),), Small())
keywords = lambda: (Small(), (), {1: 2})
nothing = lambda: ((lambda: 3), ())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "models_of_test.py").write_text(MODELS)
    (tmp_path / "imports_missing.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("models_of_test", "imports_missing"):
        sys.modules.pop(name, None)


def run(*arguments: str) -> int:
    """Runs `qsync` in this process; argparse leaves by SystemExit."""
    try:
        return main(arguments)
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else -1


# What it prints


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith(f"qsync_fx {__version__}, torch {torch.__version__}, Python 3.")


def test_help_tells_every_option_in_the_words_of_the_options(capsys: pytest.CaptureFixture[str]) -> None:
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
        "--exact",
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
    found = [operator["kind"] for operator in json.loads(capsys.readouterr().out)["operators"]]
    assert found == [kind] * {"adjustable": 2, "dependent": 3, "fixed": 0}[kind]
    assert f"{len(found)} of 5 operators are {kind} and shown" in table
    assert "2 adjustable operators: 2 in" in table, "the notes are about the whole model"


def test_a_graph_is_not_cut_down_to_a_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "models_of_test:small", "--kind", "fixed", "--after", "lower") == 2
    assert "qsync: a graph is shown whole" in capsys.readouterr().err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "models_of_test:Factory.make", "--json", "--precision", "fp32") == 0
    found = json.loads(capsys.readouterr().out)
    operators = {operator["id"]: operator for operator in found["operators"]}
    body = operators["body/linear"]
    assert (body["kind"], body["planned"], body["precision"], body["output"]) == ("adjustable", "fp32", "fp32", "fp32")
    assert body["flops"] == 2 * (2 * 3 * 8 * 16), "its result and the gradient of its weight"
    assert body["reason"] == "plan: uniform fp32"
    assert body["source"]["code"] == "return self.head(self.dropout(torch.relu(self.body(x)))) * scale"
    assert body["source"]["file"].endswith("models_of_test.py")
    assert found["graphs"] == 1
    assert found["breaks"] == []
    assert found["device"] == "cpu"
    assert {"normalize", "assign", "lower"} <= {step["name"] for step in found["passes"]}


def test_graph_after_a_pass_and_diff(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "models_of_test:small", "--precision", "bf16", "--after", "classify") == 0
    graph = capsys.readouterr().out
    assert "aten.linear" in graph
    assert "bf16[" not in graph
    assert run("inspect", "models_of_test:small", "--precision", "bf16", "--diff", "classify", "insert_casts") == 0
    diff = capsys.readouterr().out.splitlines()
    assert diff[:2] == ["--- classify", "+++ insert_casts"]
    assert any(line.startswith("+") and "bf16[3, 16] = aten.linear" in line for line in diff)


def test_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("--dot", "graph.dot", "--plan-out", "plan.json")
    assert run("inspect", "models_of_test:small", "--precision", "int8", *names) == 0
    assert capsys.readouterr().err == "qsync: wrote graph.dot\nqsync: wrote plan.json\n"
    assert (folder / "graph.dot").read_text().startswith("digraph")
    plan = Plan.load("plan.json")
    assert plan == Plan(operators={OpId("body", "linear"): "int8", OpId("head", "linear"): "int8"})

    plan.with_precision("head", "fp32").save("edited.json")
    assert run("inspect", "models_of_test:small", "--plan", "edited.json") == 0
    assert "2 adjustable operators: 1 in int8, 1 in fp32" in capsys.readouterr().out


def test_mode(capsys: pytest.CaptureFixture[str]) -> None:
    """Rounding is stochastic in training alone, and what --train and --eval say goes before what the function returns."""
    modes = {("models_of_test:small", "--eval"): "nearest", ("models_of_test:evaluated", "--train"): "stochastic"}
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


def test_a_terminal_gets_a_table_of_its_width(folder: Path) -> None:
    main_end, terminal = pty.openpty()
    command = [sys.executable, "-m", "qsync_fx.cli", "inspect", "models_of_test:small", "--precision", "int8"]
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"}
    with subprocess.Popen(command, stdout=terminal, stderr=subprocess.PIPE, cwd=folder, env=environment) as process:
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
    assert "flops" not in text, "costs give way where there is no room"


def test_a_pipe_gets_a_table_of_the_width_that_columns_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("inspect", "models_of_test:small", "--precision", "int8")
    assert run(*arguments) == 0
    whole = capsys.readouterr().out
    assert max(map(len, whole.splitlines())) > 130
    for nothing_said in ("", "0", "-80", "eighty", "8e1"):
        monkeypatch.setenv("COLUMNS", nothing_said)
        assert run(*arguments) == 0
        assert capsys.readouterr().out == whole
    monkeypatch.setenv("COLUMNS", "80")
    assert run(*arguments) == 0
    table = capsys.readouterr().out
    fits(table)
    at = next(line.index("reason") for line in table.splitlines() if "reason" in line)
    rows = " ".join(line[at:] for line in table.splitlines())
    assert "an activation function: it takes the precision of its inputs" in " ".join(rows.split()), "reasons wrap"
    monkeypatch.setenv("COLUMNS", "30")
    assert run(*arguments) == 0
    table = capsys.readouterr().out
    assert max(map(len, table.splitlines())) <= 30
    assert {"int8", "reason"} <= set(table.split())
    monkeypatch.setenv("COLUMNS", "80")
    assert run("doctor") == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_print_shows_the_same_whatever_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_reader_that_has_seen_enough(folder: Path) -> None:
    """The other end of the pipe is closed before anything is written; no traceback and no second complaint at exit."""
    command = [sys.executable, "-m", "qsync_fx.cli", "inspect", "models_of_test:small", "--json"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, cwd=folder, check=False)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


# How it fails


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines: list[str] = captured.err.splitlines()
    return lines


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["inspct"], "invalid choice: 'inspct'"),
        (["inspect"], "the following arguments are required: MODULE:CALLABLE"),
        (["inspect", "models_of_test:small", "--train", "--eval"], "not allowed with argument --train"),
        (["inspect", "models_of_test:small", "--json", "--after", "lower"], "not allowed with argument --json"),
        (["inspect", "models_of_test:small", "--diff", "lower"], "expected 2 arguments"),
    ],
)
def test_wrong_arguments(arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = fails(capsys, *arguments)
    assert lines[0].startswith("usage: qsync")
    assert what in lines[-1]


@pytest.mark.parametrize(
    ("reference", "what", "do"),
    [
        ("models_of_test", "'models_of_test' does not name a model", "write MODULE:CALLABLE"),
        ("models_of_test:", "does not name a model", "write MODULE:CALLABLE"),
        (":small", "does not name a model", "write MODULE:CALLABLE"),
        (".models_of_test:small", "does not name a model", "write MODULE:CALLABLE"),
        ("models_of_test:small.", "does not name a model", "write MODULE:CALLABLE"),
        ("./examples/bert.py:small", "'./examples/bert.py' is a path, not a module", 'write "examples.bert:small"'),
        ("models_of_tests:small", "there is no module 'models_of_tests'", "run qsync in the folder that holds it"),
        ("models_of_test.deeper:small", "there is no module 'models_of_test.deeper'", "run qsync in the folder"),
        ("models_of_test:smal", "models_of_test has no 'smal'", "did you mean 'small'? known: "),
        ("models_of_test:Factory.mak", "Factory has no 'mak'", "did you mean 'make'? known: make"),
        ("models_of_test:number", "it is a value of type int", "name a function"),
        (
            "models_of_test:needs",
            "cannot be called without arguments: missing a required",
            "give its parameters defaults",
        ),
        ("models_of_test:alone", "the function returned a value of type Small", "return (model, args)"),
        ("models_of_test:four", "the function returned a tuple of 4", "return (model, args)"),
        ("models_of_test:tensor", "args is of type Tensor, not a tuple", "for one input write (model, (x,))"),
        ("models_of_test:text", "args is of type str, not a tuple", "for one input write (model, (x,))"),
        ("models_of_test:swapped", "the model is of type tuple", "return a module or function"),
        ("models_of_test:keywords", "kwargs is not a dictionary of names", "return (model, args)"),
    ],
)
def test_references_that_lead_nowhere(reference: str, what: str, do: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OptionError) as caught:
        load(reference)
    assert what in caught.value.what
    assert caught.value.do is not None
    assert caught.value.do.startswith(do)
    lines = fails(capsys, "inspect", reference)
    assert lines == f"qsync: {caught.value}".splitlines()


def test_references_that_lead_somewhere() -> None:
    model, args, kwargs = load("models_of_test:evaluated")
    assert type(model).__name__ == "Small"
    assert isinstance(args, tuple)
    assert kwargs == {"scale": 2.0}
    assert load("models_of_test:small")[2] == {}


def test_what_the_users_code_raises_comes_through() -> None:
    with pytest.raises(RuntimeError, match="from the user's function"):
        run("inspect", "models_of_test:broken")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        run("inspect", "imports_missing:small")


@pytest.mark.parametrize(
    ("arguments", "what", "do"),
    [
        (["--precision", "int9"], "the option \"precision\" cannot be 'int9'", "did you mean 'int8'?"),
        (["--rounding", "up"], "the option \"rounding\" cannot be 'up'", "known: floor, nearest, stochastic"),
        (["--plan", "none.json"], "the plan cannot be read: No such file or directory", "check the path"),
        (["--plan", "cut.json"], "the plan ends in the middle", "get a whole copy"),
        (["--plan", "cut.json", "--precision", "int8"], "the plan ends in the middle", "get a whole copy"),
        (["--plan", "whole.json", "--precision", "int8"], "precision and plan are both given", 'drop "precision"'),
        (["--plan", "whole.json"], "the pattern 'heads' selects none of the 2 operators", "nearest: head"),
        (["--pass", "none"], "no installed package offers a pass 'none'", "install one"),
        (["--after", "lowr"], "no pass 'lowr' has run", "did you mean 'lower'?"),
        (["--diff", "assign", "zzzzz"], "no pass 'zzzzz' has run", "known: "),
    ],
)
def test_errors_are_told_in_three_lines(
    arguments: list[str], what: str, do: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "cut.json").write_text('{"format": "qsync-plan", "ver')
    Plan("int8", [("heads", "fp32")]).save("whole.json")
    lines = fails(capsys, "inspect", "models_of_test:small", *arguments)
    assert len(lines) in (2, 3), "what, where it is known where, and do"
    assert lines[0].startswith(f"qsync: {what}")
    assert lines[-1].startswith(f"  do:    {do}")


def test_a_file_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "models_of_test:small", "--plan-out", "no folder/plan.json") == 2
    captured = capsys.readouterr()
    assert "body/linear" in captured.out
    assert captured.err.startswith("qsync: the plan is not saved: ")


def test_a_model_without_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(capsys, "inspect", "models_of_test:nothing")[0] == "qsync: the model made no graph"
