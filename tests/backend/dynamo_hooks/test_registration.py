"""Registration of the backend with torch, also by concurrent threads."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from torch._dynamo.backends import registry

from qsync_fx.backend.entry import qsync

PROGRAM = """
    import threading

    import torch
    from torch import nn
    {imported}

    THREADS = 4
    barrier, failures = threading.Barrier(THREADS), []

    def work():
        model, x = nn.Linear(4, 4), torch.randn(2, 4)
        barrier.wait()
        try:
            compiled = torch.compile(model, backend="qsync", options={{"inner_backend": "eager", "precision": "fp32"}})
            torch.testing.assert_close(compiled(x), model(x))
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(failures)
"""


@pytest.mark.parametrize("imported", ["", "import qsync_fx"])
def test_threads_may_name_the_backend_at_once(imported: str) -> None:
    program = textwrap.dedent(PROGRAM).format(imported=imported)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


def test_registration_is_idempotent() -> None:
    assert registry.register_backend(qsync, name="qsync") is qsync
    assert registry.lookup_backend("qsync") is qsync
    assert "qsync" in registry.list_backends()


def test_another_function_under_the_name_is_refused() -> None:
    with pytest.raises(AssertionError, match="duplicate name: qsync"):
        registry.register_backend(lambda module, inputs: module, name="qsync")
    assert registry.lookup_backend("qsync") is qsync


def test_other_backends_register_as_torch_documents() -> None:
    @registry.register_backend(name="of_a_test", tags=("debug",))
    def first(module: Any, inputs: Any) -> Any:
        return module

    @registry.register_backend
    def another_of_a_test(module: Any, inputs: Any) -> Any:
        return module

    try:
        assert registry.lookup_backend("of_a_test") is first
        assert registry.lookup_backend("another_of_a_test") is another_of_a_test
        assert "of_a_test" not in registry.list_backends()
    finally:
        for name in ("of_a_test", "another_of_a_test"):
            del registry._BACKENDS[name], registry._COMPILER_FNS[name]


def test_torch_registers_backends_as_this_package_expects() -> None:
    assert list(inspect.signature(registry.register_backend).parameters) == [
        "compiler_fn",
        "name",
        "tags",
    ]
    assert not inspect.unwrap(registry.register_backend).__code__.co_freevars
