"""Forward pass of a step as tasks and buffers, with its saved tensors.

Compilers compute an elementwise result at its readers, and materialize it only for a library kernel
or for backward, once per format. They do not save results that the backward pass can recompute in
one kernel from tensors that are saved anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from qsync_fx.formats import FORMATS, FP32
from qsync_fx.predictor.cost_mapper import States
from qsync_fx.predictor.memory.attention_memory import Matrices, is_fused, scratch
from qsync_fx.predictor.memory.buffers import (
    GATES,
    GATHERS,
    HEAVY,
    Buffer,
    Category,
    Task,
    Values,
    attends,
    convolves,
    draws_alone,
    pools,
    whole,
)
from qsync_fx.predictor.model.model_graph import ModelOperator, ModelRead, Name, format_named

Sources = frozenset[Buffer]
"""Buffers from which a value that is not materialized is computed."""


class Forward(Values):
    """Tasks, buffers and saved tensors of the forward pass.

    Attributes:
        kept: saved tensors by operator index, except factors of products.
        outputs: buffers of the model's results.
        again: buffers that the backward pass recomputes, with their sources.
        factors: by operator and operand index of a product, the buffer that it reads; None for a
            parameter in its own format.
        matrices: buffers of attention without a fused kernel, by operator index.
    """

    def __init__(self, states: States) -> None:
        super().__init__(states)
        self.kept: dict[int, Sources] = {}
        self.factors: dict[tuple[int, int], Buffer | None] = {}
        self.matrices: dict[int, Matrices] = {}
        self._tasks: list[list[Task]] = [[] for _ in range(len(self.graph.operators) + 1)]
        # Values from before the step need no additional bytes, but count as reads.
        self._sources: dict[int, Sources] = {
            index: frozenset({Buffer(value.name, value.own, 0)})
            for index, value in enumerate(self.graph.values)
            if value.source != "operator" and value.tensor == index
        }
        self._extras: dict[int, list[Buffer]] = {}
        self.again: dict[Buffer, Sources] = {}
        self._made_at: dict[Buffer, int] = {}
        self._there: dict[tuple[int, Name], Buffer] = {}
        self._by_name = {value.name: index for index, value in enumerate(self.graph.values)}
        for index, operator in enumerate(self.graph.operators):
            if self.root(operator.result) == operator.result:
                self._operator(index, operator)
        inputs = [
            self._lie(read.value, self.graph.values[read.value].own, len(self.graph.operators))
            for read in self.graph.outputs
        ]
        self.outputs = frozenset(buffer for buffer in inputs if buffer is not None)
        self._keep()

    @property
    def tasks(self) -> list[Task]:
        """Tasks in execution order."""
        return [task for tasks in self._tasks for task in tasks]

    def tasks_of(self, index: int) -> list[Task]:
        """Return the tasks of an operator by its index."""
        return self._tasks[index]

    def read_of(self, value: int) -> Sources:
        """Return the sources of a value; a value from before the step is its own source."""
        return self._sources.get(self.root(value), frozenset())

    def extras(self, index: int) -> Sources:
        """Return the saved extras of an operator by its index: statistics, masks, indices."""
        return frozenset(self._extras.get(index, ()))

    def _wanted(self, read: ModelRead, precision: Name) -> Name:
        return read.wanted.get(precision or "") or self.states.held(read.value)

    def _operator(self, index: int, operator: ModelOperator) -> None:
        result, (precision, output) = operator.result, self.states.names[index]
        if not self.multiplies(operator):
            self._sources[result] = self._elementwise(index, operator, output)
            return
        if attends(operator) and not is_fused(self.graph, operator, (precision, output)):
            self._attention(index, operator)
            return
        reads: list[Buffer] = []
        for place, read in enumerate(operator.reads):
            wanted = self._wanted(read, precision)
            copies = self.is_part(read.value) and not self._strides(operator, read, wanted)
            lies = self._part if copies else self._lie
            buffer = self.factors[index, place] = lies(read.value, wanted, index)
            if buffer is not None:
                reads.append(buffer)
        workspace, extras = 0, list[Buffer]()
        if attends(operator):
            workspace = scratch(self.graph, operator, self.states.names[index])[0]
            extras = self._extras_of(index, operator)
        self._extras[index] = extras
        fmt = format_named(precision)
        if fmt is not None and fmt.scaled and convolves(operator):
            workspace = sum(self.bytes(read.value, fmt.carrier.name) for read in operator.reads[:2])
        if convolves(operator):
            # oneDNN copies the weights into its own layout.
            carrier = fmt.carrier.name if fmt is not None else None
            workspace += self.bytes(operator.reads[1].value, carrier)
        buffer = Buffer(self.graph.values[result].name, output, self.bytes(result, output))
        self._task(index, True, reads, buffer, *extras, workspace=workspace)
        self._sources[result] = frozenset({buffer})
        self._there[result, output] = buffer

    def _strides(self, operator: ModelOperator, read: ModelRead, fmt: Name) -> bool:
        """Return whether the fused CPU attention kernel reads a view of a product in place."""
        root = self.root(read.value)
        return (
            attends(operator)
            and self.graph.device == "cpu"
            and self._is_product(root)
            and fmt == self.states.held(read.value)
        )

    def _attention(self, index: int, operator: ModelOperator) -> None:
        """Add the tasks of attention without a fused kernel."""
        result, (_, output) = operator.result, self.states.names[index]
        buffer = Buffer(self.graph.values[result].name, output, self.bytes(result, output))
        matrices = self.matrices[index] = Matrices.of(self, index, operator)
        sources = tuple(self.read_of(read.value) for read in operator.reads)
        self._tasks[index] += matrices.forward(operator.id, sources, buffer)
        self._tasks[-1] += matrices.copied(operator.id)
        self.factors |= {(index, place): item for place, item in enumerate(matrices.factors)}
        self._made_at |= {item: index for task in self._tasks[index] for item in task.writes}
        self._sources[result] = frozenset({buffer})
        self._there[result, output] = buffer

    def _elementwise(self, index: int, operator: ModelOperator, output: Name) -> Sources:
        """Return the sources of an elementwise result, and add tasks that write its extras."""
        if pools(operator):
            # Pooling materializes its operand and its result.
            self._lie(operator.reads[0].value, self.states.held(operator.reads[0].value), index)
        sources = frozenset[Buffer]().union(*(self.read_of(read.value) for read in operator.reads))
        extras = self._extras[index] = self._extras_of(index, operator)
        if pools(operator):
            pooled = Buffer(
                self.graph.values[operator.result].name, output, self.bytes(operator.result, output)
            )
            self._task(index, False, sources, pooled, *extras)
            self._there[operator.result, output] = pooled
            return frozenset({pooled})
        if "dropout" in operator.row and extras and draws_alone(operator):
            self._task(index, True, (), *extras)
        elif "dropout" in operator.row and extras:
            drawn = Buffer(
                f"numbers of {extras[0].name}", output, self.bytes(operator.result, output)
            )
            self._task(index, True, (), drawn)
            self._task(index, False, {drawn}, *extras)
        elif extras:
            self._task(index, False, sources, *extras)
        return sources | frozenset(extras)

    def _extras_of(self, index: int, operator: ModelOperator) -> list[Buffer]:
        """Return new buffers for the saved extras of an operator."""
        return [
            Buffer(f"{name} {settings}", None, self._extra_bytes(operator, whole(size)))
            for (name, settings), size in operator.costs[self.states.names[index]].saved.items()
            if settings.startswith("extra")
        ]

    def _extra_bytes(self, operator: ModelOperator, size: int) -> int:
        if pools(operator):
            # An index within a pooling window is saved as one byte.
            return whole(self.graph.values[operator.result].numel)
        return size

    def _part(self, value: int, fmt: Name, index: int) -> Buffer:
        if (value, fmt) not in self._there:
            buffer = Buffer(self.graph.values[value].name, fmt, self.bytes(value, fmt))
            self._task(index, False, self.read_of(value), buffer)
            self._there[value, fmt] = buffer
        return self._there[value, fmt]

    def _lie(self, value: int, fmt: Name, index: int) -> Buffer | None:
        """Materialize a value for an operator; return None if it exists before the step."""
        root = self.root(value)
        live = self.states.held(value)
        if self.given(root):
            live = self.graph.values[root].own
        if self.given(root) and fmt == live:
            return None
        if (root, fmt) in self._there:
            return self._there[root, fmt]
        reads = self.read_of(root)
        scaled = fmt is not None and FORMATS[fmt].scaled
        if scaled:
            # A quantizer reads its materialized operand twice.
            source = self._lie(value, live, index)
            reads = frozenset(filter(None, [source]))
        category = Category.TEMPORARY if fmt == live else Category.CASTS
        buffer = Buffer(self.graph.values[root].name, fmt, self.bytes(root, fmt), category)
        self._task(index, scaled, reads, buffer)
        self._there[root, fmt] = buffer
        if fmt == live:
            self._sources[root] = frozenset({buffer})
        return buffer

    def _task(
        self,
        index: int,
        library: bool,
        reads: Iterable[Buffer],
        *writes: Buffer,
        workspace: int = 0,
    ) -> None:
        name = self.graph.operators[index].id if index < len(self.graph.operators) else ""
        self._tasks[index].append(Task(name, False, library, frozenset(reads), writes, workspace))
        for buffer in writes:
            self._made_at[buffer] = index

    # Saved tensors.

    def _keep(self) -> None:
        """Determine the saved tensors: product operands and results, and values not recomputed."""
        late: list[tuple[int, int, Name]] = []
        for index, operator in enumerate(self.graph.operators):
            self._add(index, self._extras.get(index, ()))
            if index in self.matrices:
                self._add(index, self.matrices[index].saved)
                continue
            for name, settings in operator.costs[self.states.names[index]].saved:
                if settings.startswith("extra") or pools(operator):
                    continue  # the gradient of pooling reads indices only
                root, fmt = self.root(self._by_name[name]), settings or None
                if self.multiplies(operator):
                    if not any(
                        self.root(read.value) == root and self.is_part(read.value)
                        for read in operator.reads
                    ):
                        self._hold(index, root, fmt)
                elif self._is_product(root):
                    # A wider copy is recomputed from the narrower one.
                    self._hold(
                        index,
                        root,
                        min((fmt, self.states.held(root)), key=lambda name: self.bytes(root, name)),
                    )
                elif not self.given(root):
                    late.append((index, root, fmt))
        certain = frozenset[Buffer]().union(*self.kept.values())
        for index, root, fmt in late:
            operator, again = self.graph.operators[index], self._again(root, certain)
            if self._there.get((root, fmt)) in certain:
                self._hold(index, root, fmt)
            elif again is not None and self._heavy(root):
                self._add(index, (self._made_again(root, again),))
            elif fmt is None or again is not None:
                self._add(index, again or ())
            elif operator.row in GATES and operator.result == root:
                self._gate(index, root)
            else:
                self._hold(index, root, fmt)

    def _heavy(self, root: int) -> bool:
        maker = self.made_by(root)
        return maker is not None and maker.row in HEAVY

    def _made_again(self, root: int, sources: Sources) -> Buffer:
        """Return the buffer of a value that the backward pass recomputes once for all readers."""
        result = next(
            (buffer for buffer in self.again if buffer.name == self.graph.values[root].name), None
        )
        if result is None:
            result = Buffer(
                self.graph.values[root].name, FP32.name, self.bytes(root, FP32.name), passing=True
            )
            self.again[result] = sources
        return result

    def _is_product(self, root: int) -> bool:
        maker = self.made_by(root)
        return maker is not None and self.multiplies(maker)

    def _again(self, root: int, certain: Sources) -> Sources | None:
        """Return the sources to recompute a value in the backward pass; None if one is missing."""
        operator = self.made_by(root)
        if operator is None or operator.row in GATHERS or self.multiplies(operator):
            return None
        index = self.graph.places[operator.id]
        result = self.kept.get(index, frozenset())
        for used, fmt in self._read_by(index, operator):
            existing = {
                self._there[used, name]
                for name in (fmt, self.states.held(used))
                if (used, name) in self._there
            }
            # A materialized source that is not saved would have to be materialized again.
            more = existing & certain or (None if existing else self._again(used, certain))
            if more is None:
                return None
            result |= more
        return result

    def _read_by(self, index: int, operator: ModelOperator) -> Iterator[tuple[int, Name]]:
        for read in operator.reads:
            if not self.given(read.value):
                yield self.root(read.value), self._wanted(read, self.states.names[index][0])

    def _hold(self, index: int, root: int, fmt: Name) -> None:
        buffer = self._lie(root, fmt, index)
        self._add(index, filter(None, [buffer]))

    def _add(self, index: int, buffers: Iterable[Buffer]) -> None:
        self.kept[index] = self.kept.get(index, frozenset()) | frozenset(buffers)

    def _gate(self, index: int, root: int) -> None:
        """Save the gate of a ReLU whose result is not saved otherwise: one byte per element."""
        value, sources = self.graph.values[root], self.read_of(root)
        buffer = Buffer(value.name, None, whole(value.numel))
        self._task(
            max([index, *(self._made_at.get(source, 0) for source in sources)]),
            False,
            sources,
            buffer,
        )
        self._add(index, (buffer,))
