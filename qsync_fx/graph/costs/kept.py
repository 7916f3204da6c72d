"""What an operator's backward pass needs: which operands get a gradient, and which tensors are kept for it.

Nothing of this is written down in a table. Autograd is asked: the operator runs on fake operands, with hooks on what it saves. So it holds
for every operator of torch, and for those that are composed of others.

Invariant: nothing is computed and nothing of the graph changes; what was asked once is remembered by operator, types and sizes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from qsync_fx.devices.counted import ANY, capability
from qsync_fx.graph.attention import FUSED, as_products, products, without_dropout
from qsync_fx.graph.fake import FakeRun
from qsync_fx.graph.values import is_float, storage_of, tensors
from qsync_fx.options import Options


@dataclass(frozen=True)
class Extra:
    """A tensor that only the backward pass knows: a mask, a mean."""

    numel: Any
    dtype: torch.dtype


@dataclass(frozen=True)
class Read:
    """A tensor operand, as an operator reads it.

    Attributes:
        value: fake tensors whose sizes and strides it has.
        dtype: the type it is read in; None where it is read as it lies.
        need: whether it needs a gradient.
    """

    value: Any
    dtype: torch.dtype | None
    need: bool


@dataclass(frozen=True)
class Kept:
    """
    Attributes:
        differentiable: whether the operator's result has a gradient.
        operands: positions, among the operator's tensor operands, of those that are kept.
        results: positions of the results that are kept.
        extras: what else is.
    """

    differentiable: bool = False
    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    extras: tuple[Extra, ...] = ()


class Autograd:
    """Asks autograd about operators; remembers the answers."""

    def __init__(self, mode: FakeTensorMode | None, device: torch.device, options: Options) -> None:
        self._mode, self._device, self._options = mode, device, options
        self._known: dict[Hashable, Kept] = {}

    def kept(self, node: fx.Node, reads: Mapping[fx.Node, Read]) -> Kept:
        """Returns what a call of an ATen operator keeps that reads the nodes it reads as `reads` says."""
        if not any(read.need for read in reads.values()) or not isinstance(node.target, torch._ops.OpOverload):
            return Kept()
        places = {used: at for at, used in enumerate(reads)}
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda used: f"%{places[used]}")
        key = node.target, str(arguments), tuple(map(_outline, reads.values()))
        if key not in self._known:
            self._known[key] = self._ask(node, reads)
        return self._known[key]

    def _ask(self, node: fx.Node, reads: Mapping[fx.Node, Read]) -> Kept:
        seen: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen.append(tensor)
            return tensor

        with FakeRun(self._mode, torch.enable_grad(), torch.autocast(self._device.type, enabled=False)):
            operands = {used: _stand_in(read.value, read) for used, read in reads.items()}
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), operands.__getitem__)
            call: Any = node.target
            needed = any(read.need for read in reads.values())
            if as_products(node.target, args, kwargs, needed, self._device, self._options):
                call, args, kwargs = products, (*args[:3], kwargs.get("scale")), {}
            elif node.target is FUSED and self._device.type == "cpu" and capability(self._device) != ANY:
                # A GPU's fused kernels draw what they drop again; a CPU's have no dropout, and attention with it is several kernels there.
                args, kwargs = without_dropout(args, kwargs)
            try:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    result = call(*args, **kwargs)
            except Exception:  # noqa: BLE001 - an operator that does not run alone may keep all that it reads
                return Kept(True, tuple(at for at, read in enumerate(reads.values()) if read.need))
        places = {storage_of(t): at for at, operand in enumerate(operands.values()) for t in tensors(operand)}
        made = {storage_of(t): at for at, t in enumerate(tensors(result)) if storage_of(t) not in places}
        extras = {storage_of(t): Extra(_numel(t), t.dtype) for t in seen if storage_of(t) not in {*places, *made}}
        return Kept(
            any(t.requires_grad for t in tensors(result)),
            tuple(sorted({places[storage_of(t)] for t in seen if storage_of(t) in places})),
            tuple(sorted({made[storage_of(t)] for t in seen if storage_of(t) in made})),
            tuple(extras.values()),
        )


def _outline(read: Read) -> Hashable:
    sizes = ((t.dtype, *map(str, t.shape), *map(str, t.stride())) for t in tensors(read.value))
    return read.dtype, read.need, tuple(sizes)


def _stand_in(value: Any, read: Read) -> Any:
    """Returns fresh tensors of the same sizes, no two of one memory."""
    if isinstance(value, (list, tuple)):
        return type(value)(_stand_in(item, read) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    dtype = read.dtype if read.dtype is not None and is_float(value) else value.dtype
    fresh = torch.empty_strided(value.size(), value.stride(), dtype=dtype, device=value.device)
    # A leaf may not be written to in place; what a graph computes is none.
    return fresh.requires_grad_().view_as(fresh) if read.need and is_float(value) else fresh


def _numel(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage().nbytes() // tensor.element_size()
