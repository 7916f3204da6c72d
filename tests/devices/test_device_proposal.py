"""Device files that are proposed from the properties that torch reports of a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from qsync_fx import devices
from qsync_fx.cli import main
from qsync_fx.devices.device_model import DEVICE
from qsync_fx.devices.device_proposal import OPERATIONS, operations, propose, proposed_name
from qsync_fx.errors import DeviceError


@dataclass(frozen=True)
class Recorded:
    """Fields of `torch.cuda.get_device_properties`, as a real GPU reports them."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    L2_cache_size: int
    clock_rate: int
    memory_clock_rate: int
    memory_bus_width: int


RTX_3090 = Recorded(
    name="NVIDIA GeForce RTX 3090",
    major=8,
    minor=6,
    multi_processor_count=82,
    total_memory=25447170048,
    L2_cache_size=6291456,
    clock_rate=1695000,
    memory_clock_rate=9751000,
    memory_bus_width=384,
)


def test_proposal_for_a_known_gpu_agrees_with_its_catalog_entry() -> None:
    proposed, entry = DEVICE.decode(propose(RTX_3090).encode()), devices.get("rtx-3090")
    assert (proposed.name, proposed.capability) == ("rtx-3090", entry.capability)
    assert proposed.processors == entry.processors
    assert proposed.clock == pytest.approx(entry.clock)
    assert proposed.memory.bandwidth == pytest.approx(entry.memory.bandwidth, rel=0.01)
    assert proposed.memory.cache == entry.memory.cache
    assert proposed.units.keys() == entry.units.keys()
    for fmt, unit in proposed.units.items():
        assert unit.peak == pytest.approx(entry.units[fmt].peak, rel=0.01), fmt
    assert proposed.gemm_seconds(2048, 2048, 2048, "bf16") == pytest.approx(
        entry.gemm_seconds(2048, 2048, 2048, "bf16"), rel=0.02
    )


@pytest.mark.parametrize("name", [n for n in devices.names() if devices.get(n).kind == "gpu"])
def test_peaks_of_the_catalog_are_operations_per_cycle(name: str) -> None:
    device = devices.get(name)
    assert device.capability is not None
    # The data sheet of the L40 gives half the rate of its chip in tensor cores, INT8 included.
    rates = operations(device.capability, "GeForce" in device.title or name == "l40")
    assert rates.keys() <= device.units.keys() | {"fp64"}
    for fmt, rate in rates.items():
        if fmt == "fp64" or (name, fmt) == ("l40", "int8"):
            continue
        peak = device.processors * device.clock * rate
        assert device.units[fmt].peak == pytest.approx(peak, rel=0.1), fmt


def test_newer_architecture_is_proposed_as_the_newest_known_one() -> None:
    newer = replace(RTX_3090, name='NVIDIA B300 "SXM6"', major=10, minor=3)
    device = DEVICE.decode(propose(newer).encode())
    assert (device.name, device.title) == ("b300-sxm6", "NVIDIA B300 SXM6")
    assert device.units.keys() == OPERATIONS[10, 0].keys()


def test_gpu_without_tensor_cores_or_clock_is_an_error_with_a_remedy() -> None:
    with pytest.raises(DeviceError, match=r"compute capability 6.1 has no tensor cores"):
        propose(replace(RTX_3090, major=6, minor=1))
    with pytest.raises(DeviceError, match="torch reports no clock_rate") as raised:
        propose(replace(RTX_3090, clock_rate=0))
    assert "howto-device" in (raised.value.do or "")


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop-gpu"),
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("GeForce", "gpu"),
    ],
)
def test_proposed_name_is_short_and_valid(reported: str, name: str) -> None:
    assert proposed_name(reported) == name


def test_proposed_file_is_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = replace(RTX_3090, name="NVIDIA GeForce RTX 3050", multi_processor_count=20)
    monkeypatch.setenv("QSYNC_DEVICES", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    assert main(["devices", "propose", "--output", str(tmp_path / "rtx-3050.toml")]) == 0
    assert devices.get("RTX 3050").processors == 20
    assert main(["devices", "propose"]) == 0
    assert capsys.readouterr().out == (tmp_path / "rtx-3050.toml").read_text()


def test_command_without_a_gpu_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.device_count():
        pytest.skip("this machine has a GPU")
    assert main(["devices", "propose"]) == 2
    error = capsys.readouterr().err
    assert "this machine has no GPU 0" in error and "howto-device" in error
