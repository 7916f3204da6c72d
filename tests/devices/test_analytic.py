"""Predicted times of operators on absent devices: close to published measurements, and monotonic in
the amount of work.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from qsync_fx import devices
from qsync_fx.devices import Device, get, names
from qsync_fx.devices.device_model import PRODUCTS
from qsync_fx.devices.roofline import interpolated
from qsync_fx.errors import DeviceError, PrecisionError
from qsync_fx.formats import FORMATS

T4, V100 = get("t4"), get("v100")

GEMMS = [
    # Baidu's DeepBench: device, format, layout, m, n, k, milliseconds.
    (T4, "fp32", "tn", 1760, 7000, 1760, 10.183),
    (T4, "fp32", "nn", 512, 24000, 2816, 16.338),
    (T4, "fp16", "tn", 5124, 9124, 2048, 5.069),
    (T4, "fp16", "nn", 2560, 64, 2560, 0.060),
    (T4, "int8", "nn", 5124, 1500, 2560, 1.807),
    (V100, "fp32", "nn", 2560, 7000, 2560, 6.948),
    (V100, "fp32", "tn", 7680, 16, 2560, 0.138),
    (V100, "fp16", "nt", 2048, 7133, 2048, 0.575),
    (V100, "fp16", "tn", 8448, 24000, 2816, 11.162),
]
CONVOLUTIONS = [
    # device, format, product, n, c, h, w, k, r, s, stride, padding, milliseconds.
    (T4, "fp32", "output", 16, 64, 56, 56, 64, 3, 3, 1, 1, 0.589),
    (T4, "fp32", "input_gradient", 16, 512, 7, 7, 512, 3, 3, 1, 1, 0.721),
    (T4, "fp16", "output", 16, 128, 28, 28, 128, 3, 3, 1, 1, 0.119),
    (T4, "fp16", "weight_gradient", 16, 64, 56, 56, 64, 3, 3, 1, 1, 0.378),
    (T4, "int8", "output", 2, 512, 7, 7, 2048, 1, 1, 1, 0, 0.026),
    (V100, "fp32", "output", 16, 512, 7, 7, 512, 3, 3, 1, 1, 0.273),
    (V100, "fp32", "input_gradient", 16, 64, 112, 112, 64, 1, 1, 1, 0, 0.166),
    (V100, "fp16", "output", 16, 64, 112, 112, 128, 3, 3, 1, 1, 0.355),
    (V100, "fp16", "weight_gradient", 16, 128, 56, 56, 256, 3, 3, 1, 1, 0.353),
    # Few channels, 7 x 7 images, and strides and paddings as large as the window.
    (T4, "fp16", "weight_gradient", 16, 3, 224, 224, 64, 7, 7, 2, 3, 6.555),
    (T4, "fp16", "weight_gradient", 16, 512, 14, 14, 48, 5, 5, 1, 2, 0.251),
    (T4, "fp16", "output", 16, 832, 7, 7, 128, 5, 5, 1, 2, 0.549),
    (T4, "int8", "output", 1, 832, 7, 7, 128, 5, 5, 1, 2, 0.284),
    (V100, "fp16", "weight_gradient", 16, 2048, 7, 7, 512, 1, 1, 2, 3, 0.356),
    (V100, "fp16", "input_gradient", 16, 2048, 7, 7, 512, 1, 1, 2, 3, 0.362),
    (V100, "fp32", "weight_gradient", 16, 512, 14, 14, 48, 5, 5, 1, 2, 0.240),
    (V100, "fp32", "weight_gradient", 16, 1024, 14, 14, 2048, 1, 1, 2, 0, 0.490),
    (V100, "fp32", "output", 8, 128, 56, 56, 256, 3, 3, 1, 1, 0.668),
]


@pytest.mark.parametrize("case", GEMMS, ids=lambda case: " ".join(map(str, case[:6])))
def test_matrix_product_times_approximate_measurements(case: Any) -> None:
    device, fmt, layout, m, n, k, milliseconds = case
    assert device.gemm_seconds(m, n, k, fmt, layout) == pytest.approx(milliseconds * 1e-3, rel=0.25)


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda case: " ".join(map(str, case[:12])))
def test_convolution_times_approximate_measurements(case: Any) -> None:
    device, fmt, product, *sizes, milliseconds = case
    assert device.conv_seconds(*sizes, fmt, product) == pytest.approx(milliseconds * 1e-3, rel=0.3)


def test_times_of_many_convolutions_are_those_of_each() -> None:
    sizes = [(n, c, 28, 28, 64, r, r, 1, 1, 1, 1) for n in (1, 16) for c in (3, 64) for r in (1, 3)]
    for device, fmt, product in itertools.product((T4, V100), ("fp32", "fp16"), PRODUCTS):
        each = [device.conv_seconds(*s[:7], s[7:9], s[9:], fmt, product) for s in sizes]
        assert device.convolutions_seconds(sizes, fmt, product) == pytest.approx(each, rel=1e-12)
    assert T4.convolutions_seconds([], "fp16") == []


def test_all_reduce_times_equal_measurements() -> None:
    """Source: nccl-tests on a server with NVLink, out of place."""
    for ranks, nbytes, seconds in [
        (2, 2**20, 70.14e-6),
        (2, 2**30, 47.61e-3),
        (8, 2**21, 101.3e-6),
        (8, 2**30, 13.969e-3),
    ]:
        assert V100.allreduce_seconds(nbytes, ranks) == pytest.approx(seconds, rel=0.02)
    assert V100.allreduce_seconds(2**31, 8) == pytest.approx(2 * V100.allreduce_seconds(2**30, 8))
    assert V100.allreduce_seconds(2**28, 1) == V100.allreduce_seconds(0, 8) == 0
    # Each of 4 devices sends 1.5 times the bytes, each of 8 sends 1.75 times.
    assert V100.allreduce_seconds(2**28, 4) != V100.allreduce_seconds(2**28, 8)
    assert get("a100").allreduce_seconds(1e9, 8) == pytest.approx(1.75e9 / 230e9, rel=0.05)


@settings(max_examples=60)
@given(
    st.sampled_from(["t4", "v100", "a100", "h100", "epyc-9004"]),
    st.sampled_from(["fp32", "fp16", "bf16", "int8", "fp8"]),
    st.lists(st.integers(1, 600), min_size=3, max_size=3),
    st.integers(0, 2),
    st.integers(1, 64),
)
def test_product_time_is_monotonic(
    name: str, fmt: str, sides: list[int], side: int, more: int
) -> None:
    sides = [8 * length for length in sides]
    larger = [length + 8 * more * (index == side) for index, length in enumerate(sides)]
    assert get(name).gemm_seconds(*larger, fmt) >= get(name).gemm_seconds(*sides, fmt) * (1 - 1e-9)


@settings(max_examples=60)
@given(
    st.sampled_from(["t4", "v100", "a100", "h100", "epyc-9004"]),
    st.sampled_from(["fp32", "fp16", "int8"]),
    st.sampled_from(PRODUCTS),
    st.sampled_from([(1, 0), (3, 1), (5, 2), (7, 3)]),
    st.sampled_from([1, 2]),
    st.tuples(st.integers(1, 40), st.integers(1, 300), st.integers(7, 60), st.integers(1, 300)),
    st.integers(1, 16),
)
def test_batch_time_is_monotonic(
    name: str,
    fmt: str,
    product: Any,
    window: tuple[int, int],
    stride: int,
    sizes: tuple[int, ...],
    more: int,
) -> None:
    """A larger batch is not faster, even if the library changes its algorithm."""
    (edge, padding), (n, c, high, k) = window, sizes
    few, many = (
        get(name).conv_seconds(batch, c, high, high, k, edge, edge, stride, padding, fmt, product)
        for batch in (n, n + more)
    )
    assert many >= few * (1 - 1e-9)


def test_old_or_missing_convolution_constants_are_valid(tmp_path: Path) -> None:
    """Files of early 0.1 versions have other constants."""
    text = (
        (Path(devices.__file__).parent / "catalog" / "t4.toml").read_text().partition("# Fitted")[0]
    )
    old = """
[products.fp32]
source = "x"
efficiency = 0.66
[convolutions.fp32.output]
source = "x"
efficiency = 0.7766
small_tiles = 0.2698
step = 8
splits = 2
overlap = 1.213
gather = 0.05
relayout = 1.4
strided = 0.6
winograd = 0.8757
winograd_fused = 0.6174
winograd_data = 0.8011
winograd_weights = 1.64
"""
    (tmp_path / "old.toml").write_text(text.replace('"t4"', '"old"') + old)
    (tmp_path / "bare.toml").write_text(text.replace('"t4"', '"bare"'))
    for name in ("old", "bare"):
        device = get(tmp_path / f"{name}.toml")
        for product in PRODUCTS:
            for fmt in ("fp32", "fp16"):
                batches = [
                    device.conv_seconds(n, 64, 56, 56, 64, 3, 3, 1, 1, fmt, product)
                    for n in (1, 8, 15, 16, 64)
                ]
                assert batches == sorted(batches)
                reference = T4.conv_seconds(64, 64, 56, 56, 64, 3, 3, 1, 1, fmt, product)
                assert reference / 4 < batches[-1] < reference * 4


@pytest.mark.parametrize("name", names())
def test_every_device_has_a_finite_time_for_everything(name: str) -> None:
    device = get(name)
    for fmt in FORMATS:
        assert (
            0 < device.gemm_seconds(1, 1, 1, fmt) < device.gemm_seconds(4096, 4096, 4096, fmt) < 100
        )
        for product in PRODUCTS:
            batches = [
                device.conv_seconds(n, 64, 28, 28, 64, 3, 3, 1, 1, fmt, product)
                for n in (16, 32, 64, 128)
            ]
            assert batches == sorted(batches)
            assert 0 < device.conv_seconds(1, 1, 5, 7, 3, 5, 7, (2, 1), (0, 3), fmt, product) < 1
        assert device.cast_seconds("fp32", fmt, 10**6) >= 0
    sizes = [0, 1, 10**3, 10**5, 10**6, 10**7, 10**8, 10**9]
    moved = [device.memory_seconds(size) for size in sizes]
    assert moved == sorted(moved)
    assert moved[0] == device.memory.launch
    beyond = device.memory_seconds(3 * 10**9) - device.memory_seconds(2 * 10**9)
    assert beyond == pytest.approx(1e9 / device.memory.bandwidth / device.memory.fraction)


def test_cast_time_on_t4_equals_the_cost_model_of_qsync() -> None:
    assert T4.cast_seconds("fp32", "fp16", 10**8) == pytest.approx(2.878e-11 * 10**8, rel=0.03)
    assert T4.cast_seconds("fp32", "int8", 10**8) > T4.cast_seconds("fp32", "fp16", 10**8)
    assert T4.cast_seconds("fp16", "fp16", 10**8) == T4.cast_seconds("fp32", "fp16", 0) == 0
    assert T4.cast_seconds("fp32", "fp16", 1) == T4.memory.launch
    # Tensors that fit in the cache are cast faster per element than larger tensors.
    small, large = (T4.cast_seconds("fp32", "fp16", n) / n for n in (6 * 10**5, 6 * 10**7))
    assert small < large / 2


def test_format_without_a_unit_has_the_time_of_its_emulation() -> None:
    assert T4.gemm_seconds(512, 512, 512, "bf16") == T4.gemm_seconds(512, 512, 512, "fp16")
    assert T4.gemm_seconds(512, 512, 512, "fp8") == T4.gemm_seconds(512, 512, 512, "fp32")
    assert V100.gemm_seconds(512, 512, 512, "int8") == V100.gemm_seconds(512, 512, 512, "fp16")
    assert get("a100").gemm_seconds(512, 512, 512, "fp8") == get("a100").gemm_seconds(
        512, 512, 512, "bf16"
    )
    assert T4.gemm_seconds(512, 512, 512, "int8_grad") == T4.gemm_seconds(512, 512, 512, "int8")
    assert T4.gemm_seconds(512, 512, 512, FORMATS["fp16"]) == T4.gemm_seconds(512, 512, 512, "fp16")


def test_constants_of_a_related_device_apply_to_its_peaks() -> None:
    large = (8192, 8192, 8192, "fp16")
    a100 = get("a100").gemm_seconds(*large)
    assert a100 == pytest.approx(V100.gemm_seconds(*large) * 125 / 312, rel=0.35)
    assert get("h100").gemm_seconds(*large) < a100


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda d: d.gemm_seconds(0, 8, 8, "fp16"), "m is 0, but must be"),
        (lambda d: d.gemm_seconds(8, 8, 8, "fp16", "tt"), "unknown layout 'tt'"),
        (
            lambda d: d.conv_seconds(1, 1, 2, 2, 1, 3, 3, 1, 0, "fp16"),
            "the window of 3 x 3 is larger than the input of 2 x 2",
        ),
        (lambda d: d.conv_seconds(1, 1, 8, 8, 1, 3, 3, 0, 0, "fp16"), "stride is 0, but must be"),
        (lambda d: d.conv_seconds(1, 1, 8, 8, 1, 3, 3, 1, -1, "fp16"), "padding is -1"),
        (
            lambda d: d.conv_seconds(1, 1, 8, 8, 1, 3, 3, 1, 1, "fp16", "forward"),
            "unknown product 'forward'",
        ),
        (lambda d: d.allreduce_seconds(-1, 2), "nbytes is -1, but must be"),
        (lambda d: d.allreduce_seconds(math.nan, 2), "nbytes is nan, but must be"),
        (lambda d: d.allreduce_seconds(1, 0), "ranks is 0, but must be"),
        (lambda d: d.memory_seconds(math.inf), "nbytes is inf, but must be"),
        (lambda d: d.cast_seconds("fp32", "fp16", -1), "numel is -1, but must be"),
    ],
)
def test_empty_work_is_rejected(ask: Any, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        ask(T4)


def test_unknown_formats_and_missing_links_are_named() -> None:
    with pytest.raises(PrecisionError, match="'fp17' is not a precision"):
        T4.gemm_seconds(8, 8, 8, "fp17")
    with pytest.raises(
        DeviceError, match="the device file of epyc-9004 has no data on all-reduces"
    ):
        get("epyc-9004").allreduce_seconds(1, 2)


@given(st.lists(st.floats(1, 1e9), min_size=2, max_size=8, unique=True), st.floats(1, 1e9))
def test_lines_between_points_pass_through_them_and_never_fall(
    sizes: list[float], size: float
) -> None:
    sizes = sorted(sizes)
    seconds = [1e-6 * (point + 1) for point in range(len(sizes))]
    assert [interpolated(sizes, seconds, point) for point in sizes] == pytest.approx(seconds)
    assert interpolated(sizes, seconds, size * 1.5) >= interpolated(sizes, seconds, size) * (
        1 - 1e-9
    )


def test_device_is_available_from_the_package() -> None:
    import qsync_fx

    assert isinstance(qsync_fx.devices.get("t4"), Device)
