"""Retracing of Dynamo's graph to pre-dispatch ATen, piece by piece.

Invariant: the new graph equals the old one bitwise, in training too: tracing records above autograd
and autocast. The state of the process is restored.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.hooks import BackwardHook

from qsync_fx import torch_internals as internals
from qsync_fx.errors import PassError
from qsync_fx.graph import node_metadata
from qsync_fx.graph.alias_analysis import caller_of
from qsync_fx.graph.fx_utils import (
    Effect,
    affects_tracing,
    effect_of,
    is_switch,
    level_step,
    mark_unlisted,
)
from qsync_fx.graph.graph import PrecisionGraph, adopt_attributes
from qsync_fx.passes.tracing.graph_cleanup import UNFUSED, copied

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Modes:
    """Grad mode and (device type, enabled, dtype) of autocast, as earlier switches set them."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def current(cls) -> Modes:
        enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
        return cls(torch.is_grad_enabled(), tuple((d, enabled(d), dtype(d)) for d in _DEVICES))

    def apply(self) -> None:
        torch.set_grad_enabled(self.grad)
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore all state that executing a graph's switches may change."""
    before, dtype = Modes.current(), torch.get_default_dtype()
    cache = torch.is_autocast_cache_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        before.apply()
        torch.set_autocast_cache_enabled(cache)
        torch.set_default_dtype(dtype)
        # `torch.use_deterministic_algorithms` would also set options of Inductor.
        internals._set_deterministic_algorithms(deterministic, warn_only=warn_only)


@contextlib.contextmanager
def tracing(graph: PrecisionGraph, modes: Modes) -> Iterator[None]:
    """Enter the graph's fake mode and the modes of one of its nodes, to trace new code there."""
    assert graph.context.fake_mode is not None
    with restored(), graph.context.fake_mode:
        modes.apply()
        yield


def modes(graph: PrecisionGraph) -> dict[fx.Node, Modes]:
    """Return the modes that each node of a graph runs in."""
    result: dict[fx.Node, Modes] = {}
    values: dict[fx.Node, Any] = {}
    with restored():
        if graph.parent is not None:
            modes(graph.parent)[caller_of(graph)].apply()
        for node in graph.nodes:
            result[node] = Modes.current()
            if effect_of(node) in (Effect.GRAD, Effect.AUTOCAST):
                args = fx.node.map_arg(node.args, lambda used: values[used])
                values[node] = node.target(*args)  # type: ignore[operator]
    return result


def hooks_gradients(node: fx.Node) -> bool:
    """Return whether a node registers a hook on a tensor, which sees the tensor's gradient."""
    available = (used.meta.get("example_value") for used in node.all_input_nodes)
    return any(isinstance(value, (internals.BackwardState, BackwardHook)) for value in available)


_OPERATOR_OF = {internals._get_data_attr: torch.ops.aten.data.default}
"""Functions that bypass the dispatcher and are invisible to tracing, with equivalent operators."""


def pre_dispatch(function: Callable[..., Any], values: Sequence[Any]) -> fx.GraphModule:
    """Return the ATen operators that a function calls, before autograd and autocast see them."""
    with fx.traceback.preserve_node_meta():
        traced: fx.GraphModule = make_fx(
            function, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True
        )(*values)
    return traced


class Tracking(fx.Interpreter):
    """Interpreter that records the name of the current node, to attribute failures."""

    node_name = ""

    def run_node(self, n: fx.Node) -> Any:
        self.node_name = n.name
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in UNFUSED and not args[0].is_nested:
            return UNFUSED[target](*args, **kwargs)
        return super().call_function(_OPERATOR_OF.get(target, target), args, kwargs)


KeepBodies = Callable[[fx.Node, fx.GraphModule], dict[str, fx.GraphModule]]

_HOOKED = "a hook reads its gradient in the dtype of the model"


def rebuild(
    module: fx.GraphModule, inputs: list[Any], keep: KeepBodies
) -> tuple[fx.GraphModule, list[str]]:
    """Return Dynamo's module retraced to pre-dispatch ATen, and the failures with their reasons.

    Nodes that make_fx must not trace through are copied, and the nodes between them are retraced
    together. The caller sets the fake mode and restores autocast and grad mode.

    Args:
        inputs: one fake tensor, SymInt or plain value per placeholder.
        keep: called with every copied higher-order node (already in the new graph) and the old
            module that contains its bodies; it returns the new bodies by attribute name.
    """
    mark_unlisted(module.graph)
    builder = _Builder(module, keep)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, value in zip(placeholders, inputs, strict=True):
        builder.copy(node, value)
    pending: list[fx.Node] = []
    level: list[fx.Node] = []
    nesting = 0
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        before = nesting
        nesting += level_step(node)
        if before or nesting:
            level.append(node)
        elif builder.must_copy(node):
            builder.retrace(pending)
            builder.keep(node)
            pending = []
        else:
            pending.append(node)
        if level and not nesting:
            builder.retrace(pending)
            for inside in level:
                builder.keep(inside, leveled=True)
            pending, level = [], []
    if level:  # it ends in another graph
        for inside in pending + level:
            builder.keep(inside, leveled=True)
    else:
        builder.retrace(pending)
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    builder.copy(output, None)
    return builder.finish(), builder.failures


def current(value: Any) -> Any:
    """Return Dynamo's recorded value in the active fake mode, which is another one."""
    mode = internals.active_fake_mode()

    def convert(fake: Any) -> Any:
        if not isinstance(fake, internals.FakeTensor) or fake.fake_mode is mode:
            return fake
        if fake.layout is not torch.strided:
            return fake
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)

    return value if mode is None else internals.tree_map(convert, value)


class _Builder:
    """Builder of the new graph; `values` and `mapped` are the values and new nodes of old ones."""

    def __init__(self, module: fx.GraphModule, keep_bodies: KeepBodies) -> None:
        self.module, self.keep_bodies = module, keep_bodies
        self.preserved: set[fx.Node] = set()
        self.graph = fx.Graph()
        self.root: dict[str, Any] = {}
        self.values: dict[fx.Node, Any] = {}
        self.mapped: dict[fx.Node, Any] = {}
        self.constants: dict[str, Any] = {}
        self.failures: list[str] = []
        self.count = 0

    def copy(self, node: fx.Node, value: Any) -> fx.Node:
        """Copy a node unchanged, with its metadata and the attribute that it names."""
        for used in node.all_input_nodes:
            self.fetch(used)
        new = self.graph.node_copy(node, lambda used: self.mapped[used])
        if node.op == "output":
            return new
        if hasattr(node, "_dynamo_source"):
            new._dynamo_source = node._dynamo_source
        self.values[node], self.mapped[node] = value, new
        new.meta["val"] = value
        return new

    def fetch(self, node: fx.Node) -> None:
        """Copy a node that names an attribute, once."""
        if node.op != "get_attr" or node in self.mapped:
            return
        value = self.root[str(node.target)] = _attribute(self.module, str(node.target))
        mode = internals.active_fake_mode()
        if isinstance(value, torch.Tensor) and mode is not None:
            value = mode.from_tensor(value, static_shapes=True)
        self.copy(node, value)

    def must_copy(self, node: fx.Node) -> bool:
        """Return whether make_fx must not trace through a node.

        Calls that change state of the process outlive a piece. A higher-order operator would raise
        (checkpointing's context function) or lose its backward (custom autograd functions).
        """
        return (
            is_switch(node)
            or isinstance(node.target, internals.HigherOrderOperator)
            or hooks_gradients(node)
            or (node.target is operator.getitem and node.args[0] in self.preserved)
        )

    def keep(self, node: fx.Node, leveled: bool = False) -> None:
        """Copy a node that stays as Dynamo wrote it.

        `leveled` nodes are between levels of functorch or of forward-mode differentiation: their
        values are batched or dual tensors, which exist only inside.
        """
        self.preserved.add(node)
        if is_switch(node):
            self.copy(node, self._execute(node, leveled))
            return
        if hooks_gradients(node):
            for used in node.all_input_nodes:
                self._set_apart(used)
        new = self.copy(node, current(node.meta.get("example_value")))
        if isinstance(node.target, internals.HigherOrderOperator):
            self.root |= self.keep_bodies(new, self.module)
        elif hooks_gradients(node):
            node_metadata.OPAQUE[new] = _HOOKED
        elif node.target is not operator.getitem:
            reason = "it stays as Dynamo wrote it: inside vmap values are not plain tensors"
            node_metadata.OPAQUE[new] = reason

    def _execute(self, node: fx.Node, leveled: bool) -> Any:
        """Execute a call that changes state, so that later pieces are traced in that state."""
        # Levels are not entered, so a call between them whose effect is unlisted may not work.
        if not affects_tracing(node) or (leveled and effect_of(node) is Effect.UNLISTED):
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda used: self.values[used])
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _set_apart(self, used: fx.Node) -> None:
        """Insert an alias of a tensor for all readers, so that its hook sees the full gradient."""
        source = self.mapped[used]
        if not isinstance(self.values[used], torch.Tensor):
            return
        with self.graph.inserting_after(source):
            apart = self.graph.call_function(torch.ops.aten.alias.default, (source,))
        apart.meta.update(source.meta)
        node_metadata.OPAQUE[apart] = _HOOKED
        source.replace_all_uses_with(apart, delete_user_cb=lambda user: user is not apart)
        self.mapped.update({old: apart for old, new in self.mapped.items() if new is source})

    def retrace(self, nodes: Sequence[fx.Node]) -> None:
        """Retrace nodes into the new graph; copy a node at which make_fx fails."""
        nodes = [node for node in nodes if node not in self.mapped]
        if not nodes:
            return
        piece, external, results = self._extract(nodes)
        interpreter = Tracking(piece)
        for used in external:
            self.fetch(used)
        inputs = [self.values[node] for node in external]
        try:
            traced = pre_dispatch(lambda *args: interpreter.run(*args), inputs)
        except Exception as error:  # noqa: BLE001 - an untraceable node stays as Dynamo wrote it
            bad = next((n for n in nodes if n.name == interpreter.node_name), nodes[0])
            self._leave(nodes, bad, type(error).__name__, str(error).partition("\n")[0])
            return
        if not bakes_in_fakes(traced):
            self._inline(traced, external, results)
        elif len(nodes) == 1:
            message = "it computes a value outside the dispatcher, where tracing cannot see it"
            self._leave(nodes, nodes[0], "UntracedValue", message)
        else:
            # Retracing smaller pieces isolates the responsible node.
            self.retrace(nodes[: len(nodes) // 2])
            self.retrace(nodes[len(nodes) // 2 :])

    def _leave(self, nodes: list[fx.Node], bad: fx.Node, kind: str, message: str) -> None:
        """Copy one of the nodes as Dynamo wrote it, and retrace the nodes before and after it."""
        if by := node_metadata.put_in_by(bad):
            message = f"pass {by!r} inserted %{bad.name}, which cannot be traced: {kind}: {message}"
            do = "call operators of torch, or functions that compute with tensors alone"
            raise PassError(message, where=f"pass {by!r}, node %{bad.name}", do=do)
        self.failures.append(f"{bad.name}: {kind}: {message}")
        self.retrace(nodes[: nodes.index(bad)])
        new = self.copy(bad, current(bad.meta.get("example_value")))
        node_metadata.OPAQUE[new] = f"it stays as Dynamo wrote it: it cannot be re-traced ({kind})"
        # Inputs of a trace are single tensors, so a trace cannot read a tuple.
        for item in _items(bad):
            self.copy(item, current(item.meta.get("example_value")))
        self.retrace(nodes[nodes.index(bad) + 1 :])

    def _extract(self, nodes: list[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
        """Return the nodes as a module, its external inputs, and the nodes with external users."""
        inside = set(nodes)
        operands = dict.fromkeys(used for node in nodes for used in node.all_input_nodes)
        needed = [used for used in operands if used not in inside]
        bodies = [
            used
            for used in needed
            if used.op == "get_attr"
            and isinstance(_attribute(self.module, str(used.target)), torch.nn.Module)
        ]
        external = [used for used in needed if used not in bodies]
        graph = fx.Graph()
        local: dict[fx.Node, fx.Node] = {used: graph.placeholder(used.name) for used in external}
        local.update((used, graph.node_copy(used)) for used in bodies)
        for node in nodes:
            local[node] = copied(graph, node, local)
        results = [node for node in nodes if any(user not in inside for user in node.users)]
        graph.output(tuple(local[node] for node in results))
        return fx.GraphModule(self.module, graph), external, results

    def _inline(
        self, traced: fx.GraphModule, inputs: list[fx.Node], results: list[fx.Node]
    ) -> None:
        leaves = internals.tree_leaves([self.mapped[node] for node in inputs])
        placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
        local: dict[fx.Node, Any] = dict(zip(placeholders, leaves, strict=True))
        self.count += 1
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                out = fx.node.map_arg(node.args[0], lambda used: local[used])
                values = fx.node.map_arg(node.args[0], lambda used: used.meta.get("val"))
                for old, new, value in zip(results, out, values, strict=True):
                    self.mapped[old], self.values[old] = new, value
                return
            new = self.graph.node_copy(node, lambda used: local[used])
            if node.op == "get_attr":
                name = f"piece{self.count}_{node.target}".replace(".", "_")
                self.constants[name] = _attribute(traced, str(node.target))
                new.target = name
                new.meta.setdefault("val", self.constants[name])
            local[node] = new

    def finish(self) -> fx.GraphModule:
        new = fx.GraphModule({**self.root, **self.constants}, self.graph, class_name="QSyncGraph")
        adopt_attributes(new, self.module)
        for name in self.constants:
            # Constants of `torch.tensor([1, 2])` and `x[[0, 2]]`. AOTAutograd would treat buffers
            # as the user's and miss their source; it copies the values of plain attributes into its
            # own graph.
            new.__dict__[name] = new._buffers.pop(name)
        return new


def bakes_in_fakes(traced: fx.GraphModule) -> bool:
    """Return whether a fake tensor became a constant: its computation bypassed the dispatcher."""
    names = (str(node.target) for node in traced.graph.nodes if node.op == "get_attr")
    return any(isinstance(_attribute(traced, name), internals.FakeTensor) for name in names)


def _items(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that unpack a node's result, and the nodes that unpack its items."""
    items = [user for user in node.users if user.target is operator.getitem]
    for item in items:
        items += [user for user in item.users if user.target is operator.getitem]
    return items


def _attribute(module: fx.GraphModule, path: str) -> Any:
    return operator.attrgetter(path)(module)
