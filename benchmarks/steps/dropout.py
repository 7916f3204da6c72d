"""Dropout on the CPU: time to draw masks, and its share of a BERT training step.
Rows "draws": `qsync::keep` (one byte per value) compared with torch's `rand`, `bernoulli_` and a
copy of as many FP32 values. Step rows: forward, backward and fused SGD of two layers of BERT-base
in BF16, with and without the option "fast_dropout", without dropout, and under eager autocast. Runs
are interleaved; "ratio" is the median ratio to the case in column "to".
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import qsync_fx
from qsync_fx.backend.inductor.recompute_policy import keep

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.harness import Row, Times, arguments, by_size, finish, measure

SIZE = (1536, 768)


def draws(size: tuple[int, int]) -> dict[str, Callable[[], object]]:
    source, target, mask = torch.randn(size), torch.empty(size), torch.empty(size, dtype=torch.bool)
    return {
        "copy": functools.partial(target.copy_, source),
        "qsync::keep": functools.partial(keep, size, torch.tensor([1]), 2, 0.1),
        "torch.rand": functools.partial(torch.rand, size),
        "bernoulli_": functools.partial(mask.bernoulli_, 0.9),
    }


def step(
    layers: int,
    ids: Tensor,
    target: Tensor,
    p: float,
    attention: str,
    compiler: dict[str, Any] | None,
) -> Callable[[], None]:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config: Any = BertConfig(
        num_hidden_layers=layers,
        hidden_dropout_prob=p,
        attention_probs_dropout_prob=p,
        attn_implementation=attention,
    )
    model = BertModel(config).train()
    optimizer = qsync_fx.optim.SGD(model.parameters(), lr=1e-3)
    trained: Any = model
    if compiler is not None:
        trained = torch.compile(model, **compiler)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=compiler is None):
            loss = torch.nn.functional.mse_loss(trained(ids).last_hidden_state.float(), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def steps(layers: int, batch: int, length: int) -> dict[str, Callable[[], None]]:
    ids, target = torch.randint(30000, (batch, length)), torch.randn(batch, length, 768)

    def qsync(**options: Any) -> dict[str, Any]:
        return {"backend": "qsync", "options": {"precision": "bf16", **options}}

    return {
        "qsync bf16, no dropout": step(layers, ids, target, 0.0, "sdpa", qsync()),
        "qsync bf16, fast_dropout": step(
            layers, ids, target, 0.1, "sdpa", qsync(fast_dropout=True)
        ),
        "qsync bf16": step(layers, ids, target, 0.1, "sdpa", qsync()),
        "autocast bf16, no dropout": step(layers, ids, target, 0.0, "eager", None),
        "autocast bf16": step(layers, ids, target, 0.1, "eager", None),
    }


def rows_of(case: str, times: Times, to: str) -> list[Row]:
    return [
        {
            "case": case,
            "name": name,
            "milliseconds": times.median(name) * 1e3,
            "to": to,
            "ratio": times.ratio(name, to),
        }
        for name in times
    ]


def main() -> None:
    options = arguments(__doc__)
    sizes = by_size(options.quick, (1, 1, 16), (2, 8, 128))
    rows = rows_of(
        f"draws, {SIZE[0]}x{SIZE[1]}",
        measure(draws(SIZE), repeats=by_size(options.quick, 3, 31)),
        "copy",
    )
    times = measure(steps(*sizes), repeats=by_size(options.quick, 2, 15))
    case = "BERT {} layers, {} x {} tokens".format(*sizes)
    finish(options, rows + rows_of(case, times, "qsync bf16"))


if __name__ == "__main__":
    main()
