"""Order and fusion of tasks, compared with Inductor's sort of its own graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._inductor.memory
from torch import Tensor, nn

from qsync_fx.predictor.memory.buffers import Buffer, Category, Task
from qsync_fx.predictor.memory.kernel_order import fused, ordered
from tests.support.tiers import ALL, EVERY


def buffer(size: int, stays: bool = False) -> Buffer:
    return Buffer("", None, size, Category.GRADIENTS if stays else Category.TEMPORARY, stays)


def task(*writes: Buffer, reads: tuple[Buffer, ...] = ()) -> Task:
    return Task("", True, True, frozenset(reads), writes)


def test_kernels_that_release_memory_run_first() -> None:
    saved, narrow, wide = buffer(100), buffer(10), buffer(20, stays=True)
    product, widening, after = task(narrow), task(wide, reads=(narrow,)), task(reads=(saved,))
    assert ordered([product, widening, after], frozenset()) == [after, product, widening]


def test_order_without_a_gain_is_preserved() -> None:
    narrow, wide = buffer(10), buffer(20, stays=True)
    assert ordered([task(narrow), last := task(wide, reads=(narrow,))], frozenset())[-1] is last


def test_second_write_waits_for_the_first() -> None:
    both = buffer(10), buffer(20, stays=True)
    first, second, third = task(*both), task(both[0]), task(both[1])
    assert ordered([first, second, third], frozenset())[0] is first


def elementwise(*writes: Buffer, reads: tuple[Buffer, ...] = (), sums: bool = False) -> Task:
    return Task("", True, False, frozenset(reads), writes, sums=sums)


def test_readers_of_one_tensor_are_fused_unless_dependent() -> None:
    source, a, b, c = (buffer(10) for _ in range(4))
    first, product, second = (
        elementwise(a, reads=(source,)),
        task(b, reads=(a,)),
        elementwise(c, reads=(source,)),
    )
    assert fused([first, product, second]) == [[first, second], [product]]
    waiting = elementwise(c, reads=(source, b))
    assert fused([first, product, waiting]) == [[first], [product], [waiting]]


def test_inputs_of_a_kernel_run_before_it() -> None:
    source, a, zeros = (buffer(10) for _ in range(3))
    first, empty, added = (
        elementwise(a, reads=(source,)),
        elementwise(zeros),
        elementwise(zeros, reads=(a,)),
    )
    assert fused([first, empty, added]) == [[empty], [first, added]]


def test_batch_sums_are_separate_kernels_with_their_epilogue() -> None:
    source, a, total, wide = buffer(10), buffer(10), buffer(1), buffer(2)
    first, summed = elementwise(a, reads=(source,)), elementwise(total, reads=(source,), sums=True)
    after = elementwise(wide, reads=(total,))
    assert fused([first, summed, after]) == [[first], [summed, after]]


@contextmanager
def sorted_graphs() -> Iterator[list[tuple[list[Task], frozenset[Buffer], list[int]]]]:
    """Record each graph that Inductor sorts: its nodes as tasks, its outputs, and the new order."""
    graphs: list[tuple[list[Task], frozenset[Buffer], list[int]]] = []
    original = torch._inductor.memory.reorder_for_peak_memory

    def reorder(nodes: Any, *arguments: Any) -> Any:
        chosen = original(nodes, *arguments)
        outputs, places = arguments[-1], {node: index for index, node in enumerate(nodes)}
        buffers: dict[str, Buffer] = {}

        def of(scheduler_buffer: Any) -> Buffer:
            return buffers.setdefault(
                scheduler_buffer.get_name(), buffer(scheduler_buffer.mpi_buffer.size_free)
            )

        tasks = []
        for node in nodes:
            # A kernel with several results writes no buffer itself; later nodes extract the
            # results.
            several = [
                out
                for user in node.mpi_node.succ_nodes
                for out in user.get_outputs()
                if not user.mpi_node.size
            ]
            written = [
                of(out)
                for out in node.get_outputs()
                if out.mpi_buffer.size_free or not node.mpi_node.size
            ]
            late = [of(out) for out in several] if node.mpi_node.size and not written else []
            reads = tuple(
                of(predecessor)
                for predecessor in node.mpi_node.pred_buffers
                if predecessor.mpi_buffer.size_free
            )
            tasks.append(task(*written, *late, reads=reads))
        returned = frozenset(
            graph_buffer for name, graph_buffer in buffers.items() if name in outputs
        )
        graphs.append((tasks, returned, [places[node] for node in chosen]))
        return chosen

    torch._inductor.memory.reorder_for_peak_memory = reorder
    try:
        with torch._inductor.config.patch(fx_graph_cache=False):
            yield graphs
    finally:
        torch._inductor.memory.reorder_for_peak_memory = original


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 128), nn.LayerNorm(128), nn.Linear(128, 32)
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 8, 3),
        nn.Flatten(),
        nn.Linear(8 * 16, 4),
    )


ROWS, IMAGES = torch.randn(96, 64), torch.randn(4, 3, 8, 8)


@pytest.mark.parametrize(
    ("make", "x", "fmt"),
    [
        pytest.param(layer, ROWS, "bf16", marks=ALL),
        pytest.param(perceptron, ROWS, "bf16", marks=ALL),
        pytest.param(perceptron, ROWS, "fp32", marks=EVERY),
        pytest.param(convolutions, IMAGES, "fp32", marks=ALL),
        pytest.param(convolutions, IMAGES, "bf16", marks=EVERY),
    ],
)
def test_order_equals_inductor(make: Callable[[], nn.Module], x: Tensor, fmt: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with sorted_graphs() as graphs:
        model = torch.compile(make(), backend="qsync", options={"precision": fmt})  # type: ignore[call-overload]
        model(x).sum().backward()
    assert len(graphs) == 2
    for tasks, returned, chosen in graphs:
        assert ordered(tasks, returned) == [tasks[index] for index in chosen]
