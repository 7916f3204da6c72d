"""Copies and conversions on a GPU equal torch bit by bit: all layouts, streams, CUDA graphs, more
than 2^31 elements.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.cuda.codegen import NUMBERS
from qsync_fx.backend.cuda.problem import padding
from qsync_fx.backend.cuda.runtime import launch_utils, layout_convert
from qsync_fx.backend.operators.convert import FLOATS, TYPES, convert
from tests.gpu import kit

SHAPES = (
    (1, 1),
    (1, 7),
    (7, 1),
    (33, 5),
    (64, 256),
    (129, 1030),
    (1000, 777),
    (3, 100_003),
    (2048, 4096),
)
LAYOUTS = ("rows", "columns", "sliced", "shifted")


@pytest.fixture(autouse=True)
def _nothing_by_torch() -> None:
    launch_utils.forget()


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    for unit in (
        codegen.copier(kit.arch()),
        *(codegen.converter(kit.arch(), x) for x in NUMBERS),
    ):
        kit.library(unit)


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.itemsize])


def drawn(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return elements of random bit patterns, including NaN, infinities and denormals."""
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), device=kit.DEVICE, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def lying(t: Tensor, layout: str) -> Tensor:
    rows, columns = t.shape
    match layout:
        case "columns":
            return t.t().contiguous().t()
        case "sliced":
            return t.new_empty(rows + 1, columns + 19)[1:, 19:].copy_(t)
        case "shifted":
            return t.new_empty(rows * columns + 1)[1:].view(rows, columns).copy_(t)
        case _:
            return t


def wanted(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None, transposed: bool, shape: tuple[int, int]
) -> Tensor:
    """Return torch's result on the same device."""
    straight = x.t() if transposed else x
    values = straight if scale is None else straight.float() * scale
    return padding.laid_out(values.to(dtype), *shape, "row")


def assert_equal(actual: Tensor, want: Tensor) -> None:
    """Assert equal bits; floating-point NaN equals any NaN."""
    wrong = bits(actual) != bits(want)
    if want.is_floating_point():
        wrong &= ~(actual.float().isnan() & want.float().isnan())
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} values: {actual[wrong][:4]} for {want[wrong][:4]}"
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_copies_have_every_bit(dtype: torch.dtype) -> None:
    for shape, layout, transposed, more in itertools.product(
        SHAPES, LAYOUTS, (False, True), ((0, 0), (0, 16), (5, 3))
    ):
        x = lying(drawn(dtype, shape), layout)
        inner = shape[::-1] if transposed else shape
        room = (
            inner[0] + more[0],
            -(-(inner[1] + more[1]) // 16) * 16 if more[1] == 16 else inner[1] + more[1],
        )
        result = convert(x, transposed=transposed, shape=room)
        assert result.is_contiguous() and torch.equal(
            bits(result), bits(wanted(x, dtype, None, transposed, room))
        )
    assert not launch_utils.reasons()


@pytest.mark.parametrize("source", TYPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_conversions_are_torchs(source: torch.dtype, dtype: torch.dtype) -> None:
    scales = [
        None,
        *(torch.tensor(value, device=kit.DEVICE) for value in (0.0123, 2.0**-24, 600.0, 1e30)),
    ]
    for shape, layout, transposed in itertools.product(SHAPES, LAYOUTS, (False, True)):
        x = lying(drawn(source, shape), layout)
        inner = shape[::-1] if transposed else shape
        room = inner[0] + 1, -(-inner[1] // 16) * 16
        for scale in scales[:: 1 if shape == (129, 1030) else 2]:
            assert_equal(
                convert(x, dtype, scale, transposed, room),
                wanted(x, dtype, scale, transposed, room),
            )
    assert not launch_utils.reasons()


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32], ids=str
)
def test_images(dtype: torch.dtype) -> None:
    for shape in ((1, 3, 7, 9), (4, 24, 7, 9), (2, 3, 33, 65), (3, 130, 1, 1), (5, 1, 4, 4)):
        packed = drawn(dtype, shape)
        last = packed.view(torch.uint8 if dtype.itemsize == 1 else dtype).contiguous(
            memory_format=torch.channels_last
        )
        for x in (
            packed,
            last.view(dtype),
            drawn(dtype, (shape[0], shape[1] + 2, *shape[2:]))[:, 1:-1],
        ):
            for first, second in (x.shape[:2], (x.shape[0] + 1, -(-x.shape[1] // 16) * 16)):
                result, want = (
                    layout_convert.channels_last(x, first, second),
                    padding.channels_last(x, first, second),
                )
                assert result.stride() == want.stride()
                assert torch.equal(bits(result.permute(0, 2, 3, 1)), bits(want.permute(0, 2, 3, 1)))
    assert not launch_utils.reasons()


def test_more_than_two_to_the_31() -> None:
    """Offsets have 64 bits for both orientations; needs 5 GB."""
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("not enough memory")
    x = torch.zeros(46_341, 46_341, dtype=torch.int8, device=kit.DEVICE)
    assert x.numel() > 2**31
    marks = [(0, 0), (46_340, 46_340), (46_340, 5), (7, 46_340), (23_171, 30_000)]
    for value, (row, column) in enumerate(marks, 1):
        x[row, column] = value
    for transposed in (False, True):
        result = convert(x, transposed=transposed, shape=(46_342, 46_352))
        assert int(result.count_nonzero()) == len(marks)
        for value, (row, column) in enumerate(marks, 1):
            assert result[(column, row) if transposed else (row, column)] == value
    assert not launch_utils.reasons()


def test_custom_stream_and_cuda_graph() -> None:
    x = drawn(torch.int8, (513, 2050))
    want = wanted(x, torch.int8, None, True, (2050, 528))
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        late = x.clone()
        result = convert(late, transposed=True, shape=(2050, 528))
    side.synchronize()
    assert torch.equal(result, want)
    graph = torch.cuda.CUDAGraph()
    static = torch.zeros_like(x)
    with torch.cuda.graph(graph):
        result = convert(static, transposed=True, shape=(2050, 528))
    static.copy_(x)
    graph.replay()
    assert torch.equal(result, want) and not launch_utils.reasons()


def test_empty() -> None:
    for shape in ((0, 8), (8, 0), (0, 0)):
        result = convert(torch.empty(shape, dtype=torch.int8, device=kit.DEVICE), shape=(16, 32))
        assert result.shape == (16, 32) and not result.any()
    assert convert(torch.empty(0, 8, device=kit.DEVICE)).shape == (0, 8)
