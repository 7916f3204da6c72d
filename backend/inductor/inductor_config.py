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
from qsync_fx.backend.cuda.runtime import quantize_launch
from qsync_fx.backend.inductor import layouts, quantize_lowerings, recompute_policy
from qsync_fx.devices import cpu_multiplies_integers, native_integer_unit
from qsync_fx.errors import PlanWarning
from qsync_fx.formats import precision
from qsync_fx.options import Options

_AS_ROWS: Final = tuple(
    getattr(torch.ops.aten, name).default for name in ("view", "reshape", "_unsafe_view", "clone")
)
"""Targets that first flatten a tensor to rows; a convolution reads images as they are."""


@functools.cache
def register_with_inductor() -> None:
    """Register lowerings and layout constraints of our operators with Inductor.

    `qsync::quantize` is correct in any layout; it reads channels-last if the graph's convolutions
    do. With the traced layout Inductor copied every activation twice (a VGG step took a fifth
    longer). Without a constraint, tensors computed only to be quantized were channels-first (a
    ResNet step took a tenth longer). Inputs that linear layers read as rows keep their layout, also
    with four dimensions, as in ConvNeXt. The price: random numbers follow memory positions, so they
    differ from the eager graph's; rounding stays unbiased.
    """
    from torch._inductor.ir import ExternKernel
    from torch._inductor.lowering import constrain_to_fx_strides, make_fallback, register_lowering
    from torch._inductor.virtualized import V

    integer_convolution = torch.ops.qsync.integer_convolution.default
    by_kernel = torch.ops.qsync.conv2d_product.default

    def convolves() -> bool:
        # Inductor itself looks for torch's convolutions only, and a forward graph may contain only
        # ours.
        targets = (integer_convolution, by_kernel)
        return any(
            V.graph.graph.find_nodes(op="call_function", target=target) for target in targets
        )

    def can_be_copied(node: fx.Node) -> bool:
        # Triton does not write FP8 before compute capability 8.9, so the layout must be right from
        # the start.
        x: Any = node.args[0]
        return not on_cuda(node) or quantize_launch.compiles(
            precision(str(node.args[3])), x.meta["val"].device
        )

    def constrain(node: fx.Node, x: Any, *others: Any) -> tuple[Any, Any]:
        # Graph inputs keep their layout: copying weights after quantization moves a quarter of the
        # bytes.
        made_here = isinstance(node.args[0], fx.Node) and node.args[0].op != "placeholder"
        if (
            (made_here or not can_be_copied(node))
            and (V.graph.layout_opt or convolves())
            and len(x.get_size()) in (4, 5)
            and not _rows_alone(node)
        ):
            channels_last = (
                ExternKernel.require_channels_last
                if len(x.get_size()) == 4
                else ExternKernel.require_channels_last_3d
            )
            x = channels_last(x)
        return (x, *others), {}

    def as_traced(node: fx.Node, *value: Any, **named: Any) -> tuple[Any, Any]:
        # The kernel was selected and compiled for the traced layouts. The CPU's accepts any.
        result: tuple[Any, Any] = value, named
        if on_cuda(node):
            result = constrain_to_fx_strides(node, *value, **named)  # type: ignore[no-untyped-call]
        return result

    def channels_last_on_cuda(node: fx.Node, a: Any, b: Any, *others: Any) -> tuple[Any, Any]:
        # Other layouts are copied before the kernel runs; here the producer may write
        # channels-last.
        if on_cuda(node):
            a, b = (ExternKernel.require_channels_last(t) for t in (a, b))
        return (a, b, *others), {}

    def on_cuda(node: fx.Node) -> bool:
        operand: Any = node.args[0]
        return bool(operand.meta["val"].device.type == "cuda")

    def called(operator: Any, lies: Callable[..., tuple[Any, Any]] | None = None) -> None:
        # With this tag Inductor reads no other constraint, and mismatched inputs would be copied
        # before each call.
        assert lies is None or torch.Tag.flexible_layout not in operator.tags, operator
        make_fallback(operator, lies, warn=False)  # type: ignore[no-untyped-call]

    called(torch.ops.qsync.gemm.default, as_traced)
    called(by_kernel, channels_last_on_cuda)
    called(integer_convolution)
    called(torch.ops.qsync.quantize.default, constrain)
    # Its decomposition returns NotImplemented if there are kernels, and Inductor has no implicit
    # fallback for decomposed operators.
    called(torch.ops.qsync.quantize_transposed.default, as_traced)
    register_lowering(torch.ops.qsync.gate.default, type_promotion_kind=None)(
        recompute_policy.lower_gate
    )
    quantize_lowerings.register()


def _rows_alone(quantized: fx.Node) -> bool:
    """Return whether all readers flatten the quantized tensor to rows, as linear layers do."""
    values = [part for part in quantized.users if part.args[1:] == (0,)]
    readers = [reader for part in values for reader in part.users if reader.op == "call_function"]
    return bool(readers) and all(reader.target in _AS_ROWS for reader in readers)


def captures(options: Options, device: torch.device) -> bool:
    """Return whether to capture steps in CUDA graphs; warn if the option has no effect here."""
    if options.cudagraphs and device.type != "cuda":
        warnings.warn(
            f'the option "cudagraphs" has no effect on {device.type}: CUDA graphs need a CUDA '
            "device",
            PlanWarning,
            stacklevel=2,
        )
    return options.cudagraphs and device.type == "cuda"


def inductor(
    device: torch.device, cudagraphs: bool = False, activation_recompute: bool = False
) -> dict[str, Any]:
    """Return the settings of `torch._inductor.config` for a device and for options.

    The tag of `qsync::draw` excludes it from captures: Inductor partitions the graph there.
    """
    owned = torch._inductor.config.joint_custom_post_pass
    # There is one slot and the user's pass has priority; without ours only memory is lost.
    repeats = recompute_policy.Repeatable() if activation_recompute else None
    if device.type != "cpu":
        repeated = {"joint_custom_post_pass": owned or repeats} if activation_recompute else {}
        return repeated | ({"triton.cudagraphs": True} if cudagraphs else {})
    settings = torch._inductor.config
    packs = (
        {"custom_partitioner_fn": recompute_policy.InBits(settings.custom_partitioner_fn)}
        if activation_recompute
        else {}
    )
    return packs | {
        "joint_custom_post_pass": owned or layouts.AsWeights(repeats),
        # Inductor's CPU random numbers are scalar, 20 ns each: a third of a GPT-2 block's step.
        # torch's cost 2 ns. `torch.rand` then returns the eager model's numbers; dropout still
        # differs, since Inductor derives it in another way.
        "fallback_random": True,
        # By default Inductor materializes values with more than four reads. A quantized activation
        # reads scales, statistics and parameters; FP32 copies of activations raised the peak memory
        # of a VGG step by half.
        "realize_reads_threshold": 24,
        # There is one slot and the user's pass has priority; without ours steps are correct but
        # slower.
        "post_grad_custom_pre_pass": torch._inductor.config.post_grad_custom_pre_pass
        or recompute_policy.EarlyBytes(),
    }


@functools.cache
def _revision() -> str:
    """Return a digest of the code of this package.

    torch's on-disk caches identify a graph by its operators, not by what tracing into them yields
    or how they are lowered. Reading all files costs some hundredths of a second.
    """
    folders = {
        Path(str(module.__file__)).parent.resolve()
        for module in (qsync_fx, qsync_fx.backend, qsync_fx.passes)
    }
    files = sorted({file for folder in folders for file in folder.rglob("*.py")})
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _ours() -> str:
    return f"qsync_fx {_revision()}"


def remembering(compile_inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return Inductor's inner compiler with the cache tag of the current graph.

    The backward graph is compiled at its first run, and its cache key lacks our lowerings.
    """
    settings: Any = torch.compiler.config
    tag = settings.cache_key_tag
    result: Callable[..., Any] = settings.patch(
        cache_key_tag=tag if _ours() in tag else f"{tag} {_ours()}".strip()
    )(compile_inner)
    return result


def _units(device: torch.device) -> str:
    """Return a cache key for the integer units: different CPUs may share a cache on disk."""
    if device.type != "cpu":
        return ""
    return "integers " * cpu_multiplies_integers() + "native integers" * native_integer_unit()


@contextmanager
def tracing(device: torch.device, kernels: str) -> Iterator[None]:
    """Apply the settings that tracing into a rewritten graph depends on.

    BF16 and FP16 attention multiplies in that format if the device has no fused kernel, as with
    dropout on the CPU; torch would cast the operands to FP32, contrary to the plan; autocast
    prevents that too.

    Args:
        device: of the graph.
        kernels: text that identifies the decided kernels, for the key of torch's on-disk caches.
    """
    before = cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    settings: Any = torch.compiler.config
    tag = f"{settings.cache_key_tag} {kernels} {_units(device)} {_ours()}".strip()
    cuda.allow_fp16_bf16_reduction_math_sdp(device.type == "cpu" or before)
    try:
        with settings.patch(cache_key_tag=tag):
            yield
    finally:
        cuda.allow_fp16_bf16_reduction_math_sdp(before)
