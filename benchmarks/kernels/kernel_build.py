"""Time to compile the CUDA kernels of a BERT layer, and to load them from the kernel cache.
The layer trains in INT8, with INT8 gradients. No GPU is needed. The first compilation runs once,
into an empty cache, with as many parallel compilers as cores and memory allow. "from the cache" is
the median time to validate and load all libraries, each time in a new process. "target" and "met"
give the required value and whether it is reached.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import compiler, library
from qsync_fx.backend.cuda.kernel_config import Arch
from qsync_fx.backend.cuda.runtime.device_state import assumed
from qsync_fx.backend.cuda.selection import select
from qsync_fx.backend.operators.layer_kernels import problems_of
from qsync_fx.diagnostics import explain
from qsync_fx.errors import QSyncError

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.measuring import Target
from benchmarks.support.harness import Row, arguments, by_size, finish

ARCHITECTURES: tuple[Arch, ...] = ("sm_80", "sm_90a")
TOKENS = (128, 128)
COMPILE = Target("first compile below 3 minutes on two cores", most=180)
LOAD = Target("from the cache below 50 ms", most=50)


def units_of_layer(arch: Arch) -> list[TranslationUnit]:
    """Return the untuned kernels for training a BERT-base layer in INT8, gradients included."""
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    layer = BertLayer(BertConfig(attn_implementation="sdpa"))
    with assumed(arch, on="cpu"):
        explained = explain(layer, torch.randn(*TOKENS, 768), options={"precision": "int8_grad"})
        return select.of_problems(problems_of(explained.lowered_graphs), arch, False)


def loaded(units: list[TranslationUnit], folder: Path) -> float:
    """Return the seconds to load cached libraries until they are callable."""
    since = time.perf_counter()
    for unit, path in compiler.attempt(units, progress=False, folder=folder).libraries.items():
        library.load(path, unit)
    return time.perf_counter() - since


def rows_of(arch: Arch, units: list[TranslationUnit], repeats: int) -> list[Row]:
    case = {
        "case": "a layer of BERT-base, 16,384 tokens, int8_grad",
        "arch": arch,
        "kernels": len(units),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        since = time.perf_counter()
        try:
            compiler.attempt(units, folder=folder)
        except QSyncError as error:
            return [case | {"error": str(error)}]
        compiled = time.perf_counter() - since
        seconds = []
        for _ in range(repeats):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                seconds.append(pool.submit(loaded, units, folder).result())
    milliseconds = 1000 * statistics.median(seconds)
    return [
        case | {"what": "first compile, s", "value": compiled} | COMPILE.columns(compiled),
        case | {"what": "from the cache, ms", "value": milliseconds} | LOAD.columns(milliseconds),
    ]


def main() -> None:
    options = arguments(__doc__)
    rows: list[Row] = []
    for arch in by_size(options.quick, ARCHITECTURES[:1], ARCHITECTURES):
        units = units_of_layer(arch)
        rows += rows_of(
            arch, by_size(options.quick, units[:1], units), by_size(options.quick, 1, 7)
        )
    finish(options, rows)


if __name__ == "__main__":
    main()
