"""Kernels with wrong results on a processor: detection before use, warning, and fallback to the
next path.

`_C.corrupt` changes one bit of one kernel's result. Fallback is tested in a subprocess, in which no
path is selected yet.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from qsync_fx import _C

if not hasattr(_C, "corrupt"):
    pytest.skip("an editable install can corrupt kernels, a wheel cannot", allow_module_level=True)

PATHS = _C.available_isas()
KERNELS = [(name, variant) for name, count in _C.corruptible() for variant in range(count)]

several = pytest.mark.skipif(
    len(PATHS) == 1,
    reason="this processor has the scalar path alone, against which others are tried",
)

QUANTIZED = """
import sys
import torch
from qsync_fx import _C
from qsync_fx.backend.numerics import native, reference
from qsync_fx.backend.operators.gemm import cpu_kernels
from qsync_fx.backend.cuda.problem.problem import GemmProduct
from qsync_fx.formats import precision

_C.corrupt(_C.available_isas()[0], sys.argv[1], int(sys.argv[2]))
torch.manual_seed(0)
x, seed, int8 = torch.randn(33, 65), torch.tensor([7]), precision("int8")
q, scale = native.quantize(x, seed, 3, int8, "stochastic", [])
expected, its_scale = reference.quantize(x, seed, 3, int8, "stochastic", [])
assert torch.equal(q, expected) and torch.equal(scale, its_scale)
product = cpu_kernels.gemm(GemmProduct(q, q.t(), None, None, None))
assert torch.equal(product, (q.int() @ q.t().int()).float())
print("path", _C.isa(), "refused", *_C.refused_isas())
from qsync_fx.cli import doctor_report
print(doctor_report.quantizer_text())
"""


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {
        name: value for name, value in os.environ.items() if name != "QSYNC_CPU_ISA"
    } | environment
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=variables,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("isa", PATHS)
def test_wrong_bit_of_any_kernel_is_detected(isa: str) -> None:
    assert _C.agrees(isa)
    try:
        for name, index in KERNELS:
            _C.corrupt(isa, name, index)
            assert not _C.agrees(isa), f"{name} {index}"
    finally:
        _C.restore()
    assert _C.agrees(isa)


@several
@pytest.mark.parametrize(("kernel", "variant"), [("quantize", 0), ("multiply", 0), ("sgd", 19)])
def test_wrong_variant_is_refused_and_the_next_one_is_used(kernel: str, variant: int) -> None:
    done = run(QUANTIZED, kernel, str(variant))
    assert done.returncode == 0, done.stderr
    chosen, report = done.stdout.splitlines()
    first, second = PATHS[:2]
    assert chosen == f"path {second} refused {first}"
    assert (
        f"RuntimeWarning: qsync_fx: the {first} kernels give other results than the scalar ones"
        in done.stderr
    )
    assert (
        report.startswith(f"{second} (of ")
        and f"; {first} computes wrong results on this processor" in report
    )


@several
def test_requested_wrong_variant_is_an_error() -> None:
    done = run(QUANTIZED, "quantize", "0", QSYNC_CPU_ISA=PATHS[0])
    assert (
        f"OptionError: the path '{PATHS[0]}' gives other results than the scalar one" in done.stderr
    )
    assert "QSYNC_CPU_ISA" in done.stderr and not done.stdout


def test_correct_variant_is_not_refused() -> None:
    done = run("from qsync_fx import _C; print(_C.isa(), _C.refused_isas())")
    assert done.stdout.strip() == f"{PATHS[0]} []" and not done.stderr


def test_absent_kernel_is_none() -> None:
    for isa, name, index in (
        ("quantum", "keep", 0),
        (PATHS[0], "kept", 0),
        (PATHS[0], "keep", 1),
        (PATHS[0], "keep", -1),
    ):
        with pytest.raises(ValueError, match=r"is not one of|there is no kernel"):
            _C.corrupt(isa, name, index)
