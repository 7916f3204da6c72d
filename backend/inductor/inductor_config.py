"""Settings of torch under which the rewritten graph is compiled, where its defaults are not what is fastest.

Invariant: they hold while one graph is compiled and are as they were afterwards; none of them changes what is computed beyond roundings of
the formats that the plan names, and the numbers that dropout draws.
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
"""What flattens a tensor to rows, first of all; a product of images reads them as they are."""


@functools.cache
def register_with_inductor() -> None:
    """Tells Inductor how `qsync::gate` is computed, and in which layouts operators of ours want their inputs.

    `qsync::quantize` has channels last in graphs where convolutions have it so. Any layout is right. With that of the traced graph,
    Inductor copied every activation there and back, and a VGG step took a fifth longer; with any, what was made just to be quantized came
    out with channels first, and the step of a ResNet took a tenth longer. What a linear layer reads as rows has no channels to come last:
    of four dimensions too, as in a ConvNeXt, it lies as it was made. The price: random numbers belong to places in memory, so they
    are others than in the eager graph. Rounding stays unbiased.
    """
    from torch._inductor.ir import ExternKernel
    from torch._inductor.lowering import constrain_to_fx_strides, make_fallback, register_lowering
    from torch._inductor.virtualized import V

    integer_convolution = torch.ops.qsync.integer_convolution.default
    by_kernel = torch.ops.qsync.conv2d_product.default

    def convolves() -> bool:
        # Inductor itself looks for torch's convolutions, of which no forward graph has one where all of them are products of ours.
        targets = (integer_convolution, by_kernel)
        return any(
            V.graph.graph.find_nodes(op="call_function", target=target) for target in targets
        )

    def can_be_copied(node: fx.Node) -> bool:
        # Before compute capability 8.9 Triton does not write FP8, so that what is quantized has to lie right from the start.
        x: Any = node.args[0]
        return not on_cuda(node) or quantize_launch.compiles(
            precision(str(node.args[3])), x.meta["val"].device
        )

    def constrain(node: fx.Node, x: Any, *others: Any) -> tuple[Any, Any]:
        # What comes from outside lies as it lies: to copy weights after they are quantized moves a quarter of the bytes.
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
        # Which kernel computes was decided by the layouts that were traced, and it alone is compiled. The CPU's takes any.
        result: tuple[Any, Any] = value, named
        if on_cuda(node):
            result = constrain_to_fx_strides(node, *value, **named)  # type: ignore[no-untyped-call]
        return result

    def channels_last_on_cuda(node: fx.Node, a: Any, b: Any, *others: Any) -> tuple[Any, Any]:
        # Others are copied before the kernel runs; here they may be made so.
        if on_cuda(node):
            a, b = (ExternKernel.require_channels_last(t) for t in (a, b))
        return (a, b, *others), {}

    def on_cuda(node: fx.Node) -> bool:
        operand: Any = node.args[0]
        return bool(operand.meta["val"].device.type == "cuda")

    def called(operator: Any, lies: Callable[..., tuple[Any, Any]] | None = None) -> None:
        # Of an operator with this tag Inductor reads no more, and what lies otherwise would be copied before each call, or torch's.
        assert lies is None or torch.Tag.flexible_layout not in operator.tags, operator
        make_fallback(operator, lies, warn=False)  # type: ignore[no-untyped-call]

    called(torch.ops.qsync.gemm.default, as_traced)
    called(by_kernel, channels_last_on_cuda)
    called(integer_convolution)
    called(torch.ops.qsync.quantize.default, constrain)
    # Where there are kernels the formula in its place is none, and Inductor takes no operator that has one for a fallback unasked.
    called(torch.ops.qsync.quantize_transposed.default, as_traced)
    register_lowering(torch.ops.qsync.gate.default, type_promotion_kind=None)(
        recompute_policy.lower_gate
    )
    quantize_lowerings.register()


def _rows_alone(quantized: fx.Node) -> bool:
    """Whether what is quantized is read as rows alone, which is how linear layers read it, and by something."""
    values = [part for part in quantized.users if part.args[1:] == (0,)]
    readers = [reader for part in values for reader in part.users if reader.op == "call_function"]
    return bool(readers) and all(reader.target in _AS_ROWS for reader in readers)


def captures(options: Options, device: torch.device) -> bool:
    """Returns whether steps are to be captured in CUDA graphs; warns where that was asked for and there are none."""
    if options.cudagraphs and device.type != "cuda":
        warnings.warn(
            f'the option "cudagraphs" has no effect on {device.type}: there are CUDA graphs on CUDA devices alone',
            PlanWarning,
            stacklevel=2,
        )
    return options.cudagraphs and device.type == "cuda"


def inductor(
    device: torch.device, cudagraphs: bool = False, activation_recompute: bool = False
) -> dict[str, Any]:
    """Returns the settings of `torch._inductor.config` for a device, and for options.

    Of a captured graph the draw of its seed stays outside, which says so itself (`qsync::draw`): Inductor parts the graph there.
    """
    owned = torch._inductor.config.joint_custom_post_pass
    # There is one place, and the user's comes first: less is kept without ours, too.
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
        # Inductor draws random numbers for the CPU one at a time, at 20 ns: a third of a GPT-2 block's step. torch takes 2 ns, and the
        # numbers of `torch.rand` are the eager model's; not what dropout drops, which Inductor makes of them in another way.
        "fallback_random": True,
        # It keeps what takes more than four reads to compute again. A quantized activation takes its scales, statistics and parameters,
        # and FP32 copies of whole activations made the peak memory of a VGG step half as large again.
        "realize_reads_threshold": 24,
        # There is one place, and the user's comes first: without ours, steps are right and slower.
        "post_grad_custom_pre_pass": torch._inductor.config.post_grad_custom_pre_pass
        or recompute_policy.EarlyBytes(),
    }


@functools.cache
def _revision() -> str:
    """Returns a digest of the code of this package.

    torch's caches on disk know a graph by the operators in it, and not what tracing into them gives, nor how they are lowered. What takes
    part in that lies in many places, and reading all takes some hundredths of a second.
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
    """Returns Inductor's inner compiler under the tag that caches know a graph by now.

    The backward graph is compiled when it runs first, and what we say of how operators are lowered is not in it.
    """
    settings: Any = torch.compiler.config
    tag = settings.cache_key_tag
    result: Callable[..., Any] = settings.patch(
        cache_key_tag=tag if _ours() in tag else f"{tag} {_ours()}".strip()
    )(compile_inner)
    return result


def _units(device: torch.device) -> str:
    """Returns what multiplies integers, which tracing asks: a cache on disk may be shared by CPUs, or paths, with different units."""
    if device.type != "cpu":
        return ""
    return "integers " * cpu_multiplies_integers() + "native integers" * native_integer_unit()


@contextmanager
def tracing(device: torch.device, kernels: str) -> Iterator[None]:
    """Holds what tracing into a rewritten graph depends on.

    Attention in BF16 or FP16 multiplies in that format where the device has no fused kernel, as with dropout on the CPU. torch would
    convert the operands to FP32 there, which no plan has asked for; autocast prevents it as well.

    Args:
        device: of the graph.
        kernels: says which products are kernels; torch's caches on disk know the graph, which does not.
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
