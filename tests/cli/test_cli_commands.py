"""CLI verbs: discovery by file, shared model arguments, and lazy imports."""

from __future__ import annotations

import argparse
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from qsync_fx.cli import Command, commands, main, model_args, output
from qsync_fx.cli.commands import inspect, kernels, tune
from qsync_fx.errors import QSyncError
from qsync_fx.option_help import DOCUMENTED
from qsync_fx.options import Options
from qsync_fx.plan import Plan

MODEL = """
import torch
from torch import nn
def tiny():
    return nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 128)), (torch.randn(96, 512),)
def loud():
    raise RuntimeError("the model is made")
"""


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with a model and an empty cache."""
    (tmp_path / "model_of_commands.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "model_of_commands", raising=False)
    return tmp_path


def test_each_file_is_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    files = [module.name for module in pkgutil.iter_modules(commands.__path__)]
    assert commands.names()[: len(files)] == files
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} {commands.load(name).help}" in listed for name in files)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["inspct"],
        [],
        ["measure", "json:loads", "--repeats", "x"],
        ["measure", "nowhere:small"],
        ["inspect", "a/path.py:small"],
        ["plan", "--nothing"],
        ["sensitivity", "--help"],
    ],
)
def test_help_and_version_do_not_import_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom qsync_fx.cli import main\n"
        f"try:\n    main({arguments})\nexcept SystemExit:\n    pass\n"
        "print(*({'torch', 'rich'} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stderr.splitlines()[-1] == "", done.stderr


def options_of(command: Command) -> dict[str, str | None]:
    """Return the flags of the model and backend option groups, with their help."""
    parser = argparse.ArgumentParser()
    assert command.arguments is not None
    command.arguments(parser)
    shared = [
        group
        for group in parser._action_groups
        if group.title in ("the model", "options of the backend")
    ]
    return {
        flag: action.help
        for group in shared
        for action in group._group_actions
        for flag in action.option_strings
    }


def test_verbs_share_the_model_arguments() -> None:
    flags = options_of(tune.COMMAND)
    assert options_of(inspect.COMMAND).keys() == flags.keys() | {"--train", "--eval", "--target"}
    assert options_of(kernels.BUILD).items() - flags.items() == {
        ("--model", "function that returns (model, args) or (model, args, kwargs)")
    }
    # Each verb has an argument for every backend option, except these.
    assert {model_args.flag(name) for name in DOCUMENTED} - flags.keys() == {
        "--cached-plan",
        "--inner-backend",
        "--strict",
        "--target",
    }


def test_options_equal_the_backend_options(workdir: Path) -> None:
    Plan("int8").save("plan.json")
    parser = argparse.ArgumentParser()
    model_args.add(parser)
    line = (
        "json:loads --plan plan.json --rounding floor --gradient-rounding stochastic --scaling "
        "channel --emulate-unsupported --root a.b"
    )
    read = Options.parse(
        model_args.explicit_options(
            parser.parse_args([*line.split(), "--pass", "one", "--pass", "two"])
        )
    )
    assert read == Options(
        plan=Plan("int8"),
        rounding="floor",
        gradient_rounding="stochastic",
        scaling="channel",
        emulate_unsupported=True,
        root="a.b",
        passes=("one", "two"),
    )
    assert model_args.explicit_options(parser.parse_args(["json:loads"])) == {}


@pytest.mark.parametrize(
    "verb",
    [
        ["inspect"],
        ["tune", "--recorded", "none.json"],
        ["kernels", "build", "--arch", "sm_80", "--model"],
    ],
)
def test_invalid_option_is_reported_before_the_model_is_built(
    verb: list[str], workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from qsync_fx.backend.cuda import tuning
    from qsync_fx.backend.cuda.tuning import Environment

    tuning.save_recording(
        Path("none.json"),
        tuning.TimingRecording(Environment("A100", "1", "1", "1", "1", 1), "sm_80", {}),
    )
    name = verb[:1] if verb[0] == "tune" else verb
    rest = verb[1:] if verb[0] == "tune" else []
    assert main([*name, "model_of_commands:loud", *rest, "--rounding", "up"]) == 2
    assert "the option \"rounding\" cannot be 'up'" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="the model is made"):
        main([*name, "model_of_commands:loud", *rest])


@pytest.mark.parametrize(
    "flags",
    ["--precision int8", "--emulate-unsupported", "--pass one", "--gradient-rounding nearest"],
)
def test_invalid_model_reference_is_reported(
    flags: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kernels", "build", "--arch", "sm_80", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert "the option requires a model" in error
    assert f"where: {flags.split()[0]}\n" in error


def test_a_command_runs_or_has_actions() -> None:
    with pytest.raises(QSyncError, match="a command needs either a function or actions"):
        Command("neither")
    with pytest.raises(QSyncError, match="a command needs either a function or actions"):
        Command("both", print, actions={"some": Command("some", print)})


def test_text_with_percent_signs_is_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = Command("100 % and %(prog)s", print, about="50 % of %d", examples="5 %s")
    monkeypatch.setattr(commands, "load", lambda name: odd)
    for line in (["--help"], ["doctor", "--help"]):
        with pytest.raises(SystemExit) as raised:
            main(line)
        assert raised.value.code == 0
    output = capsys.readouterr().out
    assert all(text in output for text in ("100 % and %(prog)s", "50 % of %d", "5 %s"))


def test_tables_print_their_cells_unchanged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    long = "x" * 300
    output.show(
        output.table(("name", "size"), [("[red]a[/] [/b]", "7"), (long, "1234")], right=("size",))
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"{'[red]a[/] [/b]':300}     7"
    assert lines[2].startswith(long)
    monkeypatch.setenv("COLUMNS", "40")
    output.show(output.table(("name", "size"), [(long, "1234")]))
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 40
    assert narrow.count("x") == 300
