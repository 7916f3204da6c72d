"""Format support of INT8 on a CPU: native only with an INT8 unit, and invalid settings are
reported.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from qsync_fx import _C
from qsync_fx.devices import format_support, support
from qsync_fx.devices.cpu_features import Cpu, wrong_path
from qsync_fx.errors import OptionError
from qsync_fx.formats import precision


@pytest.mark.parametrize(
    ("native", "exact", "features", "execution", "reason"),
    [
        (True, True, ("vnni",), "native", "this CPU has a unit for INT8"),
        (
            False,
            True,
            ("vnni",),
            "native",
            "oneDNN uses an INT8 unit that the native module's ISA variant does not use",
        ),
        (False, True, (), "simulated", "this CPU has no known INT8 unit"),
        (False, False, (), "simulated", "no INT8 unit (VNNI)"),
    ],
)
def test_exact_sums_are_no_unit(
    native: bool,
    exact: bool,
    features: tuple[str, ...],
    execution: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(format_support, "native_integer_unit", lambda: native)
    monkeypatch.setattr(format_support, "cpu_multiplies_integers", lambda: exact)
    monkeypatch.setattr(format_support, "cpu", lambda: Cpu("", features, None, 1))
    for name in ("int8", "int8_grad"):
        result = support.__wrapped__(torch.device("cpu"), precision(name))
        assert result.kind == execution and result.runs_as.name == name and reason in result.reason


def test_invalid_setting_is_reported_in_format_support(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = OptionError("there is no path 'quantum'", where="environment variable QSYNC_CPU_ISA")
    monkeypatch.setattr(format_support, "wrong_path", lambda: wrong)
    result = support.__wrapped__(torch.device("cpu"), precision("int8"))
    assert result.kind != "native"
    assert "QSYNC_CPU_ISA is invalid" in result.reason and "no path 'quantum'" in result.reason
    assert wrong_path() is None


def test_isa_names_ignore_case() -> None:
    environment = os.environ | {"QSYNC_CPU_ISA": _C.available_isas()[-1].upper()}
    code = "from qsync_fx import _C; print(_C.isa())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == _C.available_isas()[-1], done.stderr
