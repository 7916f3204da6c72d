"""Trace files that are modified or constructed, not written by a profiler."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Edit = Callable[[dict[str, Any]], object]


def edited(folder: Path, into: Path, edit: Edit, name: str = "kineto-0.json") -> Path:
    tree = json.loads((folder / name).read_text())
    edit(tree)
    path = into / name
    path.write_text(json.dumps(tree))
    return path


def device_trace() -> dict[str, Any]:
    """Return a trace in the format of two A100 (Holistic Trace Analysis, MIT) with delayed kernels.

    Each of its two steps has a forward kernel of 10 us, a gap of 5, a backward kernel of 20, an
    all-reduce of 30 without overlap, an optimizer kernel of 7, and a gap of 3 before the next step.
    """
    events: list[dict[str, Any]] = []

    def event(
        category: str, name: str, track: int, begin: float, duration: float, **args: object
    ) -> None:
        fields = {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": 1,
            "tid": track,
            "ts": begin,
            "dur": duration,
        }
        events.append({**fields, "args": args})

    numbers = iter(range(1000))

    def launch(
        name: str, host: float, device: float, duration: float, stream: int = 7, **args: object
    ) -> None:
        number = next(numbers)
        event("cuda_runtime", "cudaLaunchKernel", 1, host, 0.1, correlation=number)
        event("kernel", name, stream, device, duration, correlation=number, **args)

    for index, begin in enumerate((0.0, 75.0)):
        event("user_annotation", f"ProfilerStep#{index}", 1, begin, 74)
        event("cpu_op", "aten::linear", 1, begin + 1, 2, **{"Sequence number": index})
        launch("gemm", begin + 2, begin + 100, 10)
        event(
            "cpu_op",
            "autograd::engine::evaluate_function: AddmmBackward0",
            1,
            begin + 4,
            2,
            **{"Sequence number": index},
        )
        launch("gemm_backward", begin + 5, begin + 115, 20)
        nccl = {"Collective name": "allreduce", "In msg nelems": 64, "dtype": "Half"}
        launch("ncclDevKernel_AllReduce_Sum_f16_RING_LL", begin + 6.5, begin + 135, 30, 40, **nccl)
        event("user_annotation", "Optimizer.step#SGD.step", 1, begin + 8, 5)
        launch("sgd", begin + 9, begin + 165, 7)
    return {"traceEvents": events, "distributedInfo": {"rank": 1, "world_size": 2}}
