"""Emulated GPU for compilation: answers the queries of torch and Triton.

Inductor generates code for tensors without storage (`FakeTensorMode`) on a CUDA device with the
properties below, and Triton compiles it to machine code. Nothing runs: a step ends at the first
call of compiled code. torch's CPU build is sufficient: `gpu_code.preload` loads the missing
parts from no_guard.cpp before torch is imported.

Invariant: within `standing_in`, torch detects this GPU only; afterwards all state is restored.
"""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import unittest.mock as mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from qsync_fx import torch_internals
from qsync_fx.backend import compile as compiling
from qsync_fx.backend.cuda.kernel_config import SHARED_MEMORY, target
from tests.support.cuda.absent import called


@dataclass(frozen=True)
class Gpu:
    """Properties of the GPU, from NVIDIA's data sheets."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    threads: int = 2048
    memory: int = 40 << 30
    cache: int = 40 << 20

    @property
    def number(self) -> int:
        return 10 * self.capability[0] + self.capability[1]


GPUS = {
    "t4": Gpu("Tesla T4", (7, 5), 40, 1024, 16 << 30, 4 << 20),
    "a100": Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 2048, 80 << 30, 50 << 20),
}


SETTINGS = {
    "compile_threads": 1,
    "force_disable_caches": True,
    # These would run operations or measure times on the GPU during code generation.
    "joint_graph_constant_folding": False,
    "shape_padding": False,
    "use_static_cuda_launcher": False,
}


@dataclass
class Kernel:
    """Kernel compiled by Triton, and its resources."""

    name: str
    source: str
    registers: int = 0
    spills: int = 0
    shared: int = 0
    why_not: str = ""


@dataclass
class Generated:
    """Output of Inductor: kernels, the code that calls them, and the products from `called`."""

    kernels: list[Kernel] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    products: list[str] = field(default_factory=list)


class EndedError(Exception):
    """Raised at the first call of compiled code."""


def _always(answer: Any) -> Callable[..., Any]:
    def answering(*args: Any, **kwargs: Any) -> Any:
        return answer

    return answering


@contextlib.contextmanager
def standing_in(gpu: Gpu) -> Iterator[Generated]:
    """Yield the code that is generated for a GPU while the body compiles."""
    from torch._inductor import async_compile, codecache, config, graph, output_code
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.runtime import hints, triton_helpers
    from triton.runtime import driver

    generated = Generated()
    arch = target(gpu.capability)
    assert arch is not None
    properties = SimpleNamespace(
        name=gpu.name, major=gpu.capability[0], minor=gpu.capability[1],
        multi_processor_count=gpu.multiprocessors,
        max_threads_per_multi_processor=gpu.threads, max_threads_per_block=1024,
        regs_per_multiprocessor=65536, warp_size=32,
        total_memory=gpu.memory, L2_cache_size=gpu.cache, shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=SHARED_MEMORY[arch],
        shared_memory_per_multiprocessor=SHARED_MEMORY[arch],
        clock_rate=1_590_000, memory_clock_rate=5_000_000, memory_bus_width=256,
        is_integrated=False, gcnArchName="", uuid="",
    )  # fmt: skip
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0,
        "get_device_properties": properties,
        "_get_device_properties": properties, "get_device_capability": gpu.capability,
        "get_device_name": gpu.name,
        "is_bf16_supported": gpu.capability >= (8, 0), "is_initialized": True,
        "is_current_stream_capturing": False,
        "_lazy_init": None, "set_device": None, "synchronize": None, "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
    }  # fmt: skip

    def compiled(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> Any:
        generated.kernels.append(_compiled(kernel_name, source_code, gpu))
        return lambda *args, **kwargs: None

    update = graph.GraphLowering._update_scheduler

    def scheduled(self: Any) -> None:
        update(self)
        # Layouts are final now.
        generated.products += called.products(self.operations)

    def ended(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise EndedError

    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, _always(answer), create=True))
        for module in (torch._C, torch_internals):
            for name in ("_cuda_getCurrentRawStream", "_cuda_getDevice"):
                stack.enter_context(mock.patch.object(module, name, _always(0), create=True))
        stack.enter_context(mock.patch.object(async_compile.AsyncCompile, "triton", compiled))
        stack.enter_context(mock.patch.object(graph.GraphLowering, "_update_scheduler", scheduled))
        stack.enter_context(mock.patch.object(output_code.CompiledFxGraph, "__call__", ended))
        for passes in (joint_graph, post_grad):
            # Patterns are traced with real tensors, on the CPU.
            initialize = passes.lazy_init
            patterns = functools.partial(initialize, torch.device("cpu"))
            stack.enter_context(
                mock.patch.object(
                    passes, "lazy_init", lambda *device, patterns=patterns: patterns()
                )
            )
        stack.enter_context(config.patch(SETTINGS))
        stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
        hints.DeviceProperties.create.cache_clear()
        stack.enter_context(mock.patch.object(driver, "_active", _Driver(gpu)))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu", _always(None)))
        stack.enter_context(
            mock.patch.object(compiling, "_fake", functools.partial(_of_the_mode, compiling._fake))
        )
        codecache_load = codecache.PyCodeCache.load_by_key_path

        def remembered(key: str, path: str, *args: Any, **kwargs: Any) -> Any:
            text = Path(path).read_text()
            if "def call(" in text:
                generated.code.append(text)
            return codecache_load(key, path, *args, **kwargs)

        stack.enter_context(
            mock.patch.object(codecache.PyCodeCache, "load_by_key_path", remembered)
        )
        try:
            yield generated
        finally:
            hints.DeviceProperties.create.cache_clear()


def _of_the_mode(fake: Any, inputs: Any, mode: Any) -> list[Any]:
    """Return fake inputs in the mode in which Dynamo passes a graph on."""

    def renewed(value: Any) -> Any:
        if mode is None or not isinstance(value, FakeTensor) or value.fake_mode is mode:
            return value
        with mode:
            tensor = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
        return tensor.requires_grad_(value.requires_grad)

    return [renewed(value) for value in fake(inputs, mode)]


class _Driver:
    """Triton driver with the answers that compilation needs."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._gpu.number, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


def _compiled(name: str, source: str, gpu: Gpu) -> Kernel:
    """Compile a kernel of Inductor as before its first run, and return its resources."""
    from torch._inductor.codecache import PyCodeCache

    kernel = Kernel(name, source)
    try:
        tuner = getattr(PyCodeCache.load(source), name)
        tuner.precompile(warm_cache_only=True)
        for result in tuner.compile_results[:1]:
            kernel.shared = result.kernel.metadata.shared
            kernel.registers, kernel.spills = _resources(result.kernel.asm["ptx"], gpu)
    except Exception as error:  # noqa: BLE001  any compiler error is recorded
        kernel.why_not = f"{type(error).__name__}: {error}"[:2000]
    return kernel


def _resources(ptx: str, gpu: Gpu) -> tuple[int, int]:
    """Return registers and spilled bytes, reported by Triton's ptxas."""
    import tempfile

    import triton

    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    named = re.search(r"\.target (sm_\w+)", ptx)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [
            str(ptxas),
            "-v",
            f"--gpu-name={named[1] if named else f'sm_{gpu.number}'}",
            str(path),
            "-o",
            str(Path(folder) / "out"),
        ]
        output = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    registers, spills = (
        re.findall(r"Used (\d+) registers", output),
        re.findall(r"(\d+) bytes spill", output),
    )
    return max(map(int, registers), default=0), max(map(int, spills), default=0)
