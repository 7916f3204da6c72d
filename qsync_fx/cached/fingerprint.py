"""What tells a model from others: the same when it is measured and when a graph of it is compiled.

Invariant: it follows from the model as written and the inputs of a step. Wrappers around modules, precisions, and whether a size is a
number or a symbol that stands for it, are nothing to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from qsync_fx.graph import Operator
from qsync_fx.graph.values import describe
from qsync_fx.module_tree import joined, paths
from qsync_fx.options import Options


@dataclass(frozen=True)
class Fingerprint:
    """
    Attributes:
        structure: of the model's class, and of the names of its parameters and buffers.
        tensors: of their types and sizes.
        options: those of the backend that are not as by default, in words.
        evaluated: the paths of the modules that are in the mode to evaluate.
        operators: the sizes of what each operator gives out, by its id.
    """

    structure: str
    tensors: str
    options: str
    evaluated: list[str]
    operators: dict[str, str]


def fingerprint(root: nn.Module, operators: Iterable[Operator], options: Options) -> Fingerprint:
    """Returns that of a model of which these operators are known, before precisions are decided."""
    tensors = dict(_tensors(root))
    kind = type(root)
    return Fingerprint(
        _digest([f"{kind.__module__}.{kind.__qualname__}", *tensors]),
        _digest(describe(tensor) for tensor in tensors.values()),
        options.beside_plan,
        [path for path, module in paths(root) if not module.training],
        sizes_of(operators),
    )


def sizes_of(operators: Iterable[Operator]) -> dict[str, str]:
    """Returns the sizes of what operators give out, by their ids."""
    return {str(operator.id): _sizes(operator.graph.value(operator.node)) for operator in operators}


def _sizes(value: Any) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return " ".join("x".join(map(_number, tensor.shape)) or "1" for tensor in tensors)


def _number(size: int | torch.SymInt) -> str:
    """Returns a size, or what a symbol stands for in the batch that is compiled for."""
    if isinstance(size, torch.SymInt):
        return str(size.node.hint) if size.node.has_hint() else "?"
    return str(size)


def _tensors(root: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    for path, module in paths(root):
        held: Mapping[str, torch.Tensor | None] = {**module._parameters, **module._buffers}
        yield from ((joined(path, name), tensor) for name, tensor in held.items() if tensor is not None)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
