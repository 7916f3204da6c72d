"""Run a sample of the kernels on small inputs under NVIDIA's compute-sanitizer, to detect invalid
memory accesses and races.

    python tests/gpu/sanitize.py --sample 24 --json runs/gpu/sanitize.json
        runs itself under memcheck and racecheck
    python tests/gpu/sanitize.py --run --sample 24
        runs the kernels alone

The status is 1 if a tool found an error, 2 without a tool or a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.cuda.kernel_config import KernelConfig
from qsync_fx.backend.operators.convert import convert
from qsync_fx.backend.operators.quantize import quantize, quantize_transposed
from qsync_fx.serialization.atomic_files import write_text
from tests.gpu import geometries, kit, test_conv, test_gemm

FOUND = 9
"""Exit status of the tools if they found an error."""


def sample(count: int) -> list[KernelConfig]:
    """Return compiled configurations, spread evenly over all of them."""
    compiled = [
        config
        for config in kit.configs("gemm", "fprop", "dgrad", "wgrad")
        if kit.compiled(codegen.unit_of(config))
    ]
    return [compiled[index * len(compiled) // count] for index in range(min(count, len(compiled)))]


def run(count: int) -> int:
    """Run kernels with odd sizes, every quantizer, and copies; return the number of kernels."""
    chosen = sample(count)
    for config in chosen:
        library = kit.library(codegen.unit_of(config))
        if config.operation == "gemm":
            for m, n, k in kit.gemm_sizes(config)[:2]:
                a, b = test_gemm.operands(config, m, n, k, draw=kit.whole_numbers)
                kit.gemm(library, config, a, b, *test_gemm.epilogue(config, m, n))
        else:
            for problem in geometries.problems(config)[:2]:
                a, b = test_conv.operands(problem, kit.whole_numbers)
                test_conv.run(config, problem, a, b, test_conv.epilogue(problem))
        torch.cuda.synchronize()
    seed = torch.zeros(1, dtype=torch.int64, device=kit.DEVICE)
    for dtype in (torch.float32, torch.bfloat16):
        for fmt in codegen.QUANTIZER_FORMATS:
            for shape in ((1, 1), (33, 70), (129, 264)):
                x = torch.ones(shape, device=kit.DEVICE).to(dtype)
                for keep in ((), (0,), (1,)):
                    quantize(x, seed, 0, fmt, "stochastic", keep)
                quantize_transposed(x, seed, 0, fmt, "stochastic")
    for dtype in (torch.int8, torch.bfloat16, torch.float32):
        for shape in ((1, 1), (33, 70), (129, 264), (131, 259)):
            x = torch.ones(shape, device=kit.DEVICE).to(dtype)
            for operand in (x, x[:, 1:], x.t()[1:]):
                for transposed in (False, True):
                    # The first result has edge tiles in both dimensions, the second is padded.
                    convert(operand, transposed=transposed)
                    convert(operand, torch.float16, None, transposed, (272, 272))
    torch.cuda.synchronize()
    return len(chosen)


def command(tool: str, sanitizer: str, count: int) -> list[str]:
    """Return the command that runs this file under a tool, with options that it supports."""
    text = subprocess.run([sanitizer, "--help"], capture_output=True, text=True, check=False).stdout
    options = ["--tool", tool, "--error-exitcode", str(FOUND)]
    if "--kernel-name" in text:
        # torch's own kernels take most of the time and are not checked.
        for name in ("cutlass", "qsync"):
            options += ["--kernel-name", f"kns={name}"]
    return [
        sanitizer,
        *options,
        sys.executable,
        str(Path(__file__)),
        "--run",
        "--sample",
        str(count),
    ]


def check(tool: str, sanitizer: str, count: int, seconds: float) -> dict[str, Any]:
    """Run this file under a tool and return the report."""
    # Each tensor is a separate allocation, so that the tools detect accesses beyond it.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "QSYNC_GPU_COMPILE": "0"}
    since = time.monotonic()
    line = command(tool, sanitizer, count)
    try:
        done = subprocess.run(
            line, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
        status, text = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        status, text = -1, str(error)
    lines = text.splitlines()
    return {
        "tool": tool,
        "command": line,
        "status": status,
        "ok": status == 0,
        "seconds": round(time.monotonic() - since, 1),
        "summary": [each for each in lines if "SUMMARY" in each],
        "tail": [] if status == 0 else lines[-60:],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--run", action="store_true", help="run the kernels, under no tool")
    parser.add_argument(
        "--sample", type=int, default=24, metavar="N", help="how many kernels (%(default)s)"
    )
    parser.add_argument(
        "--tool", action="append", choices=("memcheck", "racecheck", "initcheck", "synccheck")
    )
    parser.add_argument("--seconds", type=float, default=200.0, help="for each tool (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    if reason := kit.missing():
        print(f"sanitize: {reason}", file=sys.stderr)
        return 2
    if options.run:
        print(f"sanitize: {run(options.sample)} kernels ran")
        return 0
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "/usr/local/cuda/bin/compute-sanitizer"
    )
    if sanitizer is None:
        print(
            "sanitize: compute-sanitizer is not installed: nothing was looked at", file=sys.stderr
        )
        return 2
    results = []
    for tool in options.tool or ("memcheck", "racecheck"):
        results.append(check(tool, sanitizer, options.sample, options.seconds))
        print(
            f"{tool}: {'ok' if results[-1]['ok'] else 'FAILED'} {' '.join(results[-1]['summary'])}",
            flush=True,
        )
        print("\n".join(results[-1]["tail"]), file=sys.stderr)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            write_text(options.json, json.dumps(results, indent=1) + "\n")
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
