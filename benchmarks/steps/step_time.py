"""Training steps of qsync on the CPU, compared with Inductor in FP32 and BF16 autocast.
qsync runs in FP32, BF16 and INT8, autocast eagerly and compiled. A step is forward, backward and
SGD. All variants of a model run interleaved in one process; "seconds" is the median. With --threads
1 the clock counts CPU time of the process. "to_peer" is the median ratio to "peer": Inductor for
"fp32" variants, the fastest autocast variant (fused or math attention) for the others, and the
faster of both for "qsync by default", which sets no options. "qsync int8_grad, all" adds
fast_dropout and the SGD of `qsync_fx.optim`. For models with attention, torchao's INT8 training, if
installed, is another variant, compiled by Inductor. Small models and cases with an uncertain
default are measured only with the default and its peers. "peak_mb" is the peak of torch's allocator
in a step beyond the bytes before it. Rows of other cases stay in the file of --json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import qsync_fx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.steps import torchao_peer
from benchmarks.support.harness import (
    Row,
    Times,
    arguments,
    by_size,
    clock_for,
    measure,
    selected,
    show,
    write_cases,
)
from benchmarks.support.models import (
    Case,
    bert,
    convnext,
    encoder_layer,
    gpt2_block,
    mobilenet,
    perceptron,
    resnet,
    small_cnn,
    vgg16_bn,
    vit,
)


@dataclass(frozen=True)
class Variant:
    """Training variant.

    Attention implementation, BF16 autocast, arguments of torch.compile (None: eager), optimizer,
    and dtype of the weights for torchao's INT8 training (None: without torchao).
    """

    attention: str = "sdpa"
    autocast: bool = False
    compiler: dict[str, Any] | None = None
    optimizer: type[torch.optim.SGD] = torch.optim.SGD
    torchao: torch.dtype | None = None


INDUCTOR: dict[str, Any] = {"backend": "inductor"}
FP32_PEER = "inductor fp32"
BY_DEFAULT = "qsync by default"


def variants(case: Case, default_alone: bool = False) -> dict[str, Variant]:
    result = {FP32_PEER: Variant(compiler=INDUCTOR)}
    for attention, name in case.attentions().items():
        result[f"autocast bf16{name}"] = Variant(attention, autocast=True)
        result[f"autocast bf16 compiled{name}"] = Variant(
            attention, autocast=True, compiler=INDUCTOR
        )
    if default_alone:
        return result | {BY_DEFAULT: Variant(compiler={"backend": "qsync"})}
    if case.attention and torchao_peer.importable():
        result["torchao int8"] = Variant(autocast=True, compiler=INDUCTOR, torchao=torch.float32)
        result["torchao int8, weights bf16"] = Variant(compiler=INDUCTOR, torchao=torch.bfloat16)
    for precision in ("fp32", "bf16", "int8", "int8_grad"):
        result[f"qsync {precision}"] = Variant(
            compiler={"backend": "qsync", "options": {"precision": precision}}
        )
    result[BY_DEFAULT] = Variant(compiler={"backend": "qsync"})
    fastest = {"precision": "int8_grad", "fast_dropout": True}
    result["qsync int8_grad, all"] = Variant(
        compiler={"backend": "qsync", "options": fastest}, optimizer=qsync_fx.optim.SGD
    )
    return result


def step(case: Case, variant: Variant) -> Callable[[], None]:
    torch.manual_seed(0)
    model = case.build(variant.attention).train()
    if variant.torchao is not None:
        torchao_peer.quantized(model, variant.torchao)
    optimizer = variant.optimizer(model.parameters(), lr=1e-3)
    # model.compile() would skip the frames of nn.Sequential, and the model would run eagerly.
    trained: Any = model
    if variant.compiler is not None:
        trained = torch.compile(model, **variant.compiler)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=variant.autocast):
            loss = case.loss(trained)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def peak_memory(run: Callable[[], None]) -> int:
    """Return the peak bytes of torch's CPU allocator during `run`, beyond the bytes before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    allocated = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            most = max(most, allocated)
    return most


def rows_of(name: str, times: Times, peaks: dict[str, int]) -> list[Row]:
    peers = [variant for variant in times if variant.startswith("autocast")]
    fastest = min(peers, key=times.median)
    rows: list[Row] = []
    for variant in times:
        peer = FP32_PEER if "fp32" in variant else fastest
        if variant == BY_DEFAULT:
            peer = min((FP32_PEER, fastest), key=times.median)
        rows.append(
            {
                "case": name,
                "variant": variant,
                "seconds": times.median(variant),
                "peer": peer,
                "to_peer": times.ratio(variant, peer),
                "peak_mb": peaks[variant] / 1e6,
            }
        )
    return rows


def cases() -> dict[str, Case]:
    return {
        "BERT 4 layers, 12 x 128 tokens": bert(),
        "VGG-16-BN, 16 x 64 x 64": vgg16_bn(),
        "ResNet-18, 32 x 96 x 96": resnet(batch=32),
        "ResNet-50, 8 x 96 x 96": resnet((3, 4, 6, 3), "bottleneck", batch=8),
        "GPT-2 block, 4 x 256 tokens": gpt2_block(),
        "ViT 2 layers, 8 x 224 x 224": vit(),
        "perceptron 64 wide, 64 rows": perceptron(64),
        **{
            f"encoder layer {width} wide, 8 x 64 tokens": encoder_layer(width)
            for width in (64, 128, 256)
        },
    }


def by_default_alone() -> dict[str, Case]:
    """Return models that are measured only with the default and its peers."""
    return {
        **{
            f"dropout 0.1, encoder layer {width} wide": encoder_layer(width, dropout=0.1)
            for width in (64, 128, 256)
        },
        "small perceptron 784-512-10, 64 rows": perceptron(64, (784, 512, 10)),
        "small perceptron 256 wide, 256 rows": perceptron(256, (256, 256, 256, 16)),
        "small perceptron 1024 wide, 32 rows": perceptron(32, (1024, 1024, 1024, 16)),
        "small perceptron 4096 wide, 8 rows": perceptron(8, (4096, 4096, 16)),
        "small CNN, 32 x 28 x 28": small_cnn(),
        "small ConvNeXt, 8 x 64 x 64": convnext(),
        "small MobileNetV2, 8 x 64 x 64": mobilenet(),
        "small ResNet-18, 8 x 32 x 32": resnet(batch=8, size=32),
        "small BERT 2 layers, 2 x 16 tokens": bert(2, batch=2, length=16),
        "small ViT 2 layers, 1 x 224 x 224": vit(batch=1),
    }


def main() -> None:
    options = arguments(
        __doc__,
        only={
            "help": "prefix of case names: bert, dropout, encoder, gpt-2, perceptron, resnet-18, "
            "small, vgg, vit"
        },
    )
    torch.manual_seed(0)
    # All variants share the code of one model.
    torch._dynamo.config.recompile_limit = 64
    alone, chosen = {}, {"two layers": perceptron()}
    if not options.quick:
        alone = by_default_alone()
        chosen = selected(options, cases() | alone)
    rows: list[Row] = []
    for name, case in chosen.items():
        steps = {}
        for variant, settings in variants(case, name in alone).items():
            print(f"{name}: {variant}", flush=True)
            steps[variant] = step(case, settings)
            steps[variant]()
        clock = clock_for(options.threads)
        times = measure(steps, repeats=by_size(options.quick, 3, 9), clock=clock)
        case_rows = rows_of(
            name, times, {variant: peak_memory(run) for variant, run in steps.items()}
        )
        show(case_rows)
        rows += case_rows
        if options.json:
            # A case runs for minutes: write its rows before the next one starts.
            write_cases(options.json, rows, quick=options.quick)
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
