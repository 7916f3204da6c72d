"""Re-traces what Dynamo wrote into pre-dispatch ATen, piece by piece.

Invariant: the new graph computes what the old one computes, to the last bit, in training too: pre-dispatch tracing records above
autograd, so nothing is differentiated, decomposed by dtype or hidden behind a mode. Nodes that make_fx must not trace through stay as
Dynamo wrote them (pieces.py), and the code between them is re-traced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from qsync_fx.errors import PassError
from qsync_fx.graph import meta
from qsync_fx.graph.copies import adopt_attributes
from qsync_fx.graph.effects.modes import Effect, affects_tracing, effect_of, is_switch, mark_unlisted
from qsync_fx.passes.tracing.moves import copied
from qsync_fx.passes.tracing.pieces import hooks_gradients, pieces
from qsync_fx.passes.tracing.tracer import Tracking, pre_dispatch

_HOOKED = "a hook sees its gradient, in the type that the model has"


def rebuild(
    module: fx.GraphModule, inputs: list[Any], keep: Callable[[fx.Node, fx.GraphModule], None]
) -> tuple[fx.GraphModule, list[str]]:
    """Returns the module re-traced to pre-dispatch ATen, and what could not be re-traced and why.

    Args:
        module: a graph as Dynamo writes it.
        inputs: one fake tensor, SymInt or plain value a placeholder.
        keep: called with every higher-order node that is kept (already in the new graph) and the old module that its bodies are in;
            it may give the node new bodies.

    The caller is responsible for the fake mode and for restoring autocast and grad mode.
    """
    mark_unlisted(module.graph)
    builder = _Builder(module)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, value in zip(placeholders, inputs, strict=True):
        builder.copy(node, value)
    for piece in pieces(module.graph):
        if piece.kept:
            for node in piece.nodes:
                builder.keep(node, keep, piece.leveled)
        else:
            builder.retrace(tuple(node for node in piece.nodes if node not in builder.mapped))
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    builder.copy(output, None)
    return builder.finish(), builder.failures


def current(value: Any) -> Any:
    """Returns what Dynamo noted for a node as values of the fake mode that is active: Dynamo hands a graph on with a fresh one."""
    mode = active_fake_mode()

    def convert(fake: Any) -> Any:
        if not isinstance(fake, FakeTensor) or fake.fake_mode is mode or fake.layout is not torch.strided:
            return fake
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)

    return value if mode is None else pytree.tree_map(convert, value)


class _Builder:
    """Builds the new graph; `values` and `mapped` tell each old node's fake value and its nodes in the new graph."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.graph = fx.Graph()
        self.root: dict[str, Any] = {}
        self.values: dict[fx.Node, Any] = {}
        self.mapped: dict[fx.Node, Any] = {}
        self.constants: dict[str, Any] = {}
        self.failures: list[str] = []
        self.count = 0

    def copy(self, node: fx.Node, value: Any) -> fx.Node:
        """Copies a node, its metadata and the attribute that it names, as it is."""
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
        """Copies a node that names an attribute, once."""
        if node.op != "get_attr" or node in self.mapped:
            return
        value = self.root[str(node.target)] = _attribute(self.module, str(node.target))
        mode = active_fake_mode()
        if isinstance(value, torch.Tensor) and mode is not None:
            value = mode.from_tensor(value, static_shapes=True)
        self.copy(node, value)

    def keep(self, node: fx.Node, keep: Callable[[fx.Node, fx.GraphModule], None], leveled: bool = False) -> None:
        """Copies a node that stays as Dynamo wrote it.

        Args:
            leveled: whether the node is between the entry and the exit of a level.
        """
        if is_switch(node):
            self.copy(node, self._execute(node, leveled))
            return
        if hooks_gradients(node):
            for used in node.all_input_nodes:
                self._set_apart(used)
        new = self.copy(node, current(node.meta.get("example_value")))
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            keep(new, self.module)
            for used in new.all_input_nodes:
                if used.op == "get_attr" and used in (meta.REPLACED.get(new) or {}):
                    self.root[str(used.target)] = meta.REPLACED[new][used]
            del meta.REPLACED[new]
        elif hooks_gradients(node):
            meta.OPAQUE[new] = _HOOKED
        elif node.target is not operator.getitem:
            meta.OPAQUE[new] = "kept as Dynamo wrote it: between vmap's borders values are no plain tensors"

    def _execute(self, node: fx.Node, leveled: bool) -> Any:
        """Execute a call that changes state, for the pieces after it to be traced in that state.

        Levels are not entered, so a call between them whose effect is unlisted may not work.

        Returns:
            the call's result; None if it is not executed.
        """
        if not affects_tracing(node) or (leveled and effect_of(node) is Effect.UNLISTED):
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda used: self.values[used])
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _set_apart(self, used: fx.Node) -> None:
        """Gives what a hook is put on a node of its own, in the model's type, that everybody reads: a hook sees the whole gradient."""
        source = self.mapped[used]
        if not isinstance(self.values[used], torch.Tensor):
            return
        with self.graph.inserting_after(source):
            apart = self.graph.call_function(torch.ops.aten.alias.default, (source,))
        apart.meta.update(source.meta)
        meta.OPAQUE[apart] = _HOOKED
        source.replace_all_uses_with(apart, delete_user_cb=lambda user: user is not apart)
        self.mapped.update({old: apart for old, new in self.mapped.items() if new is source})

    def retrace(self, nodes: tuple[fx.Node, ...]) -> None:
        """Re-traces nodes into the new graph; where make_fx fails, keeps the node it fails at and re-traces the rest around it."""
        if not nodes:
            return
        piece, external, results = self._extract(nodes)
        interpreter = Tracking(piece)

        def run(*args: Any) -> Any:
            return interpreter.run(*args)

        for used in external:
            self.fetch(used)
        inputs = [self.values[node] for node in external]
        try:
            traced = pre_dispatch(run, inputs)
        except Exception as error:  # noqa: BLE001 - whatever fails in tracing, the node stays as Dynamo wrote it
            bad = next((n for n in nodes if n.name == interpreter.at), nodes[0])
            self._leave(nodes, bad, type(error).__name__, str(error).partition("\n")[0])
            return
        if not _bakes_in_fakes(traced):
            self._inline(traced, external, results)
        elif len(nodes) == 1:
            self._leave(nodes, nodes[0], "UntracedValue", "it computes a value past the dispatcher, which tracing sees")
        else:
            # Which node it is shows where it stands alone.
            self.retrace(nodes[: len(nodes) // 2])
            self.retrace(nodes[len(nodes) // 2 :])

    def _leave(self, nodes: tuple[fx.Node, ...], bad: fx.Node, kind: str, message: str) -> None:
        """Keeps one of the nodes as Dynamo wrote it, and re-traces those before and after it."""
        if by := meta.put_in_by(bad):
            raise PassError(
                f"pass {by!r} has put in %{bad.name}, which cannot be traced: {kind}: {message}",
                where=f"pass {by!r}, node %{bad.name}",
                do="call operators of torch, or functions that compute with tensors alone",
            )
        self.failures.append(f"{bad.name}: {kind}: {message}")
        where = nodes.index(bad)
        if where:
            self.retrace(nodes[:where])
        new = self.copy(bad, current(bad.meta.get("example_value")))
        meta.OPAQUE[new] = f"kept as Dynamo wrote it, since it cannot be re-traced ({kind})"
        # The inputs of a trace are single tensors, so a trace cannot read a result that is a tuple.
        items = _items(bad)
        for item in items:
            self.copy(item, current(item.meta.get("example_value")))
        if rest := tuple(node for node in nodes[where + 1 :] if node not in items):
            self.retrace(rest)

    def _extract(self, nodes: tuple[fx.Node, ...]) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
        """Returns the nodes as a module of their own, the nodes whose values they need, and those whose values others need."""
        inside = set(nodes)
        needed = dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in inside)
        bodies = [used for used in needed if _is_body(self.module, used)]
        external = [used for used in needed if used not in bodies]
        graph = fx.Graph()
        local: dict[fx.Node, fx.Node] = {used: graph.placeholder(used.name) for used in external}
        local.update((used, graph.node_copy(used)) for used in bodies)
        for node in nodes:
            local[node] = copied(graph, node, local)
        results = [node for node in nodes if any(user not in inside for user in node.users)]
        graph.output(tuple(local[node] for node in results))
        return fx.GraphModule(self.module, graph), external, results

    def _inline(self, traced: fx.GraphModule, external: list[fx.Node], results: list[fx.Node]) -> None:
        leaves = pytree.tree_leaves([self.mapped[node] for node in external])
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
            # What `torch.tensor([1, 2])` and `x[[0, 2]]` write down. As buffers AOTAutograd would take them for the user's and miss their
            # source; as attributes it copies their values into its own graph.
            new.__dict__[name] = new._buffers.pop(name)
        return new


def _bakes_in_fakes(traced: fx.GraphModule) -> bool:
    """Whether a fake tensor has become a constant: a value that something computed without the dispatcher, so that tracing missed it."""
    named = (_attribute(traced, str(node.target)) for node in traced.graph.nodes if node.op == "get_attr")
    return any(isinstance(value, FakeTensor) for value in named)


def _items(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that unpack a node's result, and those that unpack the items."""
    items = [user for user in node.users if user.target is operator.getitem]
    for item in items:
        items += [user for user in item.users if user.target is operator.getitem]
    return items


def _is_body(module: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(_attribute(module, str(node.target)), torch.nn.Module)


def _attribute(module: fx.GraphModule, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value
