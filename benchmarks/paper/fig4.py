"""Cost of an operator by format: its computation and the conversions around it (QSync, Fig. 4).
The operators are the second last convolution of VGG-16 and a linear layer of an attention block of
BERT-base, in both passes. Rows of a T4 are predicted from the catalog, at the batches of QSync's
Table IV; rows of "cpu" are of a profile measured on this machine, at smaller batches. Columns:
"casts_ms" are conversions of the input and the weight in the forward pass (the paper's cvt_cost),
"casts_backward_ms" those that the backward pass adds (bp_cost), "compute_ms" is the operator itself
in both passes (cpt_cost), "casts_%" the share of both conversions, and "to_fp32" the sum relative
to FP32. A measured operator whose kernel converts its operands has no conversions of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx import Plan
from qsync_fx.devices import get
from qsync_fx.predictor.analytic_times import DeviceTimes
from qsync_fx.predictor.cost_mapper import CostMapper
from qsync_fx.predictor.cost_mapper.times import Part, Times
from qsync_fx.predictor.model import ModelGraph
from qsync_fx.profiler.model_graph_builder import build_model_graph

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.harness import Row, arguments, by_size, finish

T4, CPU = "t4", "cpu"
FORMATS = {T4: ("fp32", "fp16", "int8"), CPU: ("fp32", "bf16", "int8")}
TOKENS, WIDTH, CHANNELS, SIDE = 384, 768, 512, 14


@dataclass(frozen=True)
class Operator:
    """An operator, and the shape of its input without the batch; batches by device."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batches: Mapping[str, int]


OPERATORS = {
    "VGG-16, convolution 512 x 512": Operator(
        lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        (CHANNELS, SIDE, SIDE),
        {T4: 128, CPU: 8},
    ),
    "BERT-base, linear 768 x 768": Operator(
        lambda: nn.Linear(WIDTH, WIDTH), (TOKENS, WIDTH), {T4: 12, CPU: 2}
    ),
}


class BetweenActivations(nn.Module):
    """The operator between an activation, through which a gradient flows back, and a mean."""

    def __init__(self, operator: nn.Module) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.operator(values.relu()).square().mean()
        return result


def main() -> None:
    options = arguments(
        __doc__, rounds={"type": int, "default": 15, "help": "of the measurement (%(default)s)"}
    )
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name, operator in OPERATORS.items():
        for device in (T4, CPU):
            batch = by_size(options.quick, 1, operator.batches[device])
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = BetweenActivations(operator.build()).train()
            values = torch.randn(batch, *operator.shape, requires_grad=True)
            graph, times = timed(model, values, device, by_size(options.quick, 2, options.rounds))
            rows += costs(name, device, batch, graph, times)
    finish(options, rows)


def timed(model: nn.Module, values: Tensor, device: str, rounds: int) -> tuple[ModelGraph, Times]:
    """Return the graph of a model and the times of its operators on a device."""
    if device == T4:
        explanation = qsync_fx.explain(model, values, options={"target": T4})
        graph = build_model_graph(explanation, FORMATS[T4])
        return graph, DeviceTimes(get(T4), graph)
    profile = qsync_fx.measure(
        model,
        lambda model, batch: model(batch),
        [values],
        FORMATS[CPU],
        repeats=rounds,
        sensitivity=None,
    )
    return profile.graph, profile.times()


def costs(name: str, device: str, batch: int, graph: ModelGraph, times: Times) -> list[Row]:
    """Return a row of the adjustable operator of a graph for each format."""
    (operator,) = (item.id for item in graph.operators if item.kind == "adjustable")
    rows: list[Row] = []
    for fmt in FORMATS[device]:
        schedule = CostMapper(graph, times, Plan.uniform(fmt)).schedule()
        passes = [
            [entry for entry in entries if entry.operator == operator]
            for entries in (schedule.forward, schedule.backward)
        ]
        total = sum(entry.seconds for entries in passes for entry in entries)
        forward, backward = (
            sum(entry.seconds for entry in entries if entry.part is Part.CAST) for entries in passes
        )
        rows.append(
            {
                "operator": name,
                "device": device,
                "batch": batch,
                "format": fmt,
                "casts_ms": 1e3 * forward,
                "casts_backward_ms": 1e3 * backward,
                "compute_ms": 1e3 * (total - forward - backward),
                "casts_%": 100 * (forward + backward) / total,
                "to_fp32": 1e3 * total / rows[0]["total_ms"] if rows else 1.0,
                "total_ms": 1e3 * total,
            }
        )
    return rows


if __name__ == "__main__":
    main()
