"""Default precision on a CPU: BF16 only if the CPU has a BF16 unit."""

from __future__ import annotations

import pytest
import torch

from qsync_fx.devices import cpu_features, format_support
from qsync_fx.devices.cpu_features import Cpu

CASES = [
    (True, ("avx2", "avx512", "vnni", "bf16"), "", True),
    (True, ("avx2", "avx512", "vnni", "bf16", "amx"), "", True),
    (
        True,
        ("avx2", "avx512", "vnni"),
        "",
        False,
    ),  # torch reports support, oneDNN converts
    (False, ("avx2",), "", False),
    (True, (), "", True),  # a CPU without known features: torch decides
    (False, (), "", False),
    (True, ("avx2", "avx512", "bf16"), "avx512_core_vnni", False),
    (True, ("avx2", "avx512", "bf16"), "AVX512_CORE_BF16", True),
]


@pytest.mark.parametrize(("supported", "features", "narrowed", "native"), CASES)
def test_default_is_bf16_with_a_native_unit(
    monkeypatch: pytest.MonkeyPatch,
    supported: bool,
    features: tuple[str, ...],
    narrowed: str,
    native: bool,
) -> None:
    monkeypatch.setattr(
        torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported, raising=False
    )
    monkeypatch.setattr(cpu_features, "cpu", lambda: Cpu("a processor", features, 1, 1))
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", narrowed)
    assert cpu_features.native_bf16_unit() is native
    format_support.forget()
    try:
        assert str(format_support.default_precision(torch.device("cpu"))) == (
            "bf16" if native else "fp32"
        )
    finally:
        format_support.forget()
