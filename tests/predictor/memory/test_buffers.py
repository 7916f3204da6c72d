"""Lifetimes of buffers, from the tasks that write and read them."""

from __future__ import annotations

from qsync_fx.predictor.memory.buffers import Buffer, Category, Task, lives


def buffer(size: int, stays: bool = False) -> Buffer:
    return Buffer("", None, size, Category.GRADIENTS if stays else Category.TEMPORARY, stays)


def task(*writes: Buffer, reads: tuple[Buffer, ...] = (), library: bool = False) -> Task:
    return Task("", True, library, frozenset(reads), writes)


def held(tasks: list[Task]) -> list[int]:
    return [live.bytes for live in lives(tasks, lambda buffer: buffer, None)]


def test_buffer_is_live_until_its_last_reader() -> None:
    a, b, c = buffer(1), buffer(10), buffer(100)
    tasks = [
        task(a, library=True),
        task(b, reads=(a,), library=True),
        task(c, reads=(a,), library=True),
        task(reads=(c,), library=True),
    ]
    assert held(tasks) == [1, 11, 101, 100]


def test_outputs_are_live_to_the_end() -> None:
    assert held([task(buffer(5, stays=True), library=True), task(buffer(1), library=True)]) == [
        5,
        6,
    ]


def test_kernel_allocates_outputs_before_releasing_inputs() -> None:
    narrow = [buffer(2), buffer(2)]
    wide = [buffer(4, stays=True), buffer(4, stays=True)]
    tasks = [
        task(*narrow, library=True),
        task(wide[0], reads=(narrow[0],)),
        task(wide[1], reads=(narrow[1],)),
    ]
    assert held(tasks) == [4, 12]


def test_only_elementwise_tasks_reuse_their_last_input() -> None:
    a, b = buffer(7), buffer(7)
    assert held([task(a, library=True), task(b, reads=(a,))]) == [7, 7]
    a, b = buffer(7), buffer(7)
    assert held([task(a, library=True), task(b, reads=(a,), library=True)]) == [7, 14]


def test_workspace_is_live_during_its_task() -> None:
    assert held([Task("", True, True, workspace=9), task(buffer(1), library=True)]) == [9, 1]


def test_kernel_results_are_live_until_all_are_extracted() -> None:
    a, b, c = buffer(1), buffer(10), buffer(100)
    first, second = (Task("", True, True, writes=(result,), holds=(a, b)) for result in (a, b))
    tasks = [
        task(a, b, library=True),
        first,
        task(c, reads=(a,), library=True),
        second,
        task(reads=(c,), library=True),
    ]
    assert held(tasks) == [11, 11, 111, 111, 100]
