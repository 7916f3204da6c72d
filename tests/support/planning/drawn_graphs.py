"""Random small graphs as device classes, and the evaluation of all of their plans.

Invariant: a seed determines the graph, the loss and the device class.
"""

from __future__ import annotations

import functools
import itertools
import random

import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx.allocator import DeviceClass, Evaluation, PlanEvaluator, Problem
from qsync_fx.predictor.memory import ADAM, LossMemory, TrainingMemory
from qsync_fx.predictor.model import ModelGraph
from qsync_fx.profiler.model_graph_builder import build_model_graph
from tests.support.planning.allocation_problems import PlainTimes, drawn_sensitivity
from tests.support.planning.predicted_models import DrawnTimes

LOSSES = None, LossMemory(), LossMemory(held=150, most=500)
"""Memory of the loss by seed modulo 3: unknown, none, or more than its gradients."""


class Drawn(nn.Module):
    """Random model of three or four layers with residuals, concatenations, norms and gates."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4 if seed % 2 else 3))
        self.norm = nn.LayerNorm(8)
        self.steps = []
        for index in range(len(self.layers)):
            self.steps.append(
                (
                    index,
                    draw.randrange(index + 1),
                    draw.choice(["add", "mul", "none", "relu", "cat", "norm"]),
                )
            )
        self.normed = any(join == "norm" for _, _, join in self.steps)
        if not self.normed:
            del self.norm

    def forward(self, x: Tensor) -> Tensor:
        outputs = [x]
        for index, source, join in self.steps:
            y = self.layers[index](outputs[source])
            if join == "add":
                y = y + outputs[-1]
            elif join == "mul":
                y = y * outputs[source]
            elif join == "relu":
                y = torch.relu(y)
            elif join == "cat":
                y = torch.cat([y, outputs[-1]], -1)[:, ::2]
            elif join == "norm":
                y = self.norm(y)
            outputs.append(y)
        return sum(outputs[1:], x)


@functools.cache
def graph(seed: int) -> ModelGraph:
    torch._dynamo.reset()
    explanation = qsync_fx.explain(
        Drawn(seed).train(), torch.randn(4, 8), options={"precision": "int8"}
    )
    return build_model_graph(explanation, ("fp32", "bf16", "fp16", "int8"))


def device(
    seed: int, formats: tuple[str, ...], times: type[DrawnTimes] = PlainTimes
) -> DeviceClass:
    model_graph = graph(seed % 7)
    return DeviceClass(
        model_graph,
        times(seed),
        drawn_sensitivity(model_graph, seed),
        formats,
        training=TrainingMemory(ADAM, loss=LOSSES[seed % 3]),
    )


def every(problem: Problem, name: str) -> list[tuple[dict[str, str], Evaluation]]:
    choices = problem.classes[name].choices
    evaluator = PlanEvaluator(problem, problem.uniform())
    plans = (
        dict(zip(choices, picked, strict=True)) for picked in itertools.product(*choices.values())
    )
    return [(plan, evaluator.set_plans({name: plan})) for plan in plans]
