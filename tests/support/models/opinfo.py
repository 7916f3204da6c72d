"""PyTorch's operator database (OpInfo) through the backend, compared with torch.

    python tests/support/models/opinfo.py --json opinfo.json                    a sample
    python tests/support/models/opinfo.py --all --shard 1/4 --json part.json    a quarter of all

Every operator of `op_db` that supports autograd runs on its FP32 CPU samples, also in place if
possible. In "fp32", outputs and gradients must equal torch's backend "aot_eager" bit for bit. In
other precisions they must be close to eager.

Invariant: each (operator, form, sample) has one outcome. If torch itself fails, it has the error.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from qsync_fx.formats import FORMATS
from qsync_fx.graph import PrecisionGraph
from qsync_fx.passes.pass_base import GraphPass
from qsync_fx.serialization.atomic_files import write_text

FAILURES = ("different", "error", "far")
"""Outcomes that are defects of qsync_fx."""

CAPTURE = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
"""Options of Dynamo that capture data-dependent sizes as symbols instead of graph breaks."""

Values = list[Tensor | None]


@dataclass
class Outcome:
    """Outcome of one sample.

    Attributes:
        result: "equal" to aot_eager, "eager equal" if also to eager, "close" in narrow formats; of
            `FAILURES`, "different" from aot_eager, "error", or "far" from eager. If no comparison
            is possible: "torch fails" (eager or aot_eager), "random" (two runs of aot_eager
            differ), "no graph" (Dynamo does not compile the call).
        without_row: operators outside the operator table, and nodes that could not be retraced.
    """

    operator: str
    form: str
    sample: int
    result: str
    detail: str = ""
    without_row: list[str] = field(default_factory=list)


def entries() -> list[OpInfo]:
    """Return the operators that support autograd and FP32 on the CPU."""
    return [e for e in op_db if e.supports_autograd and torch.float32 in e.supported_dtypes("cpu")]


def full_name(entry: OpInfo) -> str:
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else entry.name


def outcomes(entry: OpInfo, samples: int, precision: str = "fp32") -> Iterator[Outcome]:
    """Run an operator on evenly spaced samples."""
    torch.manual_seed(0)
    # Exhaust the generator, which would change the autograd mode when it is collected.
    every = list(entry.sample_inputs("cpu", torch.float32, requires_grad=True))
    chosen = (
        sorted({round(index * (len(every) - 1) / max(samples - 1, 1)) for index in range(samples)})
        if every
        else []
    )
    forms = [("plain", entry.op), ("in place", entry.inplace_variant)]
    for form, call in forms:
        for index in chosen:
            if call is not None:
                result = run(call, every[index], form == "in place", precision)
                yield Outcome(full_name(entry), form, index, *result)


def run(
    call: Callable[..., Any], sample: SampleInput, in_place: bool, precision: str
) -> tuple[str, str, list[str]]:
    """Run a sample with eager, aot_eager and the backend; return the last fields of `Outcome`."""
    program = _Program(call, sample, in_place)
    without_row: dict[str, int] = {}
    met: list[PrecisionGraph] = []

    def watch(graph: PrecisionGraph) -> None:
        met.append(graph)
        without_row.update(graph.unknown)

    def compiled(backend: Any, **compile_options: Any) -> Callable[..., Any]:
        torch._dynamo.reset()
        return torch.compile(program.function, backend=backend, **compile_options)

    options = {
        "precision": precision,
        "inner_backend": "aot_eager",
        "passes": [GraphPass("watch", watch, after="lower")],
    }
    counter = CompileCounterWithBackend("aot_eager")
    try:
        eager = program(program.function)
        torch_compiled = program(compiled(counter))
    except Exception as error:  # noqa: BLE001 - whatever torch raises is the outcome
        return "torch fails", _line(error), []
    try:
        ours = program(compiled("qsync", options=options))
    except Exception as error:  # noqa: BLE001
        return "error", _line(error), list(without_row)
    if not met:
        made = counter.frame_count
        return (
            ("error", f"aot_eager was given {made} graphs, we none", [])
            if made
            else ("no graph", "", [])
        )
    if precision == "fp32":
        difference = _difference(ours, torch_compiled)
        if (
            difference is not None
            and _difference(program(compiled("aot_eager")), torch_compiled) is not None
        ):
            return "random", "", list(without_row)
        same = "equal" if _difference(ours, eager) is not None else "eager equal"
        return (
            (same, "", list(without_row))
            if difference is None
            else ("different", difference, list(without_row))
        )
    return *_near(ours, eager, 8 * step(precision)), list(without_row)


class _Program:
    """Call of one sample as a function of its tensors."""

    def __init__(self, call: Callable[..., Any], sample: SampleInput, in_place: bool) -> None:
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors: list[Tensor] = [leaves[i] for i in self.at]
        self.process = sample.output_process_fn_grad

        def function(*tensors: Tensor) -> Any:
            values = list(leaves)
            for i, tensor in zip(self.at, tensors, strict=True):
                values[i] = tensor
            input, args, kwargs = pytree.tree_unflatten(values, spec)
            if not in_place:
                return call(input, *args, **kwargs)
            written = input * 1
            call(written, *args, **kwargs)
            return written * 1

        self.function = function

    def __call__(self, function: Callable[..., Any]) -> Values:
        """Return the outputs of `function`, and the gradients of their randomly weighted sum."""
        tensors = [t.detach().clone().requires_grad_(t.requires_grad) for t in self.tensors]
        torch.manual_seed(1)
        output = function(*tensors)
        outputs = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        learned = [t for t in tensors if t.requires_grad]
        differentiable = [
            t
            for t in pytree.tree_leaves(self.process(output))
            if isinstance(t, Tensor) and t.requires_grad
        ]
        if not differentiable or not learned:
            return [t.detach() for t in outputs]
        weights = [_weights(t) for t in differentiable]
        gradients = torch.autograd.grad(differentiable, learned, weights, allow_unused=True)
        return [*(t.detach() for t in outputs), *gradients]


def _weights(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(like.shape, dtype=like.dtype, generator=generator)


def _difference(first: Values, second: Values) -> str | None:
    if len(first) != len(second):
        return f"{len(first)} values for {len(second)}"
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        if (a is None) != (b is None):
            return (
                f"value {i}: {None if a is None else a.shape} for {None if b is None else b.shape}"
            )
        if a is None or b is None:
            continue
        if a.dtype is not b.dtype or a.shape != b.shape or a.layout is not b.layout:
            return f"value {i}: {a.dtype} {tuple(a.shape)} for {b.dtype} {tuple(b.shape)}"
        if not _same_bits(a, b):
            return (
                f"value {i}: off by {_dense(a - b).abs().max().item():g}"
                if a.dtype.is_floating_point
                else f"value {i}"
            )
    return None


def _same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = _dense(a), _dense(b)
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    return bool(torch.equal(a, b) or ((a == b) | (a.isnan() & b.isnan())).all())


def _dense(t: Tensor) -> Tensor:
    return t if t.layout is torch.strided else t.to_dense()


def step(precision: str) -> float:
    """Return the machine epsilon of a float format, or 1 / maximum of an integer format."""
    fmt = FORMATS[precision]
    return fmt.eps if fmt.kind == "float" else 1 / fmt.max


def _near(ours: Values, exact: Values, tolerance: float) -> tuple[str, str]:
    """Return "close" if |a - b| <= tolerance * (|b| + 1) for the norms of all tensors, or "far"."""
    for index, (a, b) in enumerate(zip(ours, exact, strict=True)):
        if a is None or b is None:
            if a is not b:
                return "far", f"value {index}: {a} for {b}"
            continue
        if a.dtype is not b.dtype or a.shape != b.shape:
            return (
                "far",
                f"value {index}: {a.dtype} {tuple(a.shape)} for {b.dtype} {tuple(b.shape)}",
            )
        if not (b.dtype.is_floating_point or b.is_complex()):
            continue
        finite = b.isfinite() & a.isfinite()
        off = torch.where(finite, a - b, 0).norm()
        allowed = tolerance * (torch.where(finite, b, 0).norm() + 1)
        if bool(off > allowed) or bool((b.isfinite() != a.isfinite()).any()):
            return "far", f"value {index}: {off.item():g} of {b.norm().item():g}"
    return "close", ""


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {' '.join(text[:3])[:300]}"


def chosen_entries(count: int | None, seed: int) -> list[OpInfo]:
    """Return `count` random operators, or all for None, in the order of the database."""
    every = entries()
    if count is None:
        return every
    picked = random.Random(seed).sample(range(len(every)), count)
    return [every[index] for index in sorted(picked)]


def survey(chosen: Sequence[OpInfo], samples: int, precision: str) -> Iterator[Outcome]:
    """Run operators sequentially."""
    torch.set_num_threads(1)
    gc.disable()
    seeded = common_methods_invocations.wrapper_set_seed
    # Dynamo cannot capture how the database seeds random operators; `_Program` seeds instead.
    common_methods_invocations.wrapper_set_seed = lambda call, *args, **kwargs: call(
        *args, **kwargs
    )
    try:
        with warnings.catch_warnings(), torch._dynamo.config.patch(**CAPTURE):
            warnings.simplefilter("ignore")
            for index, entry in enumerate(chosen):
                yield from outcomes(entry, samples, precision)
                if index % 20 == 19:
                    gc.collect()
    finally:
        gc.enable()
        common_methods_invocations.wrapper_set_seed = seeded


def main() -> int:
    parser = argparse.ArgumentParser(description="PyTorch's operator database through the backend")
    parser.add_argument("--all", action="store_true", help="every operator, not a sample of 60")
    parser.add_argument("--shard", default="1/1", help="i/n: the i-th of n parts")
    parser.add_argument("--samples", type=int, default=3, help="samples an operator")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--only", default="", help="operators with this text in their name")
    parser.add_argument("--seed", type=int, default=0, help="which sample of operators")
    parser.add_argument(
        "--json",
        type=Path,
        required=True,
        metavar="PATH",
        help="one row an operator, form and sample",
    )
    options = parser.parse_args()
    part, parts = map(int, options.shard.split("/"))
    chosen = chosen_entries(None if options.all or options.only else 60, options.seed)[
        part - 1 :: parts
    ]
    chosen = [entry for entry in chosen if options.only in full_name(entry)]
    started, rows = time.time(), []
    for outcome in survey(chosen, options.samples, options.precision):
        rows.append(outcome)
        if outcome.result in FAILURES:
            print(
                f"{outcome.operator} ({outcome.form}, sample {outcome.sample}): {outcome.result}: "
                f"{outcome.detail}",
                flush=True,
            )
    counts = Counter(outcome.result for outcome in rows)
    unknown = Counter(name for outcome in rows for name in outcome.without_row)
    summary = {
        "torch": torch.__version__, "precision": options.precision, "shard": options.shard,
        "operators": len(chosen),
        "seconds": round(time.time() - started), "counts": dict(counts),
        "without_row": dict(unknown),
    }  # fmt: skip
    write_text(
        options.json,
        json.dumps({**summary, "rows": [asdict(outcome) for outcome in rows]}, indent=1),
    )
    print(json.dumps(summary, indent=1))
    return int(any(counts[failure] for failure in FAILURES))


if __name__ == "__main__":
    sys.exit(main())
