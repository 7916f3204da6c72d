"""Whole steps in BF16 whose products are the native module's, beside the same steps by oneDNN: what faster products alone are worth.

A pass behind Inductor's own puts the module in for matrix products in BF16, of some kinds or of all: `output`, `input gradient`, `weight
gradient`. No option does that; see docs/kernels.md for why not. One thread is timed by its own clock.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, fx
from torch._inductor import config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.kernels.bf16_products import ours
from benchmarks.steps.step_time import Variant, step
from benchmarks.support.harness import Row, arguments, finish, measure
from benchmarks.support.models import bert, encoder_layer, gpt2_block

ONEDNN: Final = "oneDNN"
VARIANTS: Final[dict[str, tuple[str, ...]]] = {
    ONEDNN: (),
    "weight gradients native": ("weight gradient",),
    "output and weight gradients native": ("output", "weight gradient"),
    "all native": ("output", "input gradient", "weight gradient"),
}
MM: Final = torch.ops.aten.mm.default
ADDMM: Final = torch.ops.aten.addmm.default


calls = 0


@torch.library.custom_op("qsync_benchmark::product", mutates_args=())
def product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    global calls
    calls += 1
    return ours(a, b, torch.bfloat16, None if bias is None else bias.float())


@product.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def kind(node: fx.Node) -> str:
    """Returns which product of a layer this is: a bias is an output's, and only the weight's gradient has its first matrix turned."""
    if node.target is ADDMM:
        return "output"
    first: fx.Node = node.args[0]  # type: ignore[assignment]
    return "input gradient" if first.meta["val"].is_contiguous() else "weight gradient"


@contextlib.contextmanager
def native(kinds: tuple[str, ...]) -> Iterator[None]:
    """Lets what is compiled within multiply by the native module, products of these kinds."""

    def replace(graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if (
                node.target not in (MM, ADDMM)
                or node.meta["val"].dtype != torch.bfloat16
                or kind(node) not in kinds
            ):
                continue
            bias, a, b = node.args if node.target is ADDMM else (None, *node.args)
            with graph.inserting_before(node):
                new = graph.call_function(torch.ops.qsync_benchmark.product.default, (a, b, bias))
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)

    # What is cached is found by the graph before passes.
    with config.patch(post_grad_custom_post_pass=replace, force_disable_caches=True):
        yield


def compiler() -> Callable[..., object]:
    """Returns qsync in BF16 as a backend of its own: what others have compiled of the same code is left alone."""
    compile_graph: Callable[..., object] = torch._dynamo.lookup_backend("qsync")
    return lambda module, inputs: compile_graph(module, inputs, options={"precision": "bf16"})


def native_products(run: Callable[[], None]) -> int:
    """Returns how many products of a step the native module computes."""
    before = calls
    run()
    return calls - before


def main() -> None:
    options = arguments(__doc__)
    cases = (
        {"layer of a transformer of 32, 4 x 16 tokens": encoder_layer(32, 4, 16)}
        if options.quick
        else {
            "BERT, 2 layers, 8 x 128 tokens": bert(2, 8, 128),
            "GPT-2 block, 4 x 256 tokens": gpt2_block(4, 256),
        }
    )
    clock = time.process_time if options.threads == 1 else time.perf_counter
    rows: list[Row] = []
    for case, built in cases.items():
        steps: dict[str, Callable[[], None]] = {}
        for name, kinds in VARIANTS.items():
            steps[name] = step(built, Variant(compiler={"backend": compiler()}))
            with native(kinds):
                steps[name]()  # The backward pass is compiled when it is first run.
        products = {name: native_products(one) for name, one in steps.items()}
        times = measure(steps, 2 if options.quick else 21, clock=clock)
        rows += [
            {
                "case": case,
                "name": name,
                "native products": products[name],
                "milliseconds": times.median(name) * 1e3,
                "of_onednn": times.ratio(name, ONEDNN),
            }
            for name in times
        ]
    finish(options, rows, cases=True)


if __name__ == "__main__":
    main()
