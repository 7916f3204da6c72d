"""Device files in TOML: the catalog is consistent, and user files are parsed exactly or rejected
with an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

import qsync_fx
from qsync_fx import devices
from qsync_fx.devices import TARGETS, Device
from qsync_fx.devices.device_model import DEVICE
from qsync_fx.devices.format_support import CUDA_SINCE
from qsync_fx.errors import DeviceError, OptionError
from qsync_fx.formats import FORMATS, encoding
from qsync_fx.options import Options
from tests.support.models.small_models import Perceptron

CATALOG = Path(devices.__file__).parent / "catalog"
PLAIN = """
title = "plain"
kind = "cpu"
processors = 1
clock = 1e9
source = "made up"
memory = {bytes = 1, bandwidth = 1e9, source = "made up"}
units.fp32 = {peak = 1e9, source = "made up"}
"""
T4 = (CATALOG / "t4.toml").read_text()


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QSYNC_DEVICES", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("path", sorted(CATALOG.glob("*.toml")), ids=lambda path: path.stem)
def test_catalog_device_has_the_name_of_its_file_and_its_units(
    path: Path,
) -> None:
    device = devices.get(path.stem)
    assert device.name == path.stem
    assert device is devices.get(path)
    assert device.kind == "cpu" or TARGETS[path.stem] == device.capability
    narrow = {encoding(fmt).name for fmt in FORMATS.values() if fmt.bits < 32}
    since = {
        name for name in narrow if TARGETS.get(path.stem, (0, 0)) >= CUDA_SINCE.get(name, (99, 0))
    }
    assert device.kind == "cpu" or device.units.keys() & narrow == since
    assert all(device.unit(fmt).name in device.units for fmt in FORMATS.values())
    assert device.gemm_seconds(512, 512, 512, "int8") > 0


def test_cyclic_calibration_is_rejected(mine: Path) -> None:
    for name, other in (("one", "two"), ("two", "one")):
        text = f'name = "{name}"\ncalibrated_as = "{other}"\n' + PLAIN
        (mine / f"{name}.toml").write_text(text)
    with pytest.raises(DeviceError, match="one and two refer to each other"):
        devices.get("one").gemm_seconds(8, 8, 8, "fp32")


def test_explain_targets_equal_the_catalog() -> None:
    server = "v100 t4 a2 a10 a30 a40 a100 l4 l40 l40s h100 h200 b200"
    geforce = (
        "2060 2070 2080 2080-ti 3060 3070 3080 3090 4060 4070 4080 4090 "
        "5060 5060-ti 5070 5070-ti 5080 5090 a4000 a5000 a6000"
    )
    assert set(TARGETS) == {*server.split(), *(f"rtx-{name}" for name in geforce.split())}
    assert "epyc-9004" in devices.names()
    assert "epyc-9004" not in TARGETS


def test_device_file_is_found_by_name_and_path(mine: Path) -> None:
    (mine / "slow.toml").write_text(
        T4.replace('name = "t4"', 'name = "slow"').replace("processors = 40", "processors = 4")
    )
    slow = devices.get("slow")
    assert (slow.processors, slow.name) == (4, "slow")
    assert "slow" in devices.names()
    for target in ("slow", str(mine / "slow.toml")):
        explanation = qsync_fx.explain(
            Perceptron(), torch.randn(4, 16), options={"precision": "bf16", "target": target}
        )
        assert {str(op.precision) for op in explanation.operators if op.kind == "adjustable"} == {
            "fp16"
        }
        assert f"target {target} (compute capability 7.5)" in str(explanation)
    (mine / "slow.toml").write_text(
        T4.replace('name = "t4"', 'name = "slow"').replace("processors = 40", "processors = 8")
    )
    assert devices.get("slow").processors == 8
    (mine / "t4.toml").write_text(T4.replace("processors = 40", "processors = 41"))
    assert devices.get("t4").processors == 41


def test_the_users_configuration_is_looked_in_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platformdirs.user_config_path", lambda *a, **k: tmp_path)
    (tmp_path / "devices").mkdir()
    shutil.copy(CATALOG / "t4.toml", tmp_path / "devices" / "mine.toml")
    assert devices.get("mine").title == "NVIDIA T4"


def test_unknown_device_names_the_nearest() -> None:
    with pytest.raises(DeviceError, match="unknown device 'v10'") as raised:
        devices.get("v10")
    assert "did you mean 'v100'?" in str(raised.value)
    with pytest.raises(DeviceError, match="cannot be read"):
        devices.get("./nowhere.toml")
    with pytest.raises(OptionError, match="cannot be 'v10'"):
        Options(target="v10")
    with pytest.raises(OptionError, match="cannot be 'epyc-9004'"):
        Options(target="epyc-9004")
    with pytest.raises(DeviceError, match="cannot be read"):
        Options(target="./nowhere.toml")


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("rtx3090", "rtx-3090"),
        ("RTX 3090", "rtx-3090"),
        ("3090", "rtx-3090"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-2080-ti"),
        ("a6000", "rtx-a6000"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("Tesla T4", "t4"),
        ("NVIDIA H200", "h200"),
        ("EPYC 9004", "epyc-9004"),
    ],
)
def test_usual_spelling_finds_the_device(spelling: str, name: str) -> None:
    assert devices.get(spelling) is devices.get(name)
    if devices.get(name).kind == "gpu":
        assert TARGETS[spelling] == TARGETS[name]
        assert Options(target=spelling).target == name


@pytest.mark.parametrize("other", ["RTX 3090 Ti", "NVIDIA GeForce RTX 4090 Laptop GPU", "rtx", ""])
def test_other_device_is_not_taken_for_one_of_the_catalog(other: str) -> None:
    with pytest.raises(DeviceError, match="unknown device") as raised:
        devices.get(other)
    assert "qsync devices propose" in (raised.value.do or "")


WRONG = {
    "name = ": ("is not valid TOML", "t4.toml"),
    'name = "t4"\nname = "t4"': ("is not valid TOML", "t4.toml"),
    T4.replace("processors", "procesors"): (
        "unknown field 'procesors'",
        "did you mean 'processors'?",
    ),
    T4.replace("processors = 40", "processors = 0"): (
        "processors = 0, which is not positive",
        "howto-device",
    ),
    T4.replace("processors = 40", "processors = 40.5"): ("an integer", "processors"),
    T4.replace("processors = 40\n", ""): ("lacks the field 'processors'", "howto-device"),
    T4.replace("capability = [7, 5]\n", ""): (
        "has no capability, which a GPU needs",
        "howto-device",
    ),
    T4.replace("capability = [7, 5]", "capability = [7]"): ("a list of 2", "capability"),
    T4.replace("capability = [7, 5]", "capability = [75, -1]"): (
        "capability = [75, -1]",
        "howto-device",
    ),
    T4.replace("bandwidth = 320e9", "bandwidth = nan"): ("a number", "memory.bandwidth"),
    T4.replace("bandwidth = 320e9", 'bandwidth = "fast"'): (
        "has text instead of a number",
        "memory.bandwidth",
    ),
    T4.replace("fraction = 0.65", "fraction = 6.5"): ("fraction = 6.5", "memory"),
    T4.replace("[units.int8]", "[units.int9]"): (
        "units of an unknown format 'int9'",
        "did you mean 'int8'?",
    ),
    T4.replace("[units.fp32]", "[units.tf32]"): ("has no unit for fp32", "howto-device"),
    T4.replace('source = "the data sheet, dense"', 'source = " "'): (
        "does not name the origin of its constants",
        "units.fp32",
    ),
    T4.replace('name = "t4"', 'name = "../t4"'): ("has the name '../t4'", "howto-device"),
    T4 + '\n[link]\nbandwidth = 0\nlatency = 0\nsource = "x"\n': (
        "bandwidth = 0.0, which is not positive",
        "link",
    ),
    T4 + '\n[[reductions]]\nranks = 3\nbytes = [1, 2]\nseconds = [1]\nsource = "x"\n': (
        "2 sizes but 1 times",
        "reductions[",
    ),
    T4 + '\n[[reductions]]\nranks = 3\nbytes = [1, 2]\nseconds = [2, 1]\nsource = "x"\n': (
        "times that are not positive or decrease",
        "reductions[",
    ),
    T4 + '\n[products.bf16]\nefficiency = 1\nlayouts.tt = 1\nsource = "x"\n': (
        "an unknown layout 'tt'",
        "products.bf16",
    ),
    T4 + '\n[convolutions.bf16.sideways]\nefficiency = 1\nsource = "x"\n': (
        "an unknown product 'sideways'",
        "howto-device",
    ),
    T4 + '\n[products.bf16]\nefficiency = 1\nalone = 1.5\nsource = "x"\n': (
        "alone = 1.5",
        "products.bf16",
    ),
    T4 + '\n[products.bf16]\nefficiency = 1\ntallest = 1\nsource = "x"\n': (
        "true or false",
        "tallest",
    ),
    **{
        T4 + f'\n[convolutions.bf16.output]\nefficiency = 1\n{name} = {value}\nsource = "x"\n': (
            f"{name} = {value}",
            "output",
        )
        for name, value in (
            ("pointwise", 33),
            ("winograd_smallest", 0),
            ("places", 0),
            ("ordinary", 0.0),
            ("floor", -1.0),
            ("weights", -1.0),
        )
    },
}


@pytest.mark.parametrize("text", WRONG, ids=[message for message, _ in WRONG.values()])
def test_invalid_device_file_is_an_error_with_a_remedy(text: str, mine: Path) -> None:
    message, also = WRONG[text]
    assert text != T4
    (mine / "t4.toml").write_text(text)
    with pytest.raises(DeviceError) as raised:
        devices.get("t4")
    assert message in str(raised.value), str(raised.value)
    assert also in str(raised.value), str(raised.value)
    assert str(mine / "t4.toml") in (raised.value.where or "")
    assert raised.value.do


def test_unreadable_device_file_is_rejected(mine: Path) -> None:
    (mine / "folder.toml").mkdir()
    (mine / "large.toml").write_text("#" * 2**21)
    (mine / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    (mine / "deep.toml").write_text("a = " + "[" * 5000)
    for name, message in (
        ("large", "larger than"),
        ("bytes", "not valid UTF-8"),
        ("deep", "nested too deeply|not TOML"),
    ):
        with pytest.raises(DeviceError, match=message):
            devices.get(name)
    with pytest.raises(DeviceError, match="Is a directory"):
        devices.get(mine / "folder.toml")


LINES = T4.splitlines()


@given(
    st.integers(0, len(LINES) - 1),
    st.sampled_from(
        ["", "= 1", "x = -1", "x = 1e999", "[x]", '"', "peak = inf", "bytes = -5", "[memory]"]
    ),
)
def test_fuzzed_device_file_is_valid_or_an_error(index: int, line: str) -> None:
    text = "\n".join([*LINES[:index], line, *LINES[index + 1 :]])
    try:
        result: object = DEVICE.decode(text.encode())
    except DeviceError as wrong:
        result = wrong
    assert isinstance(result, Device) or (isinstance(result, DeviceError) and result.what)


def test_import_of_the_package_reads_no_file_of_a_device() -> None:
    code = (
        "import sys, pathlib; opened = []\n"
        "sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == 'open' else "
        "None)\n"
        "import qsync_fx.options; print([name for name in opened if name.endswith('.toml')])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


NAMES = {
    "gemm": "matrix product",
    "output": "convolution",
    "input_gradient": "gradient of its input",
    "weight_gradient": "gradient of its weight",
}
ROOT = Path(__file__).resolve().parents[2]


def test_all_products_together_are_the_mean_over_every_time_that_was_measured() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "catalog.json").read_text())["rows"]
    products, pooled = (
        [row for row in rows if row["product"] in NAMES],
        [row for row in rows if row["device"] == "all"],
    )
    points = sum(row["points"] for row in products)
    assert [row["points"] for row in pooled] == [points]
    for key in ("held_out_mape", "catalog_mape"):
        assert pooled[0][key] == pytest.approx(
            sum(row["points"] * row[key] for row in products) / points
        )


def test_page_equals_the_catalog_benchmark() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "catalog.json").read_text())["rows"]
    lines = [
        "| work | device | format | measured | held out, mean | held out, median | by the catalog "
        "|",
        "| --- " * 7 + "|",
    ]
    for row in rows:
        name, fmt = NAMES.get(row["product"], row["product"]), row["precision"] or "fp32"
        keys = "held_out_mape", "held_out_median", "catalog_mape"
        errors = (f"{100 * row[key]:.1f}%" if key in row else "" for key in keys)
        lines.append(
            "| " + " | ".join([name, row["device"], fmt, str(row["points"]), *errors]) + " |"
        )
    page = ROOT / "docs" / "device-catalog.md"
    text = page.read_text()
    section = re.search(r"(?<=<!-- catalog -->\n\n).*?(?=\n*<!-- end -->)", text, flags=re.DOTALL)
    assert section is not None
    if os.environ.get("QSYNC_UPDATE_DOCS") == "1":
        page.write_text(text[: section.start()] + "\n".join(lines) + "\n" + text[section.end() :])
    else:
        assert section[0].splitlines() == lines
