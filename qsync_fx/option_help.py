"""What each option of the backend is, in words, and how a command line gives it.

Invariant: these are the options of `qsync_fx.options.Options`, one for one. Nothing is imported for them, so that what is wrong with a
command line is said before torch is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

DOCUMENTED: Mapping[str, str] = MappingProxyType(
    {
        "precision": "the precision that every operator is trained in, by name; by default bf16 where the device has a unit for it "
        "and, on the CPU, a layer is large enough to be faster in it, else fp32",
        "plan": "a precision for each operator: a qsync_fx.Plan, or a qsync_fx.ClusterPlan, of which each rank takes its part, or the "
        "path of one that was saved",
        "device_class": "the class of this rank's device in a plan for a cluster; by default it is found, by the plan's table of ranks or "
        "the device's name",
        "inner": 'what compiles the rewritten graph: "inductor" (default), "aot_eager" to debug its operators one by one, '
        '"eager" to debug it without autograd traced',
        "rounding": 'how values are rounded to int8 and fp8: "stochastic" (default; keeps gradients unbiased), "nearest" or "floor"',
        "gradient_rounding": 'how gradients of products are rounded to bf16 and fp16: "nearest" (default), or "stochastic" (slower; '
        "without bias)",
        "scaling": 'what shares a scale of int8 and fp8: a whole "tensor" (default), or each "channel"',
        "exact": "True: where the device would run another format in place of the planned one (fp16 on a CPU), compute the planned "
        "one's numbers exactly, which is slower; False by default",
        "where_faster": "True: an operator that no plan names keeps a wider format than the precision of all where that is as fast at its "
        "shape on the device, and says so; False by default",
        "fast_dropout": "False: on the CPU, what dropout drops is drawn by torch's generator, one value at a time; by default in vectors, "
        "from the stream of the roundings, wherever it can be; True says where it cannot",
        "cudagraphs": "True: on CUDA, Inductor captures a step in CUDA graphs and replays it, which takes the time of launches away, as "
        'mode="reduce-overhead" does, which means the same; False by default',
        "keep_less": "True: what the backward pass can compute again in one pass over memory is not kept for it, and masks of dropout are "
        "kept in bits; False by default",
        "weights_once": "True: a weight is quantized to int8 or fp8 when torch counts a write to it, once a step, and not in each pass, "
        "which is right while nobody writes to weights past torch (through .data, numpy); False by default",
        "cached_plan": "False: with neither a plan nor a precision, a profile of the model in the cache does not matter; by default the "
        "fastest plan within the variance of bf16 that was found from it is in force",
        "strict": "True: raises after the first training step where a part of the plan was not applied; False by default: warns once",
        "root": "where a compiled module stands in the model that the plan was made for, a path as in state_dict; by default it is "
        "found, where the model calls it",
        "target": "the GPU that a graph is looked at for where there is none, such as t4, or the path of a file that describes one: "
        "qsync_fx.explain and qsync inspect show what would run there; compiling for another device than the one at hand is an error",
        "passes": "list of your own passes, each a function decorated with @qsync_fx.graph_pass or the name of an installed pass",
    }
)
"""What each option is, in the words that error messages, the command line and the documentation use."""

SWITCHES: Final = frozenset({"exact", "where_faster", "cudagraphs", "keep_less", "weights_once", "strict"})
"""What is on, or off, as by default."""

LISTS: Final = frozenset({"passes"})
"""What there may be several of."""
