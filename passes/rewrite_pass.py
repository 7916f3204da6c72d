"""`@qsync_fx.rewrite`: a pass that replaces a pattern, both written in plain torch.

Invariant: a rewrite changes only sites that compute the pattern and whose inner values have no
other readers. Readers of the old results read new ones of the same shapes and dtypes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor, fx, nn

from qsync_fx.errors import OptionError, PassError, QSyncError
from qsync_fx.graph import PrecisionGraph, node_metadata
from qsync_fx.graph.alias_analysis import AliasSets, handed_in, may_write
from qsync_fx.graph.fx_utils import describe, tensors
from qsync_fx.graph.node_metadata import Rewritten
from qsync_fx.passes.insert_casts import drop_unread_casts
from qsync_fx.passes.pass_base import GraphPass, place_after
from qsync_fx.passes.rewrite_pattern import (
    Match,
    Pattern,
    TracedPattern,
    Untraceable,
    sites,
    trace_call,
)
from qsync_fx.passes.tracing.operator_ids import identify_new
from qsync_fx.passes.tracing.retrace import Modes, modes, tracing
from qsync_fx.torch_internals import ConstantSource, tree_leaves


@dataclass(frozen=True)
class Rewrite(GraphPass):
    """A rewrite: `function` is the pattern, `replacement` decorates the code that replaces it."""

    where: Callable[[Match], Any] | None = None
    example: tuple[Tensor, ...] | None = field(default=None, compare=False)
    _puts: list[Callable[..., Any]] = field(default_factory=list, compare=False)

    def replacement(self, function: Callable[..., Any]) -> Rewrite:
        """Set the function that replaces the pattern; return the rewrite.

        The function accepts any of the pattern's arguments by name, and optionally `match`
        (`Match`) for information about the site. It returns as many tensors as the pattern, of the
        same shapes and dtypes. Tensors that it refers to are not copied: parameters get gradients,
        and writes to buffers persist.
        """
        available = {*inspect.signature(self.function).parameters, "match"}
        if strange := [n for n in inspect.signature(function).parameters if n not in available]:
            owner = f"the replacement of {self.name!r}"
            message = f"{owner} takes {strange[0]!r}, which the pattern does not have"
            raise OptionError(message, do=f"take some of {', '.join(sorted(available))}")
        if self._puts:
            message = f"the rewrite {self.name!r} already has a replacement"
            raise OptionError(message, do="write one rewrite for each replacement")
        self._puts.append(function)
        return self

    def __call__(self, graph: PrecisionGraph) -> None:
        if not self._puts:
            message = f"the rewrite {self.name!r} has no replacement"
            raise OptionError(message, do=f"decorate one with @{self.name}.replacement")
        result = Rewritten()
        if graph.context.fake_mode is not None:  # else the graph contains no tensors
            for part in graph.walk():
                result += self._rewrite(part)
        graph.rewritten[self.name] = result
        graph.module.recompile()

    @functools.cached_property
    def _pattern(self) -> Pattern:
        return Pattern.of(self.function, self.example)

    def _rewrite(self, graph: PrecisionGraph) -> Rewritten:
        in_force, used = modes(graph), set[fx.Node]()
        chosen: list[Match] = []
        left: list[str] = []
        for match in sites(graph, self._pattern, in_force):
            if not used.isdisjoint(match.nodes):
                continue
            if self.where is not None and not self._wanted(self.where, match):
                continue
            if why := obstacle(match, in_force):
                left.append(f"{match.main.where}: {why}")
                continue
            used.update(match.nodes)
            chosen.append(match)
        now: dict[fx.Node, fx.Node] = {}

        def current_node(node: fx.Node) -> fx.Node:
            return now.get(node, node)  # another replacement may have changed it

        for match in chosen:
            arguments = fx.node.map_arg(dict(match.arguments), current_node)
            current = dataclasses.replace(match, arguments=arguments)
            now |= put(current, self.name, self._puts[0], in_force[match.nodes[-1]])
        drop_unread_casts(graph)
        return Rewritten(len(chosen), tuple(left))

    def _wanted(self, where: Callable[[Match], Any], match: Match) -> bool:
        try:
            return bool(where(match))
        except QSyncError:
            raise
        except Exception as error:
            message = f"the guard of {self.name!r} failed: {type(error).__name__}: {error}"
            do = "correct the function given as where="
            raise PassError(message, where=match.main.where, do=do) from error


@overload
def rewrite(function: Callable[..., Any], /) -> Rewrite: ...
@overload
def rewrite(
    *,
    after: str | None = None,
    before: str | None = None,
    where: Callable[[Match], Any] | None = None,
    example: Sequence[Tensor] | None = None,
    name: str | None = None,
) -> Callable[[Callable[..., Any]], Rewrite]: ...
def rewrite(
    function: Callable[..., Any] | None = None,
    /,
    *,
    after: str | None = None,
    before: str | None = None,
    where: Callable[[Match], Any] | None = None,
    example: Sequence[Tensor] | None = None,
    name: str | None = None,
) -> Rewrite | Callable[[Callable[..., Any]], Rewrite]:
    """Make a pass that finds a pattern in plain torch; `.replacement` sets the new code.

    Arguments of the function without a default match any tensor. Arguments with a default match any
    value at the positions where the default occurs: `eps=1e-5`, `p=0.1`, `training=True`.

    Args:
        after: the pass directly before it; "normalize" if neither `after` nor `before` is set.
        before: the pass directly after it.
        where: predicate on each `Match`; only sites for which it returns true are rewritten.
        example: tensors that the function accepts, needed if it accepts no FP32 tensors of size 8
            in any number of dimensions. Sizes and dtypes may differ from the model's.
        name: name in reports; by default the function's name.

    Example:
        >>> @rewrite
        ... def scaled(x, weight, bias):
        ...     return torch.relu(torch.nn.functional.linear(x, weight, bias))
        >>> @scaled.replacement
        ... def put(x, weight, bias):
        ...     return torch.nn.functional.linear(x, weight, bias).clamp(min=0)
    """
    after = place_after(after, before, "normalize")

    def make(function: Callable[..., Any]) -> Rewrite:
        examples = example if example is None else tuple(example)
        title = name or function.__name__
        result = Rewrite(title, function, after, before, where=where, example=examples)
        result._pattern  # noqa: B018 - checks the signature at definition
        return result

    return make if function is None else make(function)


def attached(graph: PrecisionGraph, tensor: Tensor) -> fx.Node:
    """Return the node of a user's tensor; attach the tensor to the graph if it has none.

    Each tensor occurs once, as an input, or as a parameter or buffer of the module, which
    AOTAutograd makes an input: a step reads its current value, and gradients and writes reach it.
    """
    if graph.parent is not None:
        return handed_in(graph, attached(graph.parent, tensor), "attached")
    module, fake = graph.module, _fake(graph, tensor)
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr") and node.meta.get("val") is fake:
            return node
    name = _free_name(module, "attached")
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(name, tensor)
    else:
        module.register_buffer(name, tensor)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.graph.inserting_before(first):
        result = graph.graph.get_attr(name)
    return _parameter_node(graph, result, fake)


def adopted(graph: PrecisionGraph, node: fx.Node, tensor: Tensor) -> fx.Node:
    """Return the node of a tensor that a pass added to the graph's module and reads by `node`."""
    if graph.parent is not None:
        result = attached(graph, tensor)
        name, module = str(node.target), graph.module
        node.replace_all_uses_with(result)
        graph.graph.erase_node(node)
        if not any(other.op == "get_attr" and other.target == name for other in graph.nodes):
            # AOTAutograd would treat it as a parameter of the top-level graph.
            path, _, last = name.rpartition(".")
            delattr(module.get_submodule(path), last)
        return result
    return _parameter_node(graph, node, _fake(graph, tensor))


def _fake(graph: PrecisionGraph, tensor: Tensor) -> Tensor:
    mode = graph.context.fake_mode
    if mode is None:
        return tensor
    return mode.from_tensor(tensor, static_shapes=True)


def _parameter_node(graph: PrecisionGraph, node: fx.Node, fake: Any) -> fx.Node:
    if hasattr(graph.module, "_param_name_to_source"):
        # AOTAutograd requires Dynamo's source of each parameter. Dynamo has none for this one and
        # installs no guard on it.
        name, sources = str(node.target), graph.module._param_name_to_source
        graph.module._param_name_to_source = {name: ConstantSource(name), **sources}  # type: ignore[dict-item, assignment]
    node.meta["val"] = fake
    return node


def _free_name(module: torch.nn.Module, stem: str) -> str:
    names = (f"{stem}_{index}" for index in itertools.count())
    return next(name for name in names if not hasattr(module, name))


OF_THE_MODEL = ("stack_trace", "nn_module_stack")
"""Metadata keys for a node's position in the model."""


def inlined(
    graph: PrecisionGraph,
    traced: TracedPattern,
    values: Sequence[fx.Node],
    origin: Mapping[str, Any],
) -> dict[fx.Node, fx.Node]:
    """Copy traced code, with the inputs `values`, to the insertion point; return the new nodes."""
    inputs = [*values, *(attached(graph, tensor) for tensor in traced.tensors)]
    local = dict(zip(traced.inputs, inputs, strict=True))
    for node in traced.module.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            new = local[node] = graph.graph.node_copy(node, lambda used: local[used])
            new.meta = dict(origin)
            if "val" in node.meta:
                new.meta["val"] = node.meta["val"]
            if node.op == "get_attr":  # a constant, such as `torch.tensor(2.0)`
                value = getattr(traced.module, str(node.target))
                new.target = _free_name(graph.module, "constant")
                graph.module.__dict__[new.target] = value
                new.meta.setdefault("val", value)
    return local


def put(
    match: Match, name: str, function: Callable[..., Any], modes: Modes
) -> dict[fx.Node, fx.Node]:
    """Replace a site by `function`; return the new nodes; raise `PassError` if they do not fit."""
    graph, wanted = match.graph, inspect.signature(function).parameters
    arguments = {key: value for key, value in match.arguments.items() if key in wanted}
    leaves = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, fx.Node)]
    if "match" in wanted:
        function = functools.partial(function, match=match)
    where = match.main.where
    values = fx.node.map_arg(arguments, graph.value)
    try:
        with tracing(graph, modes):
            traced = trace_call(function, values, recorded=True)
    except Untraceable as error:
        message = f"the replacement of {name!r} cannot be traced: {error}"
        do = "use only torch operators on its arguments, existing tensors and its match"
        raise PassError(message, where=where, do=do) from error.__cause__
    old, new = (
        ", ".join(describe(output.meta["val"]) for output in outputs)
        for outputs in (match.outputs, traced.outputs)
    )
    if old != new:
        message = f"the replacement of {name!r} returns {new} where the model computes {old}"
        do = "return as many tensors as the pattern, of the same shapes and dtypes "
        do += "(y.to(x.dtype) converts y to the dtype of x)"
        raise PassError(message, where=where, do=do)
    model = {key: value for key, value in match.main.node.meta.items() if key in OF_THE_MODEL}
    with graph.graph.inserting_before(match.nodes[-1].next):
        local = inlined(graph, traced, leaves, model)
    freed = [operator.node for operator in match.operators]
    put_in = [local[node] for node in traced.module.graph.nodes if node.op == "call_function"]
    results = dict(zip(match.outputs, (local[output] for output in traced.outputs), strict=True))
    for output, replacing in results.items():
        output.replace_all_uses_with(replacing, delete_user_cb=lambda user: user not in put_in)
    for node in reversed(match.nodes):
        graph.graph.erase_node(node)
    identify_new(graph, put_in, name, "rewritten", match.main.note, freed)
    return results


def obstacle(match: Match, modes: Mapping[fx.Node, Modes]) -> str:
    """Return why a site cannot be rewritten, or "".

    The replacement runs at the site's last node; no other node may then read different values.
    """
    graph = match.graph
    order = {node: index for index, node in enumerate(graph.nodes)}
    matched, last = set(match.nodes), order[match.nodes[-1]]
    if not any(node in node_metadata.NOTE for node in match.nodes):
        return "it computes with no floating-point values, and so has no id"
    if any(modes[node] != modes[match.nodes[-1]] for node in match.nodes):
        return "autocast or the recording of gradients changes within it"
    for node in match.nodes:
        outside = [user for user in node.users if user not in matched]
        if node not in match.outputs and outside:
            return f"its inner value %{node.name} is read by %{outside[0].name} too"
        for user in outside:
            if order[user] < last:
                reader = f"is read by %{user.name} before its last result is computed"
                return f"its result %{node.name} {reader}"
    between = graph.nodes[order[match.nodes[0]] : last]
    writers = [node for node in between if node not in matched and may_write(node)]
    if not writers:
        return ""
    memory = AliasSets(graph)
    used = {node for item in match.nodes for node in (item, *item.all_input_nodes)}
    places = frozenset().union(*(memory.of(node) for node in used if tensors(graph.value(node))))
    for node in writers:
        if any(memory.of(written) & places for written in may_write(node)):
            return f"%{node.name} writes in place to a value of it before its end"
    return ""
