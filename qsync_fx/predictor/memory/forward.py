"""Forward pass of a step as tasks and buffers, with its saved tensors.

Compilers compute an elementwise result at its readers, and materialize it only for a library kernel
or for backward, once per format. They do not save results that the backward pass can recompute in
one kernel from tensors that are saved anyway.
"""

from __future__ import annotations

from collections.abc import Iterable

from qsync_fx.formats import FORMATS, FP32
from qsync_fx.predictor.cost_mapper import States
from qsync_fx.predictor.memory.attention_memory import Matrices, is_fused
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
    integer_size,
    pools,
)
from qsync_fx.predictor.memory.cuda_memory import convolution_workspace, on_gpu
from qsync_fx.predictor.model.model_graph import ModelOperator, ModelRead, Name

Sources = frozenset[Buffer]
"""Buffers from which a value that is not materialized is computed."""


class Forward(Values):
    """Tasks, buffers and saved tensors of the forward pass.

    Attributes:
        kept: saved tensors by operator index, except factors of products.
        tasks_by_operator: tasks by operator index, and at last those after all operators.
        again: buffers that the backward pass recomputes, with their sources.
        factors: by operator and operand index of a product, the buffer that it reads; None for a
            parameter in its own format.
        matrices: buffers of attention without a fused kernel, by operator index.
    """

    def __init__(self, states: States, fused_attention: bool = True) -> None:
        super().__init__(states)
        self._fused_attention = fused_attention
        graph, count = self.graph, len(self.graph.operators)
        self.saved_buffers: dict[int, Sources] = {}
        self.factors: dict[tuple[int, int], Buffer | None] = {}
        self.matrices: dict[int, Matrices] = {}
        self.again: dict[Buffer, Sources] = {}
        self.tasks_by_operator: list[list[Task]] = [[] for _ in range(count + 1)]
        # Values from before the step need no additional bytes, but count as reads.
        self._sources: dict[int, Sources] = {
            index: frozenset({Buffer(value.name, value.own, 0)})
            for index, value in enumerate(graph.values)
            if value.source != "operator" and value.tensor == index
        }
        self._extras: dict[int, list[Buffer]] = {}
        self._made_at: dict[Buffer, int] = {}
        self._buffers: dict[tuple[int, Name], Buffer] = {}
        for index, operator in enumerate(graph.operators):
            if self.root(operator.result) == operator.result:
                self._operator(index, operator)
        results = (
            self._lie(read.value, graph.values[read.value].own, count) for read in graph.outputs
        )
        self.outputs = frozenset(filter(None, results))
        self._keep()

    @property
    def tasks(self) -> list[Task]:
        """Tasks in execution order."""
        return [task for tasks in self.tasks_by_operator for task in tasks]

    def read_of(self, value: int) -> Sources:
        """Return the sources of a value; a value from before the step is its own source."""
        return self._sources.get(self.root(value), frozenset())

    def extras(self, index: int) -> Sources:
        """Return the saved extras of an operator by its index: statistics, masks, indices."""
        return frozenset(self._extras.get(index, ()))

    def _wanted(self, read: ModelRead, precision: Name) -> Name:
        return read.wanted.get(precision or "") or self.states.format_of(read.value)

    def _operator(self, index: int, operator: ModelOperator) -> None:
        result, (precision, output) = operator.result, self.states.names[index]
        if not self.multiplies(operator):
            self._sources[result] = self._elementwise(index, operator, output)
            return
        if attends(operator):
            state, fused = (precision, output), self._fused_attention
            if not is_fused(self.graph, operator, state, on_gpus=fused):
                self._attention(index, operator)
                return
        for place, read in enumerate(operator.reads):
            wanted = self._wanted(read, precision)
            copies = self.is_part(read.value) and not self._strides(operator, read, wanted)
            lies = self._part if copies else self._lie
            self.factors[index, place] = lies(read.value, wanted, index)
        factors = [self.factors[index, place] for place in range(len(operator.reads))]
        extras = self._extras_of(index, operator) if attends(operator) else []
        self._extras[index] = extras
        written = self._written(result, output)
        workspace = 0
        if on_gpu(self.graph) and convolves(operator):
            read_as = ((read.value, self._wanted(read, precision)) for read in operator.reads)
            operands = sum(self.bytes(value, fmt) for value, fmt in read_as)
            workspace = convolution_workspace(operands, written.bytes)
        self._task(index, True, filter(None, factors), written, *extras, workspace=workspace)

    def _written(self, result: int, output: Name) -> Buffer:
        """Return the buffer of a materialized result, from which its readers compute."""
        buffer = Buffer(self.graph.values[result].name, output, self.bytes(result, output))
        self._sources[result] = frozenset({buffer})
        self._buffers[result, output] = buffer
        return buffer

    def _strides(self, operator: ModelOperator, read: ModelRead, fmt: Name) -> bool:
        """Return whether the fused CPU attention kernel reads a view of a product in place."""
        maker = self.made_by(read.value)
        return (
            attends(operator)
            and self.graph.device == "cpu"
            and maker is not None
            and self.multiplies(maker)
            and fmt == self.states.format_of(read.value)
        )

    def _attention(self, index: int, operator: ModelOperator) -> None:
        """Add the tasks of attention without a fused kernel."""
        matrices = self.matrices[index] = Matrices(self, index, operator)
        sources = tuple(self.read_of(read.value) for read in operator.reads)
        buffer = self._written(operator.result, self.states.names[index][1])
        self.tasks_by_operator[index] += matrices.forward(operator.id, sources, buffer)
        self.tasks_by_operator[-1] += matrices.copied(operator.id)
        self.factors |= {(index, place): item for place, item in enumerate(matrices.factors)}
        for task in self.tasks_by_operator[index]:
            self._made_at |= dict.fromkeys(task.writes, index)

    def _elementwise(self, index: int, operator: ModelOperator, output: Name) -> Sources:
        """Return the sources of an elementwise result, and add tasks that write its extras."""
        if pools(operator):
            # Pooling materializes its operand and its result.
            self._lie(
                operator.reads[0].value, self.states.format_of(operator.reads[0].value), index
            )
        sources = frozenset[Buffer]().union(*(self.read_of(read.value) for read in operator.reads))
        extras = self._extras[index] = self._extras_of(index, operator)
        if pools(operator):
            pooled = self._written(operator.result, output)
            self._task(index, False, sources, pooled, *extras)
            return frozenset({pooled})
        if not extras:
            return sources
        if "dropout" not in operator.row:
            self._task(index, False, sources, *extras)
        elif draws_alone(operator):
            self._task(index, True, (), *extras)
        else:
            size = self.bytes(operator.result, output)
            drawn = Buffer(f"numbers of {extras[0].name}", output, size)
            self._task(index, True, (), drawn)
            self._task(index, False, {drawn}, *extras)
        return sources | frozenset(extras)

    def _extras_of(self, index: int, operator: ModelOperator) -> list[Buffer]:
        """Return new buffers for the saved extras of an operator."""
        extras = []
        for (name, settings), size in operator.costs[self.states.names[index]].saved.items():
            if pools(operator):
                # An index within a pooling window is saved as one byte.
                size = self.graph.values[operator.result].numel
            if settings.startswith("extra"):
                extras.append(Buffer(f"{name} {settings}", None, integer_size(size)))
        return extras

    def _part(self, value: int, fmt: Name, index: int) -> Buffer:
        if (value, fmt) not in self._buffers:
            buffer = Buffer(self.graph.values[value].name, fmt, self.bytes(value, fmt))
            self._task(index, False, self.read_of(value), buffer)
            self._buffers[value, fmt] = buffer
        return self._buffers[value, fmt]

    def _lie(self, value: int, fmt: Name, index: int) -> Buffer | None:
        """Materialize a value for an operator; return None if it exists before the step."""
        root, live = self.root(value), self.states.format_of(value)
        if self.exists_before_step(root):
            live = self.graph.values[root].own
            if fmt == live:
                return None
        if (root, fmt) in self._buffers:
            return self._buffers[root, fmt]
        reads = self.read_of(root)
        scaled = fmt is not None and FORMATS[fmt].scaled
        if scaled:
            # A quantizer reads its materialized operand twice.
            reads = frozenset(filter(None, [self._lie(value, live, index)]))
        category = Category.TEMPORARY if fmt == live else Category.CASTS
        buffer = Buffer(self.graph.values[root].name, fmt, self.bytes(root, fmt), category)
        self._task(index, scaled, reads, buffer)
        self._buffers[root, fmt] = buffer
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
        task = Task(name, False, library, frozenset(reads), writes, workspace)
        self.tasks_by_operator[index].append(task)
        for buffer in writes:
            self._made_at[buffer] = index

    # Saved tensors.

    def _keep(self) -> None:
        """Determine the saved tensors: product operands and results, and values not recomputed."""
        late: list[tuple[int, int, Name]] = []
        by_name = {value.name: index for index, value in enumerate(self.graph.values)}
        for index, operator in enumerate(self.graph.operators):
            self._add(index, self._extras.get(index, ()))
            if index in self.matrices:
                self._add(index, self.matrices[index].saved)
                continue
            parts = {self.root(read.value) for read in operator.reads if self.is_part(read.value)}
            for name, settings in operator.costs[self.states.names[index]].saved:
                if settings.startswith("extra") or pools(operator):
                    continue  # the gradient of pooling reads indices only
                root, fmt = self.root(by_name[name]), settings or None
                maker = self.made_by(root)
                if self.multiplies(operator):
                    if root not in parts:
                        self._hold(index, root, fmt)
                elif maker is not None and self.multiplies(maker):
                    # A wider copy is recomputed from the narrower one.
                    formats = fmt, self.states.format_of(root)
                    self._hold(index, root, min(formats, key=lambda name: self.bytes(root, name)))
                elif not self.exists_before_step(root):
                    late.append((index, root, fmt))
        certain = frozenset[Buffer]().union(*self.saved_buffers.values())
        for index, root, fmt in late:
            operator, again = self.graph.operators[index], self._again(root, certain)
            maker = self.made_by(root)
            if self._buffers.get((root, fmt)) in certain:
                self._hold(index, root, fmt)
            elif again is not None and maker is not None and maker.row in HEAVY:
                self._add(index, (self._made_again(root, again),))
            elif fmt is None or again is not None:
                self._add(index, again or ())
            elif operator.row in GATES and operator.result == root:
                self._gate(index, root)
            else:
                self._hold(index, root, fmt)

    def _made_again(self, root: int, sources: Sources) -> Buffer:
        """Return the buffer of a value that the backward pass recomputes once for all readers."""
        name = self.graph.values[root].name
        for buffer in self.again:
            if buffer.name == name:
                return buffer
        result = Buffer(name, FP32.name, self.bytes(root, FP32.name), passing=True)
        self.again[result] = sources
        return result

    def _again(self, root: int, certain: Sources) -> Sources | None:
        """Return the sources to recompute a value in the backward pass; None if one is missing."""
        operator = self.made_by(root)
        if operator is None or operator.row in GATHERS or self.multiplies(operator):
            return None
        index = self.graph.places[operator.id]
        result = self.saved_buffers.get(index, frozenset())
        for read in operator.reads:
            if self.exists_before_step(read.value):
                continue
            used = self.root(read.value)
            formats = self._wanted(read, self.states.names[index][0]), self.states.format_of(used)
            existing = {self._buffers[used, fmt] for fmt in formats if (used, fmt) in self._buffers}
            # A materialized source that is not saved would have to be materialized again.
            more = existing & certain or (None if existing else self._again(used, certain))
            if more is None:
                return None
            result |= more
        return result

    def _hold(self, index: int, root: int, fmt: Name) -> None:
        self._add(index, filter(None, [self._lie(root, fmt, index)]))

    def _add(self, index: int, buffers: Iterable[Buffer]) -> None:
        self.saved_buffers[index] = self.saved_buffers.get(index, frozenset()) | frozenset(buffers)

    def _gate(self, index: int, root: int) -> None:
        """Save the gate of a ReLU whose result is not saved otherwise: one byte per element."""
        value, sources = self.graph.values[root], self.read_of(root)
        buffer = Buffer(value.name, None, integer_size(value.numel))
        last = max(index, *(self._made_at.get(source, 0) for source in sources), 0)
        self._task(last, False, sources, buffer)
        self._add(index, (buffer,))
