"""`qsync kernels`: output, cache contents and errors.

Kernels are compiled by the installed nvcc, if any.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qsync_fx.backend.cuda import toolchain
from qsync_fx.backend.cuda.kernel_build import kernel_cache, library
from qsync_fx.cli import main
from qsync_fx.errors import ToolchainError
from tests.support import tiers
from tests.support.cuda.compiled.kernel_caches import cache_of
from tests.support.cuda.compiled.small_units import small_unit

MODEL = """
import torch
from torch import nn

def tiny():
    return nn.Linear(64, 32), (torch.randn(8, 64),)
"""


def has_nvcc() -> bool:
    try:
        toolchain.toolchain()
    except ToolchainError:
        return False
    return True


needs_nvcc = pytest.mark.skipif(
    not has_nvcc(), reason="compiles kernels, and there is no nvcc or no CUTLASS"
)


def run(*arguments: str) -> int:
    """Run `qsync kernels` in this process; argparse raises SystemExit."""
    try:
        return main(("kernels", *arguments))
    except SystemExit as exit_error:
        return exit_error.code if isinstance(exit_error.code, int) else -1


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache with two libraries."""
    return cache_of(tmp_path_factory, small_unit("first"), small_unit("second"))


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Empty cache, in a working directory with a model."""
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("QSYNC_KERNELS_PATH", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_of_kernels_test.py").write_text(MODEL)
    yield tmp_path / "cache"
    sys.modules.pop("model_of_kernels_test", None)


@pytest.fixture
def full(built: Path, empty: Path) -> Path:
    """Cache with two libraries, the first of them compiled ten days ago."""
    shutil.copytree(built, empty)
    (old,) = (entry for entry in found(empty) if entry.manifest.name == "first")
    path = old.folder / library.FILE
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"created": fields["created"] - 10 * 86400}))
    return empty


def found(home: Path) -> list[kernel_cache.CacheEntry]:
    return [
        entry
        for entry in kernel_cache.entries(home / "kernels")
        if isinstance(entry, kernel_cache.CacheEntry)
    ]


def names(home: Path) -> set[str]:
    return {entry.manifest.name for entry in found(home)}


# build


@tiers.ALL
@needs_nvcc
def test_build_compiles_kernels_of_a_model_for_another_machine(
    empty: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = "build --arch sm_80 --model model_of_kernels_test:tiny --precision int8 --no-skip-unprofitable --output carried".split()
    assert run(*arguments) == 0
    captured = capsys.readouterr()
    built_entries = [
        entry
        for entry in kernel_cache.entries(Path("carried"))
        if isinstance(entry, kernel_cache.CacheEntry)
    ]
    # The GEMM, the quantization of its operands, and a transposing copy.
    names = sorted(entry.manifest.name.split("_sm_80")[0] for entry in built_entries)
    assert names == ["copy", "gemm", "quantize"]
    assert all(entry.manifest.name in captured.out for entry in built_entries)
    assert f"3 kernels for sm_80 in {Path('carried').absolute()}" in captured.err
    assert not empty.exists(), "a build with --output does not use the cache"

    assert run(*arguments) == 0
    assert [kernel_cache.read(entry.folder) for entry in built_entries] == built_entries, (
        "existing kernels are not recompiled"
    )

    monkeypatch.setenv("QSYNC_KERNELS_PATH", str(Path("carried").absolute()))
    monkeypatch.setenv("QSYNC_NVCC", "/nowhere/nvcc")
    capsys.readouterr()
    without_output = arguments[:-2]
    assert run(*without_output) == 0
    listed = capsys.readouterr().out
    assert all(entry.manifest.name in listed for entry in built_entries)
    assert run(*without_output, "--output", "elsewhere") == 2
    assert "QSYNC_NVCC=/nowhere/nvcc" in capsys.readouterr().err


WRONG = {
    "--arch sm_81": ("'sm_81'", "sm_80"),
    "": ("no supported GPU", "--arch sm_80"),
    "--arch sm_80 --precision int8": ("requires a model", "--model"),
    "--arch sm_80 --plan plan.json": ("requires a model", "--plan"),
    "--arch sm_80 --model missing:model": ("no module", "missing"),
    "--arch sm_80 --model model_of_kernels_test:tiny --precision int7": ("int7", "int8"),
    "--arch sm_80 --model model_of_kernels_test:tiny --precision fp32": (
        "no kernel needs to be compiled",
        "model_of_kernels_test:tiny",
    ),
    "--arch sm_80 --jobs 0 --model model_of_kernels_test:tiny --precision int8"
    " --no-skip-unprofitable": (
        "compilers cannot be 0",
        "at least 1",
    ),
}


@pytest.mark.parametrize("arguments", WRONG)
def test_invalid_arguments_are_reported(
    arguments: str, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    if not arguments and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    if "--jobs" in arguments and not has_nvcc():
        pytest.skip("no nvcc")
    assert run("build", *arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("qsync: ")
    for word in WRONG[arguments]:
        assert word in error


def test_without_a_compiler(
    empty: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QSYNC_NVCC", "/nowhere/nvcc")
    assert (
        run(
            "build",
            "--arch",
            "sm_80",
            "--model",
            "model_of_kernels_test:tiny",
            "--precision",
            "int8",
            "--no-skip-unprofitable",
        )
        == 2
    )
    error = capsys.readouterr().err
    assert "QSYNC_NVCC=/nowhere/nvcc" in error
    assert "do:" in error


# list


def test_an_empty_cache(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    captured = capsys.readouterr()
    assert (captured.out, f"no kernels in {empty / 'kernels'}" in captured.err) == ("", True)
    assert run("list", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []
    assert run("clear") == 0
    assert not empty.exists(), "list and clear create no folder"


@needs_nvcc
def test_lists(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    lines = capsys.readouterr().out.splitlines()
    (first,) = (line for line in lines if line.startswith("first"))
    (second,) = (line for line in lines if line.startswith("second"))
    assert "sm_80" in first
    assert " 10 d" in first
    assert " 10 d" not in second
    assert run("list", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == {"first", "second"}
    assert all(
        row["resources"]["registers"] > 0 and row["resources"]["shared_memory"] == 4096
        for row in rows
    )
    assert all((Path(row["folder"]) / f"{row['name']}.so").is_file() for row in rows)


@needs_nvcc
def test_lists_folders_built_ahead_of_time_too(
    full: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.move(full / "kernels", full / "elsewhere")
    assert run("list", str(full / "elsewhere")) == 0
    assert "second" in capsys.readouterr().out
    monkeypatch.setenv("QSYNC_KERNELS_PATH", str(full / "elsewhere"))
    assert run("list") == 0
    assert "second" in capsys.readouterr().out
    assert run("list", str(full / "missing")) == 2
    assert "the folder does not exist" in capsys.readouterr().err


@needs_nvcc
def test_damaged_kernels_are_reported_and_cleared(
    full: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found(full)[0].library.write_text("no library")
    assert run("list") == 0
    assert "1 damaged" in capsys.readouterr().err
    assert run("clear", "--older-than", "52w") == 0
    assert len(list(kernel_cache.entries(full / "kernels"))) == 1
    assert "removed 1 kernel" in capsys.readouterr().err


# clear


@needs_nvcc
def test_clears_by_age_and_all(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (full / "tuning").mkdir()
    assert run("clear", "--older-than", "2w") == 0
    assert names(full) == {"first", "second"}
    assert run("clear", "--older-than", "9d") == 0
    assert names(full) == {"second"}
    capsys.readouterr()
    assert run("clear") == 0
    assert "removed 1 kernel, 0.0 MB" in capsys.readouterr().err
    assert names(full) == set()
    assert (full / "tuning").is_dir(), "clear keeps the tuning tables"


@needs_nvcc
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_cache_of_another_user_is_not_touched(
    full: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.chown(full / "kernels", 12345, -1)
    assert run("clear") == 2
    assert "another user" in capsys.readouterr().err
    assert names(full) == {"first", "second"}


@pytest.mark.parametrize("age", ["x", "3", "3y", "-1d", "1.5d", "d"])
def test_ages_that_are_none(age: str, empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("clear", f"--older-than={age}") == 2
    assert "is not an age" in capsys.readouterr().err


def test_path(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("path") == 0
    assert capsys.readouterr().out == f"{empty / 'kernels'}\n"


@pytest.mark.parametrize("action", [(), ("build",), ("list",), ("clear",), ("path",)])
def test_help(action: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*action, "--help") == 0
    assert f"usage: {' '.join(('qsync', 'kernels', *action))}" in capsys.readouterr().out
