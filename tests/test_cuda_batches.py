"""Kernels compiled many to a file: none is left out, and no file passes in which one would not."""

from __future__ import annotations

import cuda_batches
import cuda_compile_all
import pytest

from qsync_fx.backend.cuda import sass, toolchain
from qsync_fx.backend.cuda.unit import Unit
from qsync_fx.errors import ToolchainError

HEAD = (
    "namespace qsync { struct GemmArguments { float *x; int i; }; "
    "template <class C> __global__ void kernel(float *x, int i) { C::compute(x, i); } "
    "template <class C> struct Gemm { static int run(GemmArguments const &x, void *, cudaStream_t s) "
    "{ kernel<C><<<1, 1, 0, s>>>(x.x, x.i); return 0; } }; }"
)
MULTIPLIES = "x[0] = x[1] * x[2] + x[3];"
MULTIPLIES_MORE = "x[0] = x[1] * x[2] + x[3] * x[4] + x[5];"
ADDS = "x[0] = x[1] + x[2];"
KEEPS = "float kept[64]; for (int j = 0; j < 64; ++j) kept[j * i % 64] = x[j] * x[1] + kept[i % 64]; x[0] = kept[i * i % 64];"
WRONG = "y[0] = 1;"


def kernel(body: str) -> Unit:
    """A kernel as small as can be, in the form of those of products."""
    lines = (HEAD, "", "struct Config {", f"    static __device__ void compute(float *x, int i) {{ {body} }}", "};", "")
    return Unit("small", "sm_80", "\n".join((*lines, 'QSYNC_GEMM(Config, "small")')), "gemm", "FFMA")


@pytest.mark.parametrize(
    ("bodies", "passes"),
    [
        ([MULTIPLIES, MULTIPLIES_MORE], True),
        ([MULTIPLIES, ADDS], False),
        ([MULTIPLIES, KEEPS], False),
        ([MULTIPLIES, WRONG], False),
    ],
    ids=["right", "without its instruction", "with a stack", "wrong"],
)
def test_a_batch_passes_if_each_kernel_would(bodies: list[str], passes: bool) -> None:
    try:
        toolchain.toolchain("sm_80")
    except ToolchainError as error:
        pytest.skip(error.what)
    if sass.disassembler() is None:
        pytest.skip("nothing here can look for instructions")
    found = cuda_batches.compiled([kernel(body) for body in bodies])
    assert (found is not None) == passes
    if found is not None:
        assert (found.count, found.opcode) == (len(bodies), "FFMA")
        assert 0 < found.registers < 64


def test_what_does_not_pass_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    units = [kernel(ADDS + " " * number) for number in range(8)]
    passed = cuda_batches.Passed(1, "FFMA", 8, 1.0)
    asked = []

    def without_the_sixth(batch: list[Unit]) -> cuda_batches.Passed | None:
        asked.append(len(batch))
        return None if units[5] in batch else passed

    monkeypatch.setattr(cuda_batches, "compiled", without_the_sixth)
    found = cuda_batches.passing(units)
    assert [part for part, _ in found] == [units[:4], units[4:5], units[6:]]
    assert sorted(asked) == [1, 1, 2, 2, 4, 4, 8]


def test_every_product_and_convolution_is_in_one_batch() -> None:
    units = cuda_compile_all.units("sm_90a")
    batches = list(cuda_batches.batches(units))
    together = [unit for batch in batches for unit in batch]
    assert len(set(together)) == len(together)
    assert {unit for unit in units if unit not in together} == {
        unit for unit in units if unit.interface in ("quantize", "convert")
    }
    for batch in batches:
        assert len(batch) <= cuda_batches.TOGETHER[batch[0].heavy]
        assert len({(unit.arch, unit.interface, unit.opcode, unit.heavy) for unit in batch}) == 1
        assert all(unit.source.splitlines()[0] == batch[0].source.splitlines()[0] for unit in batch)


def test_a_file_holds_each_configuration_under_a_name_of_its_own() -> None:
    batch = next(iter(cuda_batches.batches(cuda_compile_all.units("sm_80"))))
    text = cuda_batches.text(batch)
    assert text.count("#include") == 1
    for number, unit in enumerate(batch):
        assert cuda_batches.structure(unit, f"Config{number}") in text
        assert f"<Config{number}>::run" in text


def test_the_summary_counts_each_kernel_once() -> None:
    units = [*cuda_compile_all.units("sm_75"), *cuda_compile_all.units("sm_89")]
    rows = [
        {"name": unit.name, "arch": unit.arch, "ok": unit is not units[0], "seconds": 0.5, "registers": number}
        for number, unit in enumerate(units)
    ]
    found = cuda_compile_all.summary(rows)
    assert sum(line["kernels"] for line in found) == len(units)
    assert sum(line["failed"] for line in found) == 1 and found[0]["failed"] == 1
    assert found[-1]["registers"] == len(units) - 1
    assert {line["format"] for line in found if line["product"] != "copy"} >= {"int8", "fp16", "fp8_e5m2", "fp32"}
