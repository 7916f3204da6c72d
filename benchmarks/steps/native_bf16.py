"""BF16 training steps with products by the native module instead of oneDNN.

They show the benefit of faster products alone. A post-grad pass of Inductor replaces matrix
products of some kinds (output, input gradient, weight gradient) or all. No option of qsync does
this; docs/kernels-cpu.md has the reason. Runs are interleaved; "milliseconds" is the median,
"of_onednn" the median ratio to oneDNN, and "native products" the number of replaced products. With
--threads 1 the clock counts CPU time of the process.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, fx
from torch._inductor import config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.kernels.bf16_products import ours
from benchmarks.steps.step_time import Variant, step
from benchmarks.support.harness import Row, arguments, by_size, clock_for, finish, measure
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
    """Return which product of a layer a node computes.

    Only an output has a bias, and only a weight gradient has a transposed first operand.
    """
    if node.target is ADDMM:
        return "output"
    first: fx.Node = node.args[0]  # type: ignore[assignment]
    return "input gradient" if first.meta["val"].is_contiguous() else "weight gradient"


@contextlib.contextmanager
def native(kinds: tuple[str, ...]) -> Iterator[None]:
    """Within the context, compile with the native module for products of `kinds`."""

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

    # Inductor's cache key ignores this pass.
    with config.patch(post_grad_custom_post_pass=replace, force_disable_caches=True):
        yield


def compiler() -> Callable[..., object]:
    """Return qsync in BF16 as a separate backend, which shares no compiled code."""
    compile_graph: Callable[..., object] = torch._dynamo.lookup_backend("qsync")
    return lambda module, inputs: compile_graph(module, inputs, options={"precision": "bf16"})


def native_products(run: Callable[[], None]) -> int:
    """Return the number of products that the native module computes in a step."""
    before = calls
    run()
    return calls - before


def main() -> None:
    options = arguments(__doc__)
    cases = {"layer of a transformer of 32, 4 x 16 tokens": encoder_layer(32, 4, 16)}
    if not options.quick:
        cases = {
            "BERT, 2 layers, 8 x 128 tokens": bert(2, 8, 128),
            "GPT-2 block, 4 x 256 tokens": gpt2_block(4, 256),
        }
    clock = clock_for(options.threads)
    rows: list[Row] = []
    for case, built in cases.items():
        steps: dict[str, Callable[[], None]] = {}
        for name, kinds in VARIANTS.items():
            steps[name] = step(built, Variant(compiler={"backend": compiler()}))
            with native(kinds):
                steps[name]()  # the backward pass compiles when it first runs
        products = {name: native_products(compiled_step) for name, compiled_step in steps.items()}
        times = measure(steps, by_size(options.quick, 2, 21), clock=clock)
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
    finish(options, rows, by="case")


if __name__ == "__main__":
    main()
