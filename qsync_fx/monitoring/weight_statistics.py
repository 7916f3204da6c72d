"""Statistics of weights under the formats of the active plan, computed outside compiled code.

Invariant: weights are quantized to the nearest value, which draws no random number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from qsync_fx.backend.operators.quantize import quantize, round_to
from qsync_fx.diagnostics.coverage_report import plan_coverage
from qsync_fx.formats import FP32, Precision
from qsync_fx.module_paths import own_parameters, unwrapped
from qsync_fx.ops import Kind
from qsync_fx.plan_switching import options_of

_SAMPLE: Final = 2**14
"""Largest number of values of a weight that are rounded."""
_TINY: Final = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class OperatorWeight:
    """Weight of an adjustable operator, and the format in which the operator runs."""

    operator: str
    weight: Tensor
    precision: Precision


def operator_weights(model: nn.Module) -> Iterator[OperatorWeight]:
    """Yield the weights of compiled operators whose module has one parameter of two or more
    dimensions; others cannot be assigned to an operator without reading the graph.
    """
    modules = dict(unwrapped(model).named_modules())
    for part in plan_coverage(model).modules:
        adjustable = [ran for ran in part.operators if ran.kind is Kind.ADJUSTABLE]
        weights = [p for p in own_parameters(modules[part.path]) if p.dim() >= 2]
        if len(weights) == 1 and adjustable and adjustable[0].precision is not None:
            yield OperatorWeight(str(adjustable[0].id), weights[0], adjustable[0].precision)


@torch.no_grad()
def weight_statistics(model: nn.Module) -> dict[str, float]:
    """Return the statistics of all operator weights, as "statistic/operator"; see `monitor`."""
    per_channel = any(options.scaling == "channel" for options in options_of(model))
    names, values = list[str](), list[Tensor]()
    for item in operator_weights(model):
        for statistic, value in _statistics(item, per_channel).items():
            names.append(f"{statistic}/{item.operator}")
            values.append(value)
    if not values:
        return {}
    # One transfer from the device for all values.
    return dict(zip(names, torch.stack(values).tolist(), strict=True))


def _statistics(item: OperatorWeight, per_channel: bool) -> dict[str, Tensor]:
    weight, fmt, result = _local(item.weight), item.precision, dict[str, Tensor]()
    if item.weight.grad is not None:
        result["gradient_norm"] = torch.linalg.vector_norm(
            _local(item.weight.grad), dtype=torch.float32
        )
    if fmt.bits >= FP32.bits or not weight.numel():
        return result
    rows = weight.flatten(1) if per_channel and fmt.scaled else weight.reshape(1, -1)
    sample = rows[:, :: -(-rows.numel() // _SAMPLE)].float()
    seed = torch.zeros([1], dtype=torch.int64, device=weight.device)
    if fmt.scaled:
        # With the largest magnitude of each row, a sample has the scale of all values.
        values = torch.cat([sample, _largest(rows).float()], dim=1)
        quantized, scale = quantize(values, seed, 0, fmt.name, "nearest", [0])
        rounded = quantized[:, :-1].float() * scale
        result["scale"] = scale.max()
        extreme = quantized[:, :-1].float().abs() >= fmt.max
    else:
        rounded = round_to(sample, seed, 0, fmt.name, "nearest").float()
        extreme = rounded.abs() >= fmt.max
    result["saturation"] = extreme.float().mean()
    result["underflow"] = ((rounded == 0) & (sample != 0)).float().mean()
    power = sample.square().sum()
    result["rounding_error"] = (rounded - sample).square().sum() / power.clamp_min(_TINY)
    return result


def _largest(rows: Tensor) -> Tensor:
    """Return the largest magnitude of each row, [rows, 1]."""
    if len(rows) == 1:  # many times as fast on a CPU as a norm or a maximum of absolute values
        least, most = torch.aminmax(rows)
        return torch.maximum(-least, most).reshape(1, 1)
    return torch.maximum(-rows.amin(1, keepdim=True), rows.amax(1, keepdim=True))


def _local(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor, and any other tensor unchanged."""
    result: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return result.detach()
