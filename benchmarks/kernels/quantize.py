"""Stochastic INT8 quantization on the CPU, compared with a copy, Inductor and eager PyTorch.
Each case computes its own scales (per tensor or per row): absmax, division, random numbers,
rounding and clamping. Runs are interleaved; "milliseconds" is the median, "to_copy" and
"to_inductor" are median ratios. "to_copy" compares with the memory bound. For tensors that fit into
the cache, hashing of random numbers dominates: with AVX-512 it is 8 of about 18 instructions per 16
values.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from qsync_fx import _C

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.harness import Row, arguments, by_size, finish, measure

SHAPES = [(1536, 768), (1536, 3072), (4096, 4096)]
DTYPES: dict[Literal["float32", "bfloat16"], torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


def by_torch(x: torch.Tensor, per_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.float()
    most = x.abs().amax(1, keepdim=True) if per_row else x.abs().amax()
    scale = (most / 127).clamp_min(2.0**-126)
    return torch.floor(x / scale + torch.rand_like(x)).clamp(-127, 127).to(torch.int8), scale


def cases(x: torch.Tensor, per_row: bool) -> dict[str, Callable[[], object]]:
    q, scales, copy = (
        torch.empty_like(x, dtype=torch.int8),
        torch.empty(x.shape[0]),
        torch.empty_like(x),
    )
    dtype = next(name for name, dtype in DTYPES.items() if dtype == x.dtype)
    rows = x.shape[0] if per_row else 1
    to, of = (
        tensor.view(torch.int16 if x.dtype == torch.bfloat16 else x.dtype).numpy()
        for tensor in (copy, x)
    )

    def native(rounding: _C.Rounding, isa: str | None = None) -> Callable[[], object]:
        def call() -> None:  # the closure owns the tensors behind the addresses
            where = (x.data_ptr(), q.data_ptr(), scales.data_ptr(), rows, x.numel() // rows)
            _C.quantize(
                *where, dtype, rounding, seed=1, stream=2, threads=torch.get_num_threads(), isa=isa
            )

        return call

    compiled = torch.compile(by_torch, dynamic=False)
    return {
        "copy (one thread)": functools.partial(np.copyto, to, of),
        "copy": functools.partial(copy.copy_, x),
        "native stochastic": native("stochastic"),
        "native nearest": native("nearest"),
        **{
            f"native stochastic, {isa}": native("stochastic", isa)
            for isa in _C.available_isas()
            if isa != _C.isa()
        },
        "Inductor stochastic": functools.partial(compiled, x, per_row),
        "eager stochastic": functools.partial(by_torch, x, per_row),
    }


def main() -> None:
    options = arguments(__doc__)
    rows: list[Row] = []
    for shape in by_size(options.quick, SHAPES[:1], SHAPES):
        for dtype_name, dtype in DTYPES.items():
            for per_row in (False, True):
                torch.compiler.reset()
                times = measure(
                    cases(torch.randn(shape).to(dtype), per_row),
                    repeats=by_size(options.quick, 3, 31),
                )
                rows += [
                    {
                        "case": f"{shape[0]}x{shape[1]} {dtype_name} per "
                        f"{'row' if per_row else 'tensor'}",
                        "name": name,
                        "milliseconds": times.median(name) * 1e3,
                        "to_copy": times.ratio(name, "copy"),
                        "to_inductor": times.ratio(name, "Inductor stochastic"),
                    }
                    for name in times
                ]
    finish(options, rows)


if __name__ == "__main__":
    main()
