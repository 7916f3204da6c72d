"""Device files proposed from `torch.cuda.get_device_properties`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from qsync_fx import devices
from qsync_fx.cli import main
from qsync_fx.devices.device_model import DEVICE
from qsync_fx.devices.device_proposal import propose, proposed_name, template
from qsync_fx.errors import DeviceError


@dataclass(frozen=True)
class Recorded:
    """Fields of `torch.cuda.get_device_properties`, from the published data of a GPU."""

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


@pytest.mark.parametrize("name", ["rtx-3080", "rtx-a4000", "rtx-2070", "a10", "rtx-5060", "l4"])
def test_peaks_of_one_architecture_differ_by_processors_and_clock(name: str) -> None:
    device = devices.get(name)
    assert device.capability is not None
    like = template(device.capability, "GeForce" in device.title)
    scale = device.processors * device.clock / (like.processors * like.clock)
    for fmt, unit in like.units.items():
        # NVIDIA's tables of data center GPUs differ in the rate of FP64.
        if fmt != "fp64":
            assert device.units[fmt].peak == pytest.approx(scale * unit.peak, rel=0.05), fmt


@pytest.mark.parametrize(
    ("capability", "geforce", "name"),
    [
        ((7, 0), False, "v100"),
        ((7, 5), False, "t4"),
        ((8, 9), False, "l40s"),
        ((10, 3), False, "b200"),
        ((12, 1), False, "rtx-5"),
        ((8, 6), True, "rtx-30"),
        ((8, 6), False, "a"),
    ],
)
def test_template_is_of_the_same_architecture_and_kind(
    capability: tuple[int, int], geforce: bool, name: str
) -> None:
    chosen = template(capability, geforce).name
    assert chosen.startswith(name) or (name, chosen) in (("l40s", "l4"), ("a", "rtx-a4000"))


def test_newer_architecture_is_proposed_as_the_newest_of_the_catalog() -> None:
    newer = replace(RTX_3090, name='NVIDIA B300 "SXM6"', major=10, minor=3)
    device = DEVICE.decode(propose(newer).encode())
    assert (device.name, device.title) == ("b300-sxm6", "NVIDIA B300 SXM6")
    assert device.units.keys() == devices.get("b200").units.keys()
    assert device.gemm_seconds(512, 512, 512, "fp8") > 0


def test_old_gpu_or_one_without_a_clock_is_an_error_with_a_remedy() -> None:
    with pytest.raises(DeviceError, match=r"no GPU as old as compute capability 6.1"):
        propose(replace(RTX_3090, major=6, minor=1))
    with pytest.raises(DeviceError, match="torch reports no clock_rate") as raised:
        propose(replace(RTX_3090, clock_rate=0))
    assert "howto-device" in (raised.value.do or "")
    with pytest.raises(DeviceError, match="the catalog has the times of Tesla T4"):
        propose(replace(RTX_3090, name="Tesla T4", major=7, minor=5))


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


def test_list_has_each_device_of_the_catalog(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "list"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert {row[0] for row in rows} >= set(devices.names())
    assert next(row for row in rows if row[0] == "t4")[-1] == "own"
    assert main(["devices", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in listed] == devices.names()
    assert listed[devices.names().index("h200")]["host"]["launch"] == 5e-05
