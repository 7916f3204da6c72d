"""Throughput of the gradient codecs on a GPU, compared with a device copy.
Codecs run fused by Inductor and as eager operators, with and without transfer to the host. Runs are
interleaved; times are medians. "gb_s" counts FP32 values and encoded bytes once each, and "of_copy"
is this rate divided by the rate of a copy, which counts reads and writes. "to the host" encodes,
copies to pinned host memory and waits, as a rank does before sending; "from the host" is the
reverse. Cases have 26 MB and 100 MB of gradients.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.measuring import Call, Rows, errors, measure, read
from benchmarks.support.harness import Row, by_size
from qsync_fx.communication.codecs import buffers, codec_named, torch_kernels
from qsync_fx.communication.codecs.codec import Codec, Draw

NAMES = ("qsgd8", "qsgd4", "qsgd2", "qsgd16", "1bit*", "bf16")
VALUES = {"26 MB": 6_500_352, "100 MB": 25_000_448}


def cases(codec: Codec, n: int, device: torch.device) -> tuple[dict[str, Call], dict[str, int]]:
    """Return the calls, and the bytes that each moves in device memory."""
    x = torch.randn(n, device=device) * 1e-3
    left = torch.zeros_like(x) if codec.residual else None
    wire = torch.zeros(codec.nbytes(n), dtype=torch.uint8, device=device)
    sent, decoded, other, draw = (
        buffers.host(wire.numel(), device),
        torch.empty_like(x),
        torch.empty_like(x),
        Draw(1, 2),
    )
    failed = torch_kernels._failed

    def encode() -> None:
        codec.encode(x, wire, draw, left)

    def decode() -> None:
        codec.decode(wire, decoded)

    def by_operators(call: Call) -> Call:
        def called() -> None:
            failed.append("told so by a benchmark")
            call()
            failed.clear()

        return called

    def to_host() -> None:
        encode()
        sent.copy_(wire)

    def from_host() -> None:
        codec.decode(buffers.on_device_of(sent, decoded), decoded)
        buffers.synchronize(decoded)

    calls: dict[str, Call] = {
        "copy": lambda: other.copy_(x),
        "encode": encode,
        "decode": decode,
        "encode by operators": by_operators(encode),
        "decode by operators": by_operators(decode),
        "to the host": to_host,
        "from the host": from_host,
    }
    moved = dict.fromkeys(calls, x.nbytes + wire.numel())
    return calls, moved | {"copy": 2 * x.nbytes}


def rows_of(case: str, codec: Codec, n: int, options: argparse.Namespace) -> list[Row]:
    calls, moved = cases(codec, n, options.device)
    for call in calls.values():
        call()
    times, failed = measure(calls, options, rounds=9)
    rate = {name: moved[name] / times.median(name) for name in times}
    rows: list[Row] = []
    for name in times:
        row: dict[str, Any] = {"case": case, "name": name, "microseconds": times.median(name) * 1e6}
        row |= {"gb_s": rate[name] / 1e9, "of_copy": rate[name] / rate["copy"]}
        rows.append(row)
    return rows + errors(case, failed)


def main() -> None:
    options = read(__doc__)
    rows = Rows(options)
    sizes = by_size(options.quick, {"0.1 MB": 25_088}, VALUES)
    results = {
        f"{name}, {size}": (codec_named(name), n) for size, n in sizes.items() for name in NAMES
    }
    for case in rows.wanted(list(results)):
        rows.add(*rows_of(case, *results[case], options))
    rows.finish()


if __name__ == "__main__":
    main()
