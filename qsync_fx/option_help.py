"""Help texts and recipes of the backend's options, for the command line, errors and docs.

Invariant: `DOCUMENTED` has the fields of `qsync_fx.options.Options` in their order. This module
does not import torch, so that an invalid command line is reported at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

DOCUMENTED: Mapping[str, str] = MappingProxyType(
    {
        "precision": "the precision of all operators; by default bf16 if the device has a unit for "
        "it and, on the CPU, a layer is large enough to be faster in bf16; else fp32",
        "plan": "a precision for each operator: a qsync_fx.Plan, a qsync_fx.ClusterPlan, from "
        "which each rank selects its part, or the path of a saved plan",
        "device_class": "the class of this rank's device in a plan for a cluster; by default it is "
        "determined by the plan's rank table or the device name",
        "inner_backend": 'the compiler of the rewritten graph: "inductor" (default), "aot_eager" '
        'to debug its operators one by one, "eager" to debug it without AOTAutograd',
        "rounding": 'the rounding of values to int8 and fp8: "stochastic" (default; keeps '
        'gradients unbiased), "nearest" or "floor"',
        "gradient_rounding": "the rounding of gradients of products to bf16 and fp16: "
        '"nearest" (default) or "stochastic" (unbiased, and slower)',
        "scaling": "the granularity of the scales of int8 and fp8: one per "
        '"tensor" (default) or one per "channel"',
        "emulate_unsupported": "True: a format that the device does not support (fp16 on a CPU) is "
        "emulated exactly, which is slower, instead of substituted by another format; False by "
        "default",
        "skip_unprofitable": "True: an operator that no plan names runs in a wider format than the "
        "uniform precision if that is as fast for its shape on the device, and the report says so; "
        "by default True on GPUs with a precision, else False",
        "fast_dropout": "False: on the CPU, torch's generator draws dropout masks one value at a "
        "time; by default they are drawn in vectors from the stream of random numbers for "
        "rounding, if possible; True also reports where it is not possible",
        "cudagraphs": "True: on CUDA, Inductor captures a step in CUDA graphs and replays it, "
        'which removes launch overhead, the same as mode="reduce-overhead"; False by default',
        "activation_recompute": "True: activations that one pass over memory can recompute are not "
        "saved for backward, and dropout masks are saved as bits; False by default",
        "memory_budget": "the share of the saved activations that stay saved, from 0, which "
        "recomputes all that may be, to 1, which recomputes none; operators that draw random "
        "numbers are never recomputed; by default the budget of the plan, or else torch's own",
        "cache_quantized_weights": "True: a weight is quantized to int8 or fp8 once per step, when "
        "torch counts a write to it, and not in each pass; invalid if weights are written through "
        ".data or numpy, which torch does not count; False by default",
        "cached_plan": "False: a cached profile of the model is ignored; by default, with neither "
        "a plan nor a precision, the fastest plan from that profile within the variance of bf16 is "
        "active",
        "strict": "True: raises after the first training step if a part of the plan was not "
        "applied; False by default: warns once",
        "root": "the path of a compiled module in the model that the plan was made for, as in "
        "state_dict; by default it is determined when the model calls the module",
        "target": "a GPU that is not in this machine, such as t4, or the path of a device file: "
        "qsync_fx.explain and qsync inspect show the graph for this GPU; compilation for another "
        "device than the present one is an error",
        "passes": "list of custom passes, each a function decorated with @qsync_fx.graph_pass or "
        "the name of an installed pass",
    }
)
"""Help text of each option for error messages, the command line and the documentation."""


@dataclass(frozen=True)
class Recipe:
    """Combination of options for a common case, with its gains and costs in one sentence."""

    options: Mapping[str, object]
    trade_off: str


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "bf16": Recipe(
            {"precision": "bf16"},
            "All operators that support BF16 run in it: the smallest change of accuracy, and the "
            "smallest gain in time and memory.",
        ),
        "int8_accurate": Recipe(
            {"precision": "int8", "scaling": "channel"},
            "INT8 forward products with a scale per channel, BF16 gradients: accuracy near BF16 "
            "with smaller saved activations, at the cost of quantization time.",
        ),
        "int8_fast": Recipe(
            {"precision": "int8_grad", "skip_unprofitable": True},
            "INT8 products in forward and backward if they are faster: the shortest steps, and the "
            "noisiest gradients.",
        ),
        "low_memory": Recipe(
            {"precision": "int8", "activation_recompute": True, "skip_unprofitable": False},
            "INT8 forward products, and activations recomputed in backward: the least memory, at "
            "the cost of some time in each step.",
        ),
    }
)
"""Recipes by name: `options={"recipe": "int8_fast"}`. Explicit options override their values."""

RECIPE_HELP: Final = (
    f"the name of a set of options for a common case: {', '.join(RECIPES)}; explicit options "
    "override its values"
)

SWITCHES: Final = frozenset(
    "emulate_unsupported cudagraphs activation_recompute cache_quantized_weights strict".split()
)
"""Options that are False by default."""

LISTS: Final = frozenset({"passes"})
"""Options with several values."""
