"""Settings of torch under which the rewritten graph is compiled, where its defaults are not what is fastest.

Invariant: they hold while one graph is compiled and are as they were afterwards; none of them changes what is computed beyond roundings of
the formats that the plan names, and the numbers that dropout draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.compiler.config
from torch.backends import cuda

from qsync_fx import __version__


def inductor(device: torch.device) -> dict[str, Any]:
    """Returns the settings of `torch._inductor.config` for a device."""
    if device.type != "cpu":
        return {}
    # Inductor draws random numbers for the CPU one at a time, at 20 ns: a third of a GPT-2 block's step. torch takes 2 ns, and its numbers
    # are the eager model's.
    return {"fallback_random": True}


@contextmanager
def tracing(device: torch.device) -> Iterator[None]:
    """Lets attention in BF16 or FP16 multiply in that format where the device has no fused kernel, as with dropout on the CPU.

    torch would convert the operands to FP32 there, which no plan has asked for; autocast prevents it as well.
    """
    before = cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    # The caches on disk know graphs by what goes into tracing, not by this switch.
    tag = f"{torch.compiler.config.cache_key_tag} qsync_fx {__version__}"
    cuda.allow_fp16_bf16_reduction_math_sdp(device.type == "cpu" or before)
    try:
        with torch.compiler.config.patch(cache_key_tag=tag):
            yield
    finally:
        cuda.allow_fp16_bf16_reduction_math_sdp(before)
