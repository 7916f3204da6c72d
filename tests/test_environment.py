"""Environment variables: accepted values of each kind, and errors that name the variable."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from qsync_fx import environment
from qsync_fx.errors import OptionError

NAME = "QSYNC_CACHED_PLAN"


@pytest.mark.parametrize("value", ["1", "true", "on", "True", "ON", ""])
def test_switches_that_are_on(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, value)
    assert environment.switch(NAME)


@pytest.mark.parametrize("value", ["0", "false", "off", "False", "OFF"])
def test_switches_that_are_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, value)
    assert not environment.switch(NAME)


@pytest.mark.parametrize("value", ["foo", "2", "-1", " 0", "yes", "x" * 500])
@pytest.mark.parametrize("name", ["QSYNC_CACHED_PLAN", "QSYNC_KERNELS"])
def test_switches_with_another_value(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=f"{name} cannot be") as caught:
        environment.switch(name)
    assert caught.value.where == f"environment variable {name}"
    assert caught.value.do == "set it to 1, true or on, or to 0, false or off"


def test_an_unset_switch_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    assert environment.switch(NAME)


@pytest.mark.parametrize("options", [{}, {"precision": "fp32"}])
def test_compiling_reports_a_switch_with_another_value(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, "foo")
    model = torch.compile(nn.Linear(8, 8), backend="qsync", options=options)
    with pytest.raises(Exception, match="QSYNC_CACHED_PLAN cannot be 'foo'"):
        model(torch.randn(4, 8))


def test_numbers_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, number in (("3", 3), ("0", 0), ("", None)):
        monkeypatch.setenv("RANK", value)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert environment.launcher_number("RANK") == number
    for value in ("one", "-1", "1.0", "\u0663"):
        monkeypatch.setenv("RANK", value)
        with pytest.warns(UserWarning, match="ignores the environment variable RANK"):
            assert environment.launcher_number("RANK") is None


def test_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSYNC_DEVICES", os.pathsep.join(["/a", "", "b"]))
    assert environment.paths("QSYNC_DEVICES") == [Path("/a"), Path("b")]
    monkeypatch.setenv("HOME", "/home/of_test")
    monkeypatch.setenv("QSYNC_KERNELS_PATH", "~/kernels")
    assert environment.paths("QSYNC_KERNELS_PATH") == [Path("/home/of_test/kernels")]


def test_a_default_for_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    with environment.default("KINETO_LOG_LEVEL", "6"):
        assert os.environ["KINETO_LOG_LEVEL"] == "6"
    assert "KINETO_LOG_LEVEL" not in os.environ
    monkeypatch.setenv("KINETO_LOG_LEVEL", "0")
    with environment.default("KINETO_LOG_LEVEL", "6"):
        assert os.environ["KINETO_LOG_LEVEL"] == "0"
    assert os.environ["KINETO_LOG_LEVEL"] == "0"


def test_the_environment_of_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/bin")
    variables = environment.child_environment(TMPDIR="/scratch")
    assert variables["TMPDIR"] == "/scratch" and variables["PATH"] == "/bin"
    assert os.environ.get("TMPDIR") != "/scratch"
