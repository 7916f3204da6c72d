"""Small models of real architectures for GPU tests, and tuning that forces kernels for small
layers.

Invariant: models depend on the seed alone and have no dropout, so two builds are equal; only
rounding is random.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qsync_fx.backend.cuda import codegen, tuning
from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_config import Arch
from qsync_fx.backend.cuda.problem import GemmProblem, Problem
from qsync_fx.backend.cuda.runtime import device_state as known_devices
from qsync_fx.backend.cuda.runtime.device_state import assumed
from qsync_fx.backend.cuda.selection.select import dispatch_path, of_problems
from qsync_fx.backend.cuda.tuning import TunedChoice, TuningTable
from qsync_fx.backend.operators.layer_kernels import problems_of
from qsync_fx.diagnostics import explain


@dataclass(frozen=True)
class Case:
    """Model, input and loss.

    Attributes:
        build: creates the model.
        inputs: returns the model's input, on the CPU.
        loss: computes the loss from the model's output.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    loss: Callable[[Any], Tensor]


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=500, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=1024,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False)


def _tokens() -> Tensor:
    return torch.randint(500, (8, 64), generator=torch.Generator().manual_seed(1))


def _bert_loss(output: Any) -> Tensor:
    states = output.last_hidden_state.float()
    # The target differs per token. With equal targets, the last norm's bias alone could learn them.
    return F.mse_loss(states, _target(tuple(states.shape), states.device))


@functools.cache
def _target(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return cached targets: copies from CPU memory are not allowed in CUDA graph capture."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(device)


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64, 128, 256],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        num_labels=16,
    )
    return ResNetForImageClassification(config)


def _images() -> Tensor:
    return torch.randn(16, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def _resnet_loss(output: Any) -> Tensor:
    logits = output.logits.float()
    return F.cross_entropy(
        logits, torch.arange(logits.shape[0], device=logits.device) % logits.shape[1]
    )


CASES = {"bert": Case(_bert, _tokens, _bert_loss), "resnet": Case(_resnet, _images, _resnet_loss)}


def build(name: str, device: torch.device, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return CASES[name].build().train().to(device)


def step(name: str, model: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """Run the forward and backward pass and return the loss."""
    loss = CASES[name].loss(model(x))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def weight_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the weight gradients of linear and convolution layers. Gradients of norms and biases
    are sums, which no format changes much.
    """
    layers = {
        name: part.weight
        for name, part in model.named_modules()
        if isinstance(part, (nn.Linear, nn.Conv2d))
    }
    return {
        name: weight.grad.detach().clone()
        for name, weight in layers.items()
        if weight.grad is not None
    }


def problems(name: str, precision: str, arch: Arch) -> list[Problem]:
    """Return the products of a model's layers for an architecture, without a GPU."""
    with assumed(arch, on="cpu"):
        options = {"precision": precision, "skip_unprofitable": False}
        return problems_of(
            explain(
                build(name, torch.device("cpu")), CASES[name].inputs(), options=options
            ).lowered_graphs
        )


def units(arch: Arch) -> list[TranslationUnit]:
    """Return the units that tests of models run, to compile them in advance."""
    formats = ("int8", "int8_grad", "fp8", "bf16", "fp16")
    return kernels_of(
        [p for name in CASES for precision in formats for p in problems(name, precision, arch)],
        arch,
    )


def kernels_of(requested: Sequence[Problem], arch: Arch) -> list[TranslationUnit]:
    """Return the units that compute problems, with and without `kernels_win`, and the quantizers of
    their formats.
    """
    first = [codegen.unit_of(config) for problem in requested for config in _first(problem, arch)]
    return list(dict.fromkeys([*first, *of_problems(requested, arch, every_candidate=False)]))


def _first(problem: Problem, arch: Arch) -> tuple[Any, ...]:
    selection = dispatch_path(problem, arch)
    return () if isinstance(selection, str) else selection.configs[:1]


def operators_with_kernels(requested: Sequence[Problem], arch: Arch) -> set[str]:
    """Return the operators of the problems that kernels of this architecture serve."""
    served = [problem for problem in requested if _first(problem, arch)]
    operators = {
        "qsync::gemm" if isinstance(problem, GemmProblem) else "qsync::conv2d_product"
        for problem in served
    }
    assert operators, f"{arch} has no kernel for any of these problems"
    return operators


def winning(
    requested: Sequence[Problem], arch: Arch, environment: tuning.Environment | None = None
) -> TuningTable:
    """Return a tuning table in which the first kernel of each problem wins."""
    choices = {}
    for problem in requested:
        for config in _first(problem, arch):
            bucket = problem.bucket()
            choices[bucket] = TunedChoice(
                bucket, config.name, {"torch": 2.0, config.name: 1.0}, rounds=1
            )
    return TuningTable(environment or tuning.Environment("", "", "", "", "", 1), choices)


@contextlib.contextmanager
def kernels_win(requested: Sequence[Problem], arch: Arch, folder: Path) -> Iterator[None]:
    """Select kernels instead of torch, by a tuning table as `qsync tune` writes it, which replaces
    the user's.

    A file, since `assumed` does not reach the thread of the backward pass.
    """
    environment = known_devices.environment(torch.device("cuda", 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known_devices, "folder", lambda: folder)
        tuning.save_table(
            tuning.path_in(folder, environment),
            environment,
            winning(requested, arch).choices.values(),
        )
        known_devices.forget()
        try:
            yield
        finally:
            patch.undo()
            known_devices.forget()
