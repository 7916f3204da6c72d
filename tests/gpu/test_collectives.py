"""NCCL collectives on one GPU with a single rank: values equal gloo's on the CPU, and the host does
not wait for the device within a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from qsync_fx.communication.allreduce import Reducer
from qsync_fx.communication.bucket import Bucket, piece
from qsync_fx.communication.codecs import codec_named
from qsync_fx.communication.compressor_state import CompressorState
from tests.gpu import kit

CODECS = ("fp32", "fp16", "qsgd8", "qsgd4", "qsgd2", "1bit*", "1bit")
SHAPES = ((400, 300), (1031,), (7, 5, 3, 3), (129,))


@pytest.fixture
def groups() -> Iterator[dict[str, Any]]:
    """Yield groups of one rank by device type, and the control group."""
    store = distributed.HashStore()
    distributed.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        yield {
            "control": distributed.new_group(backend="gloo"),
            "cpu": distributed.new_group(backend="gloo"),
            "cuda": distributed.new_group(backend="nccl"),
        }
    finally:
        distributed.destroy_process_group()


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Raise if the host waits for a GPU."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def reduced(name: str, groups: dict[str, Any], device: torch.device) -> list[Tensor]:
    """Return results of both forms of reduction for three steps, and the error feedback."""
    state = CompressorState(0, 1, name, 7, device)
    reducer: Any = Reducer(groups["control"], state, collective=groups[device.type])
    codec = codec_named(name)
    codec.prepare(device)
    pieces = [piece(str(i), i, shape, codec, 1) for i, shape in enumerate(SHAPES)]
    generator, results = torch.Generator().manual_seed(0), []
    for step in range(3):
        values = torch.randn(sum(item.size for item in pieces), generator=generator).to(device)
        bucket = Bucket(0, step, values, pieces, ())
        sizes = [item.size for item in pieces]
        flats = [part.clone() for part in values.split(sizes)]
        others = [part.clone() for part in values.split(sizes)]
        # The first step allocates buffers and compiles.
        with no_waiting(device if step else torch.device("cpu")):
            reducer.reduce_scatter(bucket, flats)
            reducer.all_gather(bucket, [flat.clone() for flat in flats], flats)
            if not codec.residual:
                reducer._gather_and_sum(bucket, others)
            reducer.require_finite(values)
        results += [part.cpu() for part in (*flats, *others)]
    left = state.saved()
    return results + [left[kind][name] for kind in ("sent", "owned") for name in left[kind]]


@pytest.mark.parametrize("name", CODECS)
def test_nccl_gives_the_values_of_gloo(name: str, groups: dict[str, Any]) -> None:
    expected = reduced(name, groups, torch.device("cpu"))
    result = reduced(name, groups, kit.DEVICE)
    assert len(result) == len(expected)
    for wanted, made in zip(expected, result, strict=True):
        torch.testing.assert_close(made, wanted, rtol=0, atol=0)
