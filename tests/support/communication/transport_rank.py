"""Rank process of the transport tests, started by tests/communication."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import distributed

import qsync_fx
from qsync_fx.communication.codecs import codec_named
from qsync_fx.communication.transport import COLLECTIVE, POINT_TO_POINT
from qsync_fx.distributed import compress
from qsync_fx.distributed.gradient_groups import agreed_transport, checked_transport
from tests.support.communication.compressed_training import parallel, refusal, said
from tests.support.processes import ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def choices(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the transports chosen with gloo and with a backend for CUDA."""
    fixed, adaptive = [codec_named("qsgd8")], [codec_named("fp32"), codec_named("aqgb")]
    requests = ("auto", POINT_TO_POINT, COLLECTIVE)
    results: dict[str, Any] = {"gloo": [checked_transport(name, fixed, CPU) for name in requests]}
    refusal(results, "gloo on cuda", lambda: checked_transport(COLLECTIVE, fixed, CUDA))
    refusal(results, "unknown", lambda: checked_transport("colective", fixed, CPU))
    distributed.destroy_process_group()

    def device_backend(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return distributed.ProcessGroupGloo(store, rank, size, timeout)

    distributed.Backend.register_backend("fabric", device_backend, devices=["cuda"])
    distributed.init_process_group(
        "cuda:fabric", store=distributed.HashStore(), rank=0, world_size=1
    )
    results["device"] = [checked_transport(name, fixed, CUDA) for name in requests]
    results["aqgb"] = [checked_transport(name, adaptive, CUDA) for name in requests[:2]]
    refusal(results, "aqgb on device", lambda: checked_transport(COLLECTIVE, adaptive, CUDA))
    return results


def agreement(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Request different transports per rank, and agree on one for "auto"."""
    results: dict[str, Any] = {}
    try:
        compress(parallel(), "qsgd8", transport=(COLLECTIVE, POINT_TO_POINT)[rank])
    except qsync_fx.RankError as error:
        results["differ"] = said(error)
    results["auto"] = [
        agreed_transport("auto", (first, second)[rank], 60)
        for first, second in (
            (POINT_TO_POINT, COLLECTIVE),
            (COLLECTIVE, POINT_TO_POINT),
            (POINT_TO_POINT, POINT_TO_POINT),
        )
    ]
    return results


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:])
