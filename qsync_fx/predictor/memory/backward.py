"""Backward pass of a step as tasks and buffers, including the parameter gradients.

It visits the operators of the forward pass once, in reverse order. The gradient of a value with
several readers is a sum, computed at its reader. Tensors that activation checkpointing discards are
recomputed before their first reader.

`recomputed` models the option "memory_budget" by the rule of torch's partitioner, see
`choose_saved_values_set` in torch/_functorch/partitioners.py. Below a budget of 1, elementwise
results are recomputed from saved results of products. If these still exceed the budget, a knapsack
selects products to recompute, so that the saved results have the most floating-point operations. A
recomputed tensor is live from its first to its last reader in the backward pass. Long chains of
recomputed operators therefore reduce peak memory less than they reduce the saved bytes, and may
increase it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from qsync_fx.formats import FORMATS, FP32
from qsync_fx.predictor.memory.buffers import (
    GATHERS,
    Buffer,
    Category,
    Task,
    attends,
    convolves,
    has_expensive_gradient,
    integer_size,
    pools,
    value_bytes,
)
from qsync_fx.predictor.memory.cuda_memory import convolution_workspace, on_gpu
from qsync_fx.predictor.memory.forward import Forward, Sources
from qsync_fx.predictor.model.model_graph import ModelOperator, ModelRead, Name
from qsync_fx.torch_internals import dp_knapsack

INDEX = 8
"""Bytes of an index."""
SPREADS = ("add", "sub", "rsub", "mul", "div", "where", "expand", "expand_as")
_TURNS = ("transpose", "permute", "t", "mT", "swapaxes", "movedim")
_OF_ROWS = ("layer_norm", "rms_norm")
READS = 12
"""Largest number of reads of a gradient that Inductor fuses; it materializes others (CPU)."""


class Backward:
    """Tasks of the backward pass.

    Attributes:
        incoming: tasks that write the gradients of the model's results.
        tasks: tasks after them, in program order: the cast of a gradient follows its product.
    """

    def __init__(self, forward: Forward) -> None:
        self.forward, self.graph = forward, forward.graph
        self.incoming: list[Task] = []
        self.tasks: list[Task] = []
        self._gradients: dict[int, Sources] = {}
        self._arrived: set[int] = set()
        self._carried: dict[Buffer, Buffer] = {}
        self._transposed = {forward.root(o.result) for o in self.graph.operators if o.row in _TURNS}
        self._there_again: set[Buffer] = set()
        self._scales: dict[Buffer, Buffer] = {}
        self._repeated: dict[Buffer, Buffer] = {}
        self._repeated_from = len(self.graph.operators)
        for read in self.graph.outputs:
            value = self.graph.values[read.value]
            if value.differentiated:
                size = forward.bytes(read.value, value.own)
                tangent = Buffer(f"gradient of {value.name}", value.own, size)
                self.incoming.append(Task("", True, True, writes=(tangent,)))
                self._arrive("", read.value, frozenset({tangent}))
        for index, operator in reversed(list(enumerate(self.graph.operators))):
            # Gradients of views arrive at their roots.
            if operator.result in self._gradients:
                self._repeat(index)
                self._operator(index, operator)

    def _task(
        self,
        operator: str,
        library: bool,
        reads: Iterable[Buffer],
        *writes: Buffer,
        workspace: int = 0,
        sums: bool = False,
    ) -> None:
        self.tasks.append(
            Task(operator, True, library, frozenset(reads), writes, workspace, sums=sums)
        )

    def _buffer(self, value: int, fmt: Name) -> Buffer:
        """Return a new buffer for the gradient of a value."""
        return Buffer(self._name(value), fmt, self.forward.bytes(value, fmt))

    def _arrive(self, operator: str, value: int, sources: Sources) -> None:
        root = self.forward.root(value)
        if self.graph.values[root].differentiated:
            sources |= self._gradients.get(root, frozenset())
            fmt = self.forward.states.format_of(root)
            self._gradients[root] = self._bounded(operator, root, sources, fmt)

    def _repeat(self, index: int) -> None:
        """Recompute the operators of a checkpointed body, all at once."""
        if not self.graph.operators[index].repeated or index >= self._repeated_from:
            return
        first = index
        while first and self.graph.operators[first - 1].repeated:
            first -= 1
        for place in range(first, index + 1):
            for task in self.forward.tasks_by_operator[place]:
                writes = tuple(replace(buffer) for buffer in task.writes)
                self._repeated |= dict(zip(task.writes, writes, strict=True))
                reads = self._now(task.reads)
                self.tasks.append(replace(task, backward=True, reads=reads, writes=writes))
        self._repeated_from = first

    def _now(self, buffers: Sources) -> Sources:
        return frozenset(self._repeated.get(buffer, buffer) for buffer in buffers)

    def _operator(self, index: int, operator: ModelOperator) -> None:
        incoming = self._gradients[operator.result]
        if self.forward.multiplies(operator):
            self._product(index, operator, incoming)
            return
        saved = self._now(self.forward.saved_buffers.get(index, frozenset()))
        for buffer in saved & (self.forward.again.keys() - self._there_again):
            self._there_again.add(buffer)
            self._task(operator.id, False, self.forward.again[buffer], buffer)
        if has_expensive_gradient(operator):
            saved |= {self._intermediate(operator, saved)}
        outgoing = incoming | saved
        if pools(operator) and operator.reads[0].gradient:
            outgoing = self._pooled(index, operator, incoming, saved)
        elif "norm" in operator.row:
            outgoing = self._normed(operator, incoming, saved)
        for read in operator.reads:
            if read.gradient and self._is_parameter(read.value):
                self._parameter(operator, read.value, incoming | saved)
            elif read.gradient:
                self._arrive(operator.id, read.value, self._spread(operator, read.value, outgoing))

    def _intermediate(self, operator: ModelOperator, saved: Sources) -> Buffer:
        """Return the FP32 intermediate of a gradient that is expensive and read several times."""
        size = self.forward.bytes(operator.result, FP32.name)
        buffer = Buffer(f"within {self._name(operator.result)}", FP32.name, size, passing=True)
        self._task(operator.id, False, saved, buffer)
        return buffer

    def _spread(self, operator: ModelOperator, value: int, outgoing: Sources) -> Sources:
        """Return the sources of an operand's gradient: a reduction if the operand was broadcast."""
        size, full = (integer_size(self.graph.values[n].numel) for n in (value, operator.result))
        if operator.row not in SPREADS or size >= full:
            return outgoing
        buffer = self._buffer(value, self.forward.states.format_of(value))
        self._task(operator.id, False, outgoing, buffer, sums=True)
        return frozenset({buffer})

    def _bounded(self, operator: str, value: int, sources: Sources, fmt: Name) -> Sources:
        """Return the sources of a gradient, materialized if they are more than `READS`."""
        if len(sources) <= READS:
            return sources
        buffer = self._buffer(value, fmt)
        self._task(operator, False, sources, buffer)
        return frozenset({buffer})

    def _is_parameter(self, value: int) -> bool:
        return self.graph.values[self.forward.root(value)].source == "parameter"

    def _name(self, value: int) -> str:
        return f"gradient of {self.graph.values[self.forward.root(value)].name}"

    def _normed(self, operator: ModelOperator, incoming: Sources, saved: Sources) -> Sources:
        """Add the tasks of a normalization; return the sources of its operand's gradient."""
        operand, index = operator.reads[0].value, self.graph.places[operator.id]
        weights = [read for read in operator.reads[1:] if read.gradient]
        factors = (self.forward.read_of(read.value) for read in weights if read.role == "weight")
        scales = frozenset[Buffer]().union(*factors)
        extras = sorted(self.forward.extras(index), key=lambda buffer: buffer.name)
        sums = [Buffer(f"sums of {self._name(operand)}", None, buffer.bytes) for buffer in extras]
        gradients = self._of_parameters(weights)

        def wide(sources: Sources) -> Sources:
            return self._bounded(operator.id, operand, sources, FP32.name)

        # Inverse deviation and weight are multiplied last, even if the rest is materialized.
        last = frozenset(extras[-1:])
        if not operator.row.startswith(_OF_ROWS):
            reads = incoming | wide(incoming | saved)
            self._task(operator.id, False, reads, *sums, *gradients, sums=True)
            return wide(incoming | saved | frozenset(sums)) | last | scales
        if self.forward.states.names[index][1] == FP32.name:
            # The normalized operand is saved, which needs no additional memory in FP32.
            saved -= frozenset(extras)
        weighed = wide(incoming | scales)
        self._task(operator.id, False, weighed | wide(weighed | saved), *sums)
        result = wide(weighed | saved | frozenset(sums)) | last
        if gradients:
            reads = incoming | wide(incoming | saved)
            self._task(operator.id, False, reads, *gradients, sums=True)
        return result

    def _of_parameters(self, reads: list[ModelRead]) -> list[Buffer]:
        """Return buffers for the gradients of parameters that have none yet."""
        parameters = filter(self._is_parameter, (read.value for read in reads))
        roots = dict.fromkeys(map(self.forward.root, parameters))
        return [self._gradient(root) for root in roots if root not in self._arrived]

    def _pooled(
        self, index: int, operator: ModelOperator, incoming: Sources, saved: Sources
    ) -> Sources:
        fmt, value = self.forward.states.names[index][1], operator.reads[0].value
        gradient = self._materialized(operator, incoming, fmt)
        size = INDEX * integer_size(self.graph.values[operator.result].numel)
        places = Buffer(f"places of {self._name(value)}", None, size)
        self._task(operator.id, False, saved, places)
        buffer = self._buffer(value, fmt)
        self._task(operator.id, True, {gradient, places}, buffer)
        return frozenset({buffer})

    def _materialized(self, operator: ModelOperator, incoming: Sources, fmt: Name) -> Buffer:
        """Materialize the gradient of an operator's result in a format."""
        buffer = self._buffer(operator.result, fmt)
        # The gradient of a transposed view is copied into another layout.
        if len(incoming) == 1 and operator.result not in self._transposed:
            (only,) = incoming
            if (only.format, only.bytes) == (fmt, buffer.bytes):
                return only
        self._task(operator.id, False, incoming, buffer)
        return buffer

    def _product(self, index: int, operator: ModelOperator, incoming: Sources) -> None:
        precision, output = self.forward.states.names[index]
        narrow, carrier = computed_in(precision)
        gradient = self._materialized(operator, incoming, narrow)
        at_once = convolves(operator) or attends(operator)
        # The backward kernel of a convolution includes the gradient of the bias.
        inputs = (0, 1, 2) if at_once else self.forward.multiplied(operator)
        values = [read.value for read in operator.reads]
        made = {
            place: self._made(values[place], carrier)
            for place, read in enumerate(operator.reads)
            if place in inputs and read.gradient
        }
        if index in self.forward.matrices:
            self.tasks += self.forward.matrices[index].backward(operator.id, gradient, made)
        elif at_once:
            factors = [self._factor(index, operator, place, carrier) for place in (0, 1)]
            workspace = 0
            if attends(operator):
                factors.append(self._factor(index, operator, 2, carrier))
                factors += self._now(self.forward.saved_buffers.get(index, frozenset()))
            elif on_gpu(self.graph):
                operand_bytes = sum(self.forward.bytes(value, carrier) for value in values)
                result_bytes = sum(buffer.bytes for buffer in made.values())
                workspace = convolution_workspace(operand_bytes + gradient.bytes, result_bytes)
            else:
                # oneDNN copies the weights into its own layout, and sums their gradient in FP32.
                workspace = 2 * self.forward.bytes(values[1], carrier)
            results, reads = tuple(made.values()), filter(None, [gradient, *factors])
            self._task(operator.id, True, reads, *results, workspace=workspace)
            # One task unpacks each result of the kernel; all results live until the last task.
            for result in results:
                self.tasks.append(Task(operator.id, True, True, writes=(result,), holds=results))
        for place, buffer in made.items():
            if not at_once:
                factor = self._factor(index, operator, self.forward.other(operator, place), carrier)
                self._task(operator.id, True, filter(None, [gradient, factor]), buffer)
            if self._is_parameter(values[place]) and not buffer.stays:
                self._parameter(operator, values[place], frozenset({buffer}))
        for place, read in enumerate(operator.reads):
            if place not in inputs and read.gradient and self._is_parameter(read.value):
                # The bias gradient is summed in the format of the incoming gradient.
                summed = incoming
                if narrow in (precision, output):
                    summed = frozenset({gradient})
                self._parameter(operator, read.value, summed, sums=True)
        for place, buffer in made.items():
            if not self._is_parameter(values[place]):
                scale = self._scale(index, self.forward.other(operator, place))
                self._arrive(operator.id, values[place], scale | {buffer})

    def _made(self, value: int, carrier: Name) -> Buffer:
        """Return the buffer for a factor's gradient, the final one for an unconverted parameter."""
        root = self.forward.root(value)
        unconverted = self._is_parameter(value) and self.graph.values[root].own == carrier
        if unconverted and root not in self._arrived:
            return self._gradient(root)
        return self._buffer(value, carrier)

    def _factor(
        self, index: int, operator: ModelOperator, place: int, carrier: Name
    ) -> Buffer | None:
        """Return a factor as its gradient product reads it; scaled factors in the compute dtype."""
        saved = self.forward.factors.get((index, place))
        if saved is None:
            return None
        saved = self._repeated.get(saved, saved)
        if saved.format is None or not FORMATS[saved.format].scaled:
            return saved
        if saved not in self._carried:
            size = self.forward.bytes(operator.reads[place].value, carrier)
            self._carried[saved] = Buffer(saved.name, carrier, size, Category.CASTS)
            self._task(operator.id, False, {saved}, self._carried[saved])
        return self._carried[saved]

    def _scale(self, index: int, place: int) -> Sources:
        """Return the scale of a factor saved in a scaled format, which multiplies the product."""
        saved = self.forward.factors.get((index, place))
        if saved is None or saved.format is None or not FORMATS[saved.format].scaled:
            return frozenset()
        scale = self._scales.setdefault(saved, Buffer(f"scale of {saved.name}", None, 0))
        return frozenset({scale})

    def _gradient(self, root: int) -> Buffer:
        self._arrived.add(root)
        final = self._buffer(root, self.graph.values[root].own)
        return replace(final, category=Category.GRADIENTS, stays=True)

    def _parameter(
        self, operator: ModelOperator, value: int, sources: Sources, sums: bool = False
    ) -> None:
        root = self.forward.root(value)
        if root in self._arrived:
            return  # gradients of further readers are accumulated in place
        gradient = self._gradient(root)
        if operator.row in GATHERS and self.graph.device == "cpu":
            # One kernel reads materialized rows.
            rows = self._materialized(operator, sources, gradient.format)
            self._task(operator.id, True, {rows}, gradient)
            return
        if operator.row in GATHERS:
            # Zeros need no input; the gradients of the rows that were read are added to them.
            self._task(operator.id, False, (), gradient)
        self._task(operator.id, False, sources, gradient, sums=sums)


def computed_in(precision: Name) -> tuple[Name, Name]:
    """Return the formats of a product's incoming gradient and of its gradient products."""
    if precision is None or not FORMATS[precision].scaled:
        return precision, precision
    return FORMATS[precision].gradient.name, FORMATS[precision].carrier.name


def recomputed(forward: Forward, backward: Sequence[Task], budget: float) -> RecomputedTasks:
    """Return the backward pass under an activation memory budget below 1."""
    elementwise = RecomputedTasks(forward, backward)
    read = {buffer for task in backward for buffer in task.reads}
    read_later = {buffer for task in elementwise.tasks for buffer in task.reads}
    kernels, unchanged = set[int](), set[int]()
    for index in dict.fromkeys(operator.graph for operator in forward.graph.operators):
        tasks = {
            place: task
            for place, task in enumerate(forward.tasks)
            if elementwise.graphs.get(task.operator) == index
        }
        written = [buffer for task in tasks.values() for buffer in task.writes]
        before = sum(buffer.bytes for buffer in written if buffer in read)
        before -= _unread_bytes(forward, read, index)
        after = sum(buffer.bytes for buffer in written if buffer in elementwise.saved)
        after -= _unread_bytes(forward, read_later, index)
        if before <= 0:
            unchanged.add(index)  # torch's partitioner ignores the budget of such graphs
        elif after >= budget * before:
            kernels |= _knapsack(forward, tasks, read, before, budget)
    return RecomputedTasks(forward, backward, kernels, unchanged)


def _knapsack(
    forward: Forward, tasks: Mapping[int, Task], read: Set[Buffer], before: int, budget: float
) -> set[int]:
    """Return the kernels of a graph, products and quantizers, that torch's knapsack does not save.

    Only products have floating-point operations. `read` are the buffers that the backward pass
    reads, and `before` is their size in bytes, both without a budget.
    """
    sizes: dict[int, int] = {}
    needed = set(read)
    for index, task in sorted(tasks.items(), reverse=True):
        if needed.isdisjoint(task.writes):
            continue  # the backward pass does not depend on it
        needed |= task.reads
        if task.library and forward.multiplies(forward.graph.operator(task.operator)):
            sizes[index] = sum(buffer.bytes for buffer in task.writes)
    indices = sorted(sizes, key=lambda index: (-sizes[index], index))
    shares = [sizes[index] / before for index in indices]
    work = [_forward_flops(forward, tasks[index]) for index in indices]
    _, _, repeated = dp_knapsack(shares, work, budget)
    return {indices[item] for item in repeated}


def _forward_flops(forward: Forward, task: Task) -> float:
    index = forward.graph.places[task.operator]
    operator = forward.graph.operators[index]
    products = {forward.graph.values[operator.result].name}
    if (matrices := forward.matrices.get(index)) is not None:
        # Without a fused kernel, attention is two products of equal size.
        products.add(matrices.scores.name)
    if products.isdisjoint(buffer.name for buffer in task.writes):
        return 1.0
    flops = integer_size(operator.costs[forward.states.names[index]].forward.flops)
    return float(max(flops // len(products), 1))


def _unread_bytes(forward: Forward, read: Set[Buffer], index: int) -> int:
    """Return the bytes of a graph's inputs and parameters that its backward pass does not read.

    The partitioner subtracts all inputs from the saved bytes, although some are not saved.
    """
    graph, names = forward.graph, {buffer.name for buffer in read if not buffer.bytes}
    used, unread = set[int](), set[int]()
    for place, operator in enumerate(graph.operators):
        if operator.graph != index:
            continue
        for argument, item in enumerate(operator.reads):
            root = forward.root(item.value)
            if not forward.exists_before_step(root):
                continue
            factor = forward.factors.get((place, argument), root)
            is_factor = forward.multiplies(operator) and factor is None
            is_normed = argument == 0 and "norm" in operator.row
            is_used = is_factor or is_normed or graph.values[root].name in names
            (used if is_used else unread).add(root)
    values = [graph.values[root] for root in unread - used]
    return sum(value_bytes(value, value.own) for value in values)


class RecomputedTasks:
    """Tasks of a backward pass that recomputes tensors before their first reader.

    It may recompute elementwise results, and the results of library `kernels`, by index of the task
    in the forward pass. Graphs with the indices `unchanged` save the same tensors as without
    recomputation.

    Attributes:
        graphs: index of the graph by operator id.
        saved: saved tensors, in program order.
        tasks: tasks of the backward pass, in program order.
    """

    def __init__(
        self,
        forward: Forward,
        backward: Sequence[Task],
        kernels: Set[int] = frozenset(),
        unchanged: Set[int] = frozenset(),
    ) -> None:
        self._forward, self._kernels, self._unchanged = forward, kernels, unchanged
        self.graphs = {operator.id: operator.graph for operator in forward.graph.operators}
        self._forward_tasks = forward.tasks
        self._makers: dict[Buffer, list[int]] = {}
        for index, task in enumerate(self._forward_tasks):
            for buffer in task.writes:
                self._makers.setdefault(buffer, []).append(index)
        self.saved = self._saved({buffer for task in backward for buffer in task.reads})
        self._repeated_products: set[str] = set()
        self.tasks: list[Task] = []
        self._repeated: dict[Buffer, Buffer] = {}
        for task in backward:
            self._recompute(task.reads)
            self.tasks.append(replace(task, reads=self._now(task.reads)))
        self._read_instead_of_sources()

    def operators(self) -> Iterator[str]:
        """Yield the ids of the recomputed operators."""
        graph, saved = self._forward.graph, {buffer.name for buffer in self.saved}
        names = {value.name: index for index, value in enumerate(graph.values)}
        pending = [names[buffer.name] for buffer in self._repeated if buffer.name in names]
        visited = set(pending)
        while pending:
            maker = self._forward.made_by(pending.pop())
            if maker is None:
                continue
            if self._forward.multiplies(maker) and maker.id not in self._repeated_products:
                continue
            yield maker.id
            for read in maker.reads:
                root = self._forward.root(read.value)
                if root not in visited and graph.values[root].name not in saved:
                    visited.add(root)
                    pending.append(root)

    def _saved(self, wanted: Set[Buffer]) -> dict[Buffer, None]:
        """Return the buffers to save so that all `wanted` ones are saved or can be recomputed."""
        fixed = self._fixed()
        result = {buffer: None for buffer in self._makers if buffer in wanted & fixed}
        sources: dict[Buffer, frozenset[Buffer]] = {}
        for buffer, indices in self._makers.items():
            needed = frozenset({buffer})
            if buffer not in fixed:
                tasks = [self._forward_tasks[index] for index in indices]
                reads = (read for task in tasks for read in task.reads if read != buffer)
                needed = frozenset[Buffer]().union(*(sources.get(read, ()) for read in reads))
                if buffer in wanted:
                    if sum(item.bytes for item in needed if item not in result) > buffer.bytes > 0:
                        needed = frozenset({buffer})
                    result |= dict.fromkeys(needed)
            sources[buffer] = needed
        return result

    def _fixed(self) -> set[Buffer]:
        """Return the buffers that are not recomputed: random numbers, results of other products,
        results of the model, and those that another graph reads.
        """
        result = set(self._forward.outputs)
        origin: dict[Buffer, int] = {}
        for place, task in enumerate(self._forward_tasks):
            index = self.graphs.get(task.operator)
            if index is not None:  # no operator: results of the model are materialized
                result.update(read for read in task.reads if origin.get(read, index) != index)
                origin |= dict.fromkeys(task.writes, index)
            fixed = task.library and place not in self._kernels
            if fixed or index in self._unchanged:
                result.update(task.writes)
        return result

    def _recompute(self, reads: Set[Buffer]) -> None:
        """Add tasks that recompute the buffers which are neither saved nor recomputed yet."""
        pending, tasks = list(reads), dict[int, Task]()
        while pending:
            buffer = pending.pop()
            if buffer in self.saved or buffer in self._repeated:
                continue
            for index in self._makers.get(buffer, ()):
                if index not in tasks:
                    tasks[index] = self._forward_tasks[index]
                    pending += tasks[index].reads
        for index, task in sorted(tasks.items()):
            writes = {buffer: replace(buffer) for buffer in task.writes}
            reads = self._now(task.reads)
            self._repeated |= writes
            self.tasks.append(
                replace(task, backward=True, reads=reads, writes=tuple(writes.values()))
            )
            if index in self._kernels:
                self._repeated_products.add(task.operator)

    def _read_instead_of_sources(self) -> None:
        """Let gradients read recomputed elementwise results, which exist, and not their sources.

        The gradient of an elementwise result is computed before the gradients of its sources.
        """
        last: dict[Buffer, int] = {}
        for index, task in enumerate(self.tasks):
            last |= dict.fromkeys(task.reads, index)
        recomputed = set(self._repeated.values())
        for task in tuple(self.tasks):
            sources = [buffer for buffer in task.reads if buffer.bytes]
            for buffer in task.writes:
                if buffer in recomputed and not task.library and sources:
                    index = min(last[source] for source in sources)
                    reader = self.tasks[index]
                    if index > last.get(buffer, index):
                        self.tasks[index] = replace(reader, reads=reader.reads | {buffer})

    def _now(self, buffers: Set[Buffer]) -> frozenset[Buffer]:
        return frozenset(self._repeated.get(buffer, buffer) for buffer in buffers)
