"""What codecs of gradients add to the variance of a model's gradients, by parameter.

Exact of the gradient at hand, in closed form where a codec rounds at random. Of a large gradient it is that of stretches all over it,
131,072 values.

Invariant: what is found is a function of the gradients alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from qsync_fx.communication.codecs import codec_named
from qsync_fx.plan.gradient_codecs import CODECS, PLAIN

_STRETCH: Final = 8192
"""The largest unit that a codec has."""
_STRETCHES: Final = 16


def of_gradients(gradients: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """Returns for each parameter what each codec that a plan may name adds, but FP32; nothing for gradients that are not finite."""
    codecs = [codec_named(name) for name in CODECS if name != PLAIN]
    found: dict[str, dict[str, float]] = {}
    for name, gradient in gradients.items():
        known: dict[str, float] = {}
        for codec in codecs:
            fitted = codec.fitted(gradient.shape)
            ordered = fitted.columns(gradient)
            values = (gradient if ordered is None else ordered).detach().float().cpu().contiguous().flatten()
            if not values.numel() or not bool(values.isfinite().all()):
                break
            part = _part(values)
            known[codec.name] = fitted.variance(part) * values.numel() / part.numel()
        else:
            found[name] = known
    return found


def _part(values: Tensor) -> Tensor:
    """Returns all values, or stretches that lie evenly."""
    if values.numel() <= _STRETCH * _STRETCHES:
        return values
    whole = values[: values.numel() // _STRETCH * _STRETCH].view(-1, _STRETCH)
    at = torch.linspace(0, len(whole) - 1, _STRETCHES).round().long()
    return whole[at].flatten()
