"""Settings of torch and Inductor for compiling a rewritten graph, where the defaults are slow.

Invariant: they apply while one graph is compiled and are restored afterwards. They do not change
results except for roundings in planned formats and the random numbers of dropout.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.compiler.config
from torch import fx
from torch.backends import cuda

import qsync_fx
import qsync_fx.passes
from qsync_fx import torch_internals as internals
from qsync_fx.backend.cuda.runtime import quantize_launch
from qsync_fx.backend.inductor import fusible_quantize, layouts, recompute_policy
from qsync_fx.backend.memory_budget import WithinBudget
from qsync_fx.devices.cpu_features import cpu_multiplies_integers, native_integer_products
from qsync_fx.errors import PlanWarning
from qsync_fx.formats import precision
from qsync_fx.options import Options

_AS_ROWS: Final = tuple(
    getattr(torch.ops.aten, name).default for name in ("view", "reshape", "_unsafe_view", "clone")
)
"""Targets that first flatten a tensor to rows; a convolution reads images as they are."""


def _on_cuda(node: fx.Node) -> bool:
    operand: Any = node.args[0]
    return bool(operand.meta["val"].device.type == "cuda")


def _as_traced(node: fx.Node, *args: Any, **kwargs: Any) -> Any:
    """Constrain CUDA operands to the layouts that their kernel was compiled for."""
    if _on_cuda(node):
        return internals.constrain_to_fx_strides(node, *args, **kwargs)  # type: ignore[no-untyped-call]
    return args, kwargs


def _channels_last_on_cuda(node: fx.Node, a: Any, b: Any, *others: Any) -> tuple[Any, Any]:
    """Let producers write channels-last, where other layouts are copied before the kernel runs."""
    if _on_cuda(node):
        a, b = (internals.ExternKernel.require_channels_last(t) for t in (a, b))
    return (a, b, *others), {}


def _as_convolutions(node: fx.Node, x: Any, *others: Any) -> tuple[Any, Any]:
    """Make an image that is quantized channels-last if the graph's convolutions read that."""
    # With the traced layout Inductor copied every activation twice. Random numbers follow memory
    # positions, so they differ from the eager graph's; rounding stays unbiased.
    source: Any = node.args[0]
    require = {
        4: internals.ExternKernel.require_channels_last,
        5: internals.ExternKernel.require_channels_last_3d,
    }
    rank = len(x.get_size())
    if rank not in require or _read_as_rows(node):
        return (x, *others), {}
    # Graph inputs keep their layout: copying weights after quantization moves a quarter of the
    # bytes. Triton does not write FP8 before compute capability 8.9: no copy is possible there.
    if source.op == "placeholder":
        fmt = precision(str(node.args[3]))
        if not _on_cuda(node) or quantize_launch.compiles(fmt, source.meta["val"].device):
            return (x, *others), {}
    # Inductor itself looks for torch's convolutions only, and a forward graph may have only ours.
    find = functools.partial(internals.V.graph.graph.find_nodes, op="call_function")
    ours = torch.ops.qsync.integer_convolution, torch.ops.qsync.conv2d_product
    if internals.V.graph.layout_opt or any(find(target=operator.default) for operator in ours):
        x = require[rank](x)
    return (x, *others), {}


def _read_as_rows(quantized: fx.Node) -> bool:
    """Return whether all readers flatten the quantized tensor to rows, as linear layers do."""
    values = [part for part in quantized.users if part.args[1:] == (0,)]
    readers = [reader for part in values for reader in part.users if reader.op == "call_function"]
    return bool(readers) and all(reader.target in _AS_ROWS for reader in readers)


@functools.cache
def register_with_inductor() -> None:
    """Register lowerings and layout constraints of our operators with Inductor."""
    ours = torch.ops.qsync
    constraints = {
        ours.gemm.default: _as_traced,
        ours.conv2d_product.default: _channels_last_on_cuda,
        ours.integer_convolution.default: None,
        ours.quantize.default: _as_convolutions,
        # Inductor has no implicit fallback where a decomposition returns NotImplemented.
        ours.quantize_transposed.default: _as_traced,
    }
    for operator, constraint in constraints.items():
        # With this tag Inductor reads no other constraint.
        assert constraint is None or torch.Tag.flexible_layout not in operator.tags, operator
        internals.make_fallback(operator, constraint, warn=False)  # type: ignore[no-untyped-call]
    internals.register_lowering(ours.gate.default, type_promotion_kind=None)(
        recompute_policy.lower_gate
    )
    fusible_quantize.register()


def captures(options: Options, device: torch.device) -> bool:
    """Return whether to capture steps in CUDA graphs; warn if the option has no effect here."""
    if options.cudagraphs and device.type != "cuda":
        text = f'the option "cudagraphs" has no effect on {device.type}: it needs a CUDA device'
        warnings.warn(text, PlanWarning, stacklevel=2)
    return options.cudagraphs and device.type == "cuda"


def inductor(
    device: torch.device,
    cudagraphs: bool = False,
    activation_recompute: bool = False,
    memory_budget: float | None = None,
) -> dict[str, Any]:
    """Return the settings of `torch._inductor.config` for a device and for options.

    Each kind of pass has one slot, and the user's pass has priority: without ours steps are
    correct, but slower, or save more.
    """
    theirs = internals.inductor_config
    settings: dict[str, Any] = {}
    if memory_budget is not None and memory_budget < 1:
        partitioner = WithinBudget(memory_budget, theirs.custom_partitioner_fn)
        settings["custom_partitioner_fn"] = partitioner
    repeats = recompute_policy.Repeatable() if activation_recompute else None
    if device.type != "cpu":
        if repeats is not None:
            settings["joint_custom_post_pass"] = theirs.joint_custom_post_pass or repeats
        if cudagraphs:
            settings["triton.cudagraphs"] = True
        return settings
    if activation_recompute:
        settings["custom_partitioner_fn"] = recompute_policy.InBits(theirs.custom_partitioner_fn)
    return settings | {
        "joint_custom_post_pass": theirs.joint_custom_post_pass or layouts.AsWeights(repeats),
        "post_grad_custom_pre_pass": theirs.post_grad_custom_pre_pass
        or recompute_policy.EarlyBytes(),
        # Inductor's CPU random numbers are scalar. `torch.rand` then returns the eager model's
        # numbers; dropout still differs, since Inductor derives it in another way.
        "fallback_random": True,
        # By default Inductor materializes values with more than four reads. A quantized activation
        # reads scales, statistics and parameters; FP32 copies of activations raise peak memory.
        "realize_reads_threshold": 24,
    }


@functools.cache
def _revision() -> str:
    """Return a digest of this package, since torch's caches identify operators by name only."""
    folders = {
        Path(str(module.__file__)).parent.resolve()
        for module in (qsync_fx, qsync_fx.backend, qsync_fx.passes)
    }
    files = sorted({file for folder in folders for file in folder.rglob("*.py")})
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _with_tag(*parts: str) -> Any:
    """Return a context manager that adds parts, and the revision, to the keys of torch's caches."""
    settings: Any = torch.compiler.config
    package = f"qsync_fx {_revision()}"
    tag = [settings.cache_key_tag, *parts]
    if package not in settings.cache_key_tag:
        tag.append(package)
    return settings.patch(cache_key_tag=" ".join(filter(None, tag)))


def remembering(compile_inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return Inductor's inner compiler with the cache tag of the graph, also for backward."""
    return _with_tag()(compile_inner)  # type: ignore[no-any-return]


@contextmanager
def tracing(device: torch.device, kernels: str) -> Iterator[None]:
    """Apply the settings that tracing into a rewritten graph depends on.

    Attention without a fused kernel multiplies in the planned format, not in torch's FP32.
    `kernels` identifies the decided kernels in the key of torch's on-disk caches.
    """
    parts = [kernels]
    if device.type == "cpu":  # different CPUs may share a cache on disk
        parts.append("integers" * cpu_multiplies_integers())
        parts.append("native integers" * native_integer_products())
    before = cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    cuda.allow_fp16_bf16_reduction_math_sdp(device.type == "cpu" or before)
    try:
        with _with_tag(*parts):
            yield
    finally:
        cuda.allow_fp16_bf16_reduction_math_sdp(before)
