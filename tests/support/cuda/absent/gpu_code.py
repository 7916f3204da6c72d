"""Compile one model through torch.compile to machine code for an emulated GPU; print JSON.

    python gpu_code.py t4 mlp int8 kernels

With `plain` instead of `kernels`, qsync kernels are unavailable. This is a separate process,
because torch's CPU build must detect a CUDA device before it is imported.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MODELS = ("mlp", "resnet", "bert", "gpt2")


def guard(folder: Path) -> Path:
    """Compile the missing parts of torch's CPU build once, and return the library."""
    library = folder / "no_guard.so"
    if not library.exists():
        torch = _torch()
        flags = [
            "-std=c++20",
            "-O0",
            "-shared",
            "-fPIC",
            f"-I{torch / 'include'}",
            f"-L{torch / 'lib'}",
            "-lc10",
            "-ltorch_cpu",
        ]
        subprocess.run(["g++", str(HERE / "no_guard.cpp"), *flags, "-o", str(library)], check=True)
    return library


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def preload(library: Path) -> None:
    """Load a library after torch's own libraries, before torch is imported."""
    assert "torch" not in sys.modules
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))


def on_gpu(model: Any, inputs: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Move a model and inputs without storage to the GPU, in fake tensor mode."""
    import torch

    moved: dict[int, Any] = {}
    for module in model.modules():
        for group in (module._parameters, module._buffers):
            for name, t in group.items():
                if t is not None and id(t) not in moved:
                    tensor = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
                    moved[id(t)] = (
                        torch.nn.Parameter(tensor) if isinstance(t, torch.nn.Parameter) else tensor
                    )
                if t is not None:
                    group[name] = moved[id(t)]
    return model, tuple(
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in inputs
    )


def built(name: str) -> tuple[Any, tuple[Any, ...]]:
    """Return a model and its inputs on the default device.

    They need no memory on the meta device. Inputs are so large that all kinds of products use qsync
    kernels untuned.
    """
    import torch
    from torch import nn

    if name == "mlp":
        return nn.Sequential(
            nn.Linear(512, 1024), nn.ReLU(), nn.LayerNorm(1024), nn.Linear(1024, 256)
        ), (torch.empty(16384, 512),)
    import transformers

    tokens = torch.zeros(256, 128, dtype=torch.int64)
    if name == "resnet":
        small = transformers.ResNetConfig(
            embedding_size=64, hidden_sizes=[64, 512], depths=[2, 2], layer_type="basic"
        )
        return transformers.ResNetForImageClassification(small), (torch.empty(64, 3, 64, 64),)
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
        "vocab_size": 512,
    }
    if name == "bert":
        return transformers.BertModel(
            transformers.BertConfig(**sizes, attn_implementation="sdpa")
        ), (tokens,)
    gpt2 = transformers.GPT2Config(
        n_embd=512, n_layer=2, n_head=8, vocab_size=512, use_cache=False, attn_implementation="sdpa"
    )
    return transformers.GPT2Model(gpt2), (tokens,)


def generated(gpu: str, model: str, precision: str, kernels: bool) -> dict[str, Any]:
    """Compile, and return kernels with their resources, and the products in the code and in the
    plan.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from qsync_fx.backend import compile as compiling
    from qsync_fx.backend.cuda.kernel_build import kernel_registry as libraries
    from qsync_fx.backend.cuda.kernel_config import target
    from qsync_fx.backend.cuda.runtime.device_state import assumed
    from tests.support.cuda.absent import absent_gpu, called

    libraries.prepare = lambda units: []  # type: ignore[assignment]  # nvcc is tested elsewhere
    planned: list[str] = []
    rewrite = compiling.rewrite

    def watched(*arguments: Any, **named: Any) -> Any:
        graph = rewrite(*arguments, **named)
        notes = [operator.note for operator in graph.operators()]
        products = [
            product for n in notes if n.computed is not None for product in n.computed.products
        ]
        planned.extend(
            called.told(product.problem)
            for product in products
            if product.decision.config is not None
        )
        lost.extend(f"{n.id}: {n.reason}" for n in notes if "cannot be re-traced" in n.reason)
        return graph

    lost: list[str] = []
    compiling.rewrite = watched
    properties = absent_gpu.GPUS[gpu]
    with (
        absent_gpu.standing_in(properties) as output,
        assumed(target(properties.capability) if kernels else None),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            network, inputs = built(model)
        with FakeTensorMode(allow_non_fake_inputs=True):
            network, inputs = on_gpu(network, inputs)
        ended = False
        try:
            torch.compile(
                network.train(),
                backend="qsync",
                options={"precision": precision, "skip_unprofitable": False},
            )(*inputs)
        except absent_gpu.EndedError:
            ended = True
    code = "\n".join(output.code)
    return {
        "ended": ended,
        "lost": lost,
        "planned": sorted(planned),
        "products": sorted(output.products),
        "calls": code.count("torch.ops.qsync.gemm.default(")
        + code.count("torch.ops.qsync.conv2d_product.default("),
        "quantizers": code.count("torch.ops.qsync.quantize.default(")
        + code.count("torch.ops.qsync.quantize_transposed.default("),
        "bf16": sorted(
            {k.name for k in output.kernels if "bf16" in k.source or "bfloat16" in k.source}
            | ({"code"} if "bfloat16" in code else set())
        ),
        "kernels": [
            {
                "name": k.name,
                "registers": k.registers,
                "spills": k.spills,
                "shared": k.shared,
                "why_not": k.why_not,
            }
            for k in output.kernels
        ],
    }


def _main() -> None:
    gpu, model, precision, mode, library = sys.argv[1:]
    preload(Path(library))
    sys.path.insert(0, str(HERE))
    print(json.dumps(generated(gpu, model, precision, mode == "kernels")))


if __name__ == "__main__":
    _main()
