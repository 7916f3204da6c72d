"""Error of predicted step times for random mixed plans that the profile does not contain.
The models have steps of 50 to 300 ms. All plans of a model, for the profile and for the evaluation,
are compiled in one process and run interleaved. "mapper" predicts a plan with the cost mapper from
the profile's plans; "mapper, uniform runs alone" from its uniform plans only; "additive" sums
operator times without casts and cascades, as in dPRO. "floor" is the difference between odd and
even rounds of the same plans: the resolution of the measurement. Columns: "passes_*" refer to
forward and backward, "step_*" include the optimizer; "mean_%" and "worst_%" are absolute errors,
and "each_%" are the signed errors of the plans. Complete measurements in --partial are evaluated
again without measuring. See `qsync_fx.profiler.run_statistics` for the treatment of interference.
"""

from __future__ import annotations

import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qsync_fx
from qsync_fx import Plan, Profile
from qsync_fx.predictor.cost_mapper import CostMapper
from qsync_fx.profiler import measurement
from qsync_fx.profiler.measurement import label_of
from qsync_fx.profiler.run_statistics import MeasuredRun, faster_half, paces

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.harness import (
    Row,
    arguments,
    by_size,
    finish,
    folder,
    selected,
    write_cases,
)
from benchmarks.support.models import vgg_layers

PRECISIONS = ("fp32", "bf16", "int8")
KINDS = ("singly", "skewed", "by block")
CLOCKS = {"processor": time.thread_time, "wall": time.perf_counter}


@dataclass(frozen=True)
class Case:
    """Model, batch, training step and optimizer."""

    model: nn.Module
    batch: Any
    step: Callable[[Any, Any], torch.Tensor]
    optimizer: torch.optim.Optimizer


def bert(layers: int, batch: int, length: int) -> Case:
    from transformers import BertConfig, BertModel

    config = BertConfig(num_hidden_layers=layers, attn_implementation="eager")
    model = BertModel(config, add_pooling_layer=False)
    inputs = torch.randint(30000, (batch, length)), torch.randn(batch, length, 768)

    def step(model: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = nn.functional.mse_loss(
            model(batch[0]).last_hidden_state.float(), batch[1]
        )
        return loss

    return Case(model, inputs, step, torch.optim.AdamW(model.parameters(), lr=1e-6))


class Block(nn.Module):
    """Residual block with two convolutions."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        past = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.down = nn.Identity() if stride == 1 and before == after else past

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out: torch.Tensor = self.relu(y + self.down(x))
        return out


class ResNet18(nn.Module):
    """ResNet-18 (He et al., 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)
        )
        self.pool = nn.MaxPool2d(3, 2, 1)
        widths = [64, 64, 128, 256, 512]
        stages = zip(widths, widths[1:], (1, 2, 2, 2), strict=False)
        self.stages = nn.ModuleList(
            nn.Sequential(Block(a, b, stride), Block(b, b, 1)) for a, b, stride in stages
        )
        self.fc = nn.Linear(512, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.stem(x))
        for stage in self.stages:
            x = stage(x)
        logits: torch.Tensor = self.fc(x.mean((2, 3)))
        return logits


def vgg11_bn() -> nn.Module:
    """Return VGG-11 with batch norm (Simonyan and Zisserman, configuration A), small head."""
    layers = vgg_layers(64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)
    head = (
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 100),
    )
    return nn.Sequential(*layers, *head)


def classifier(model: nn.Module, batch: int, size: int) -> Case:
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)

    def step(model: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = nn.functional.cross_entropy(model(batch[0]).float(), batch[1])
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    return Case(model, (images, torch.randint(100, (batch,))), step, optimizer)


CASES: Mapping[str, Callable[[], Case]] = {
    "BERT 2 layers, 4 x 128 tokens": lambda: bert(2, 4, 128),
    "ResNet-18, 16 x 64 x 64": lambda: classifier(ResNet18(), 16, 64),
    "VGG-11-BN, 8 x 64 x 64": lambda: classifier(vgg11_bn(), 8, 64),
}
QUICK: Mapping[str, Callable[[], Case]] = {
    "two convolutions and a linear layer": lambda: classifier(
        nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 100)),
        ),
        2,
        8,
    )
}


def mixed_plans(ids: Sequence[str], count: int, seed: int = 1) -> dict[str, Plan]:
    """Return random plans: operators drawn independently, mostly in one format, or by block."""
    drawn, plans = random.Random(seed), {}
    for index in range(count):
        kind = KINDS[index % len(KINDS)]
        usual = drawn.choice(PRECISIONS)
        blocks: dict[str, str] = {}
        chosen = {}
        for name in ids:
            if kind == "by block":
                chosen[name] = blocks.setdefault(_block(name), drawn.choice(PRECISIONS))
            else:
                skewed = kind == "skewed" and drawn.random() < 0.7
                chosen[name] = usual if skewed else drawn.choice(PRECISIONS)
        plans[f"{index:02d} {kind}"] = Plan(operators=chosen)
    return plans


def _block(name: str) -> str:
    """Return an operator's block: part of a stage, encoder layer, or four consecutive modules."""
    parts = re.match(r"(.*?)(\d+)(?:\.(\w+))?", name)
    if parts is None:
        return ""
    return f"{parts[1]}{parts[2]}.{parts[3] or ''}" if parts[1] else f"{int(parts[2]) // 4}"


def uniform_alone(profile: Profile) -> Profile:
    """Return the profile restricted to its uniform plans, without products of mixed formats."""
    return replace(profile, runs=[run for run in profile.runs if run.label in PRECISIONS])


def additive(profile: Profile, plan: Plan) -> float:
    """Return the seconds of forward and backward without casts and cascades, as in dPRO's model.

    An operator that the plan does not contain runs in FP32.
    """
    runs = {
        run.label: {m.operator: m.forward + m.backward for m in run.operators}
        for run in profile.runs
    }
    formats = {str(op_id): chosen.name for op_id, chosen in plan.operators.items()}
    total = sum(runs[formats.get(operator, "fp32")][operator] for operator in runs["fp32"])
    return total + sum(next(run for run in profile.runs if run.label == "fp32").outside)


def predicted(profile: Profile, plan: Plan) -> float:
    """Return the seconds of forward and backward predicted by the cost mapper."""
    totals = CostMapper(profile.graph, profile.times(), plan).totals
    return totals.seconds - totals.optimizer


def errors(predicted: Mapping[str, float], real: Mapping[str, float]) -> tuple[float, float]:
    """Return the mean and the worst absolute error in percent."""
    off = [100 * abs(predicted[name] / real[name] - 1) for name in real]
    return statistics.mean(off), max(off)


def measured(
    case: Case, plans: Sequence[Plan], rounds: int, partial: Path | None
) -> tuple[Profile, list[MeasuredRun]]:
    """Measure a model with interleaved plans; return the profile without `plans`, and their runs.

    Runs are in the order of `plans`. A plan with the same operator states as one of the profile's
    plans is omitted, since it would test no prediction.
    """
    if partial is not None and partial.exists():
        resumed = Profile.load(partial)
    else:
        resumed = qsync_fx.measure(
            case.model,
            case.step,
            [case.batch],
            PRECISIONS,
            optimizer=case.optimizer,
            plan=plans,
            repeats=rounds,
            sensitivity=None,
            path=partial,
        )
    runs = {run.label: run for run in resumed.runs if run.planned}
    profile = replace(resumed, runs=[run for run in resumed.runs if not run.planned])
    return profile, [runs[label] for plan in plans if (label := label_of(plan)) in runs]


def rows_of(name: str, case: Case, count: int, rounds: int, partial: Path | None) -> list[Row]:
    explanation = qsync_fx.explain(case.model, case.batch[0])
    ids = [str(op_id) for op_id in explanation.plan().operators]
    plans_by_label = {
        label_of(plan): (kind, plan) for kind, plan in mixed_plans(ids, count).items()
    }
    plans = [plan for _, plan in plans_by_label.values()]
    profile, runs = measured(case, plans, rounds, partial)
    targets = {run.label: run for run in runs}
    real = {label: run.passes for label, run in targets.items()}
    # The median excludes slow page allocations: an optimizer's temporary tensors are new memory in
    # every
    # step, which occasionally takes the system far longer than the update.
    updates = [[update for *_, update in run.steps] for run in targets.values()]
    steps = {
        label: real[label] + pace * statistics.median(update)
        for label, pace, update in zip(targets, paces(updates), updates, strict=True)
    }
    halves = [
        {
            label: faster_half([step[0] + step[1] for step in run.steps[start::2]])
            for label, run in targets.items()
        }
        for start in (0, 1)
    ]
    predictors = {
        "mapper": {label: predicted(profile, plans_by_label[label][1]) for label in targets},
        "mapper, uniform runs alone": {
            label: predicted(uniform_alone(profile), plans_by_label[label][1]) for label in targets
        },
        "additive, no casts or cascades": {
            label: additive(profile, plans_by_label[label][1]) for label in targets
        },
    }
    rows: list[Row] = []
    for predictor, seconds_by_label in predictors.items():
        mean, worst = errors(seconds_by_label, real)
        of_step = errors(
            {
                label: seconds + profile.optimizer_seconds
                for label, seconds in seconds_by_label.items()
            },
            steps,
        )
        rows.append(
            {
                "case": name,
                "method": predictor,
                "plans": len(targets),
                "passes_ms": 1e3 * statistics.mean(real.values()),
                "step_ms": 1e3 * statistics.mean(steps.values()),
                "passes_mean_%": mean,
                "passes_worst_%": worst,
                "step_mean_%": of_step[0],
                "step_worst_%": of_step[1],
                "each_%": {
                    plans_by_label[label][0]: round(
                        100 * (seconds_by_label[label] / real[label] - 1), 2
                    )
                    for label in targets
                },
            }
        )
    floor = errors(halves[0], halves[1]) if rounds > 1 else (0.0, 0.0)
    rows.append(
        {
            "case": name,
            "method": "floor: odd against even rounds",
            "passes_mean_%": floor[0],
            "passes_worst_%": floor[1],
        }
    )
    return rows


def main() -> None:
    options = arguments(
        __doc__,
        only={"help": "one case: bert, resnet, vgg"},
        plans={"type": int, "default": 20, "help": "mixed plans a model (%(default)s)"},
        rounds={"type": int, "default": 9, "help": "turns a plan (%(default)s)"},
        partial={
            "type": folder,
            "help": "folder for partial measurements, from which an interrupted run resumes",
        },
        clock={
            "choices": CLOCKS,
            "default": next(iter(CLOCKS)),
            "help": "what times steps (%(default)s)",
        },
    )
    torch.set_num_threads(1)
    # With one thread, CPU time excludes the load of other processes. Wall time is what a user
    # observes.
    measurement.clock_for = lambda threads: CLOCKS[options.clock]  # type: ignore[attr-defined]
    torch.manual_seed(0)
    rows: list[Row] = []
    for name, build in selected(options, by_size(options.quick, QUICK, CASES)).items():
        suffix = "" if CLOCKS[options.clock] is time.thread_time else f"-{options.clock}"
        partial = options.partial and options.partial / f"{name.split()[0].lower()}{suffix}.json"
        count, rounds = by_size(options.quick, (2, 2), (options.plans, options.rounds))
        rows += rows_of(
            name if not suffix else f"{name}, wall clock",
            build(),
            count,
            rounds,
            partial,
        )
        if options.json:
            # A case takes minutes: write its rows before the next one starts.
            write_cases(options.json, rows, quick=options.quick)
        torch._dynamo.reset()
    finish(options, rows, by="case")


if __name__ == "__main__":
    main()
