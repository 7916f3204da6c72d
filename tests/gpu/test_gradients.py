"""Gradient codecs on a GPU: bytes equal the CPU's, fused by Inductor or not; training of two ranks
that share the GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qsync_fx.communication.codecs import Codec, codec_named, torch_kernels
from qsync_fx.communication.codecs.casts import CastCodec
from qsync_fx.communication.codecs.codec import Draw
from qsync_fx.communication.codecs.onebit import Reshaped
from qsync_fx.communication.codecs.qsgd import Qsgd
from qsync_fx.communication.codecs.truncation import Truncated
from tests.gpu import kit
from tests.support.processes import ranks

CODECS = (
    *(Qsgd(bits, size, norm, layout) for bits,
    size in ((2, 128), (4, 512), (8, 512), (16, 8192)) for norm, layout in
      (("max", "sign"), ("two", "endpoints"))),
    Reshaped(64), Truncated(12), Truncated(28), codec_named("fp16"), codec_named("bf16"),
    codec_named("fp32"),
)  # fmt: skip
SIZES = (1, 511, 512, 40_000, 1_000_003)


def values(n: int) -> dict[str, torch.Tensor]:
    """Return small gradients, gradients of all magnitudes, zeros, and gradients with NaN and
    infinities.
    """
    generator = torch.Generator().manual_seed(n)
    plain = torch.randn(n, generator=generator) * 1e-3
    wide = torch.randn(n, generator=generator) * torch.logspace(-44, 38, n)
    broken = wide.clone()
    broken[n // 2 :: 7919] = torch.nan
    broken[n // 3 :: 9973] = torch.inf
    return {"plain": plain, "wide": wide, "zeros": torch.zeros(n), "broken": broken}


def coded(codec: Codec, x: torch.Tensor, draw: Draw) -> list[torch.Tensor]:
    wire = torch.zeros(codec.nbytes(x.numel()), dtype=torch.uint8, device=x.device)
    left = torch.full_like(x, 1e-4) if codec.residual else None
    codec.encode(x, wire, draw, left)
    decoded = torch.empty_like(x)
    codec.decode(wire, decoded)
    more = torch.ones_like(x)
    codec.decode(wire, more, add=True)
    return [made.cpu() for made in (wire, decoded, more, *([] if left is None else [left]))]


@pytest.mark.parametrize("implementation", ["fused", "operators"])
@pytest.mark.parametrize(
    "codec", CODECS, ids=lambda codec: f"{codec.name}-{getattr(codec, 'layout', '')}"
)
def test_bytes_and_values_equal_the_cpu(
    codec: Codec, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch_kernels, "_failed", [] if implementation == "fused" else ["told so by a test"]
    )
    for n in SIZES:
        for name, x in values(n).items():
            draw = Draw(0x123456789ABCDEF, 77, 512 * n)
            # NaN payloads of torch's 16-bit conversions differ between processors.
            skipped = 1 if isinstance(codec, CastCodec) else 0
            both = coded(codec, x, draw)[skipped:], coded(codec, x.to(kit.DEVICE), draw)[skipped:]
            for wanted, made in zip(*both, strict=True):
                torch.testing.assert_close(
                    made, wanted, rtol=0, atol=0, equal_nan=True, msg=f"{name}, {n}"
                )
    assert implementation == "operators" or not torch_kernels._failed, torch_kernels._failed


@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cpu", "cuda")], ids="-".join)
def test_gradients_equal_the_cpu(devices: tuple[str, str], tmp_path: Path) -> None:
    job: dict[str, Any] = {"script": "compressed_rank.py", "seconds": 120, "forked": False}
    names = ["qsgd8", "qsgd2", "1bit*", "1bit", "bf16", "aqgb16"]
    expected = ranks.results(
        "placed", 2, tmp_path / "cpu", codecs=names, devices=["cpu", "cpu"], **job
    )
    actual = ranks.results(
        "placed", 2, tmp_path / "gpu", codecs=names, devices=list(devices), **job
    )
    for name in names:
        assert [rank[name] for rank in actual] == [rank[name] for rank in expected], name


@pytest.mark.parametrize("sharded", [False, True])
def test_duo_needs_no_more_memory_than_training_without_it(sharded: bool, tmp_path: Path) -> None:
    job = {"codec": "duo4", "device": "cuda", "width": 1024, "offload": None, "sharded": sharded}
    rank = {"script": "duo_memory_rank.py", "seconds": 150, "forked": False}
    for peaks in ranks.results("allocator_peak", 2, tmp_path, **rank, **job):
        assert peaks["duo4"] <= 1.05 * peaks["None"], peaks


@pytest.mark.parametrize("offload", [False, True])
def test_duo_on_a_gpu_is_training_without_it(offload: bool, tmp_path: Path) -> None:
    cases = [("sgd", "accumulating"), ("adamw", "clipping"), ("adamw fused", "scaling")]
    job = {"cases": cases, "offload": offload, "device": "cuda"}
    rank = {"script": "duo_rank.py", "seconds": 150, "forked": False}
    for result in ranks.results("identical", 2, tmp_path, **rank, **job):
        for name, item in result.items():
            assert item["ahead"] == item["alone"], name


def test_trainings_on_a_gpu_keep_their_replicas_equal(tmp_path: Path) -> None:
    names = ["fp32", "qsgd8", "1bit*", "aqgb", "duo2"]
    first, second = ranks.results(
        "trains",
        2,
        tmp_path,
        script="compressed_rank.py",
        seconds=150,
        forked=False,
        codecs=names,
        device="cuda",
    )
    for name in names:
        assert first[name]["weights"] == second[name]["weights"], name
    assert first["fp32"]["distance"] < 1e-4
    assert first["qsgd8"]["distance"] < 0.1
