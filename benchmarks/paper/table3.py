"""QSync's Table III: error of step times predicted with the cost mapper and by dPRO's model.
dPRO's model has neither casts nor cascades. The network is BERT on this CPU, with all linear layers
in BF16 (the paper's FP16) or in INT8, or with three of its four layers in BF16. The profile does
not contain these plans. Each repeat measures a profile and the plans, interleaved. Columns:
"step_ms" is the mean over repeats of the median measured step, "error_%" the mean absolute error of
the predicted full step, and "each_%" lists the signed errors of the repeats.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qsync_fx
from qsync_fx import Plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.predictor.replay_accuracy import Case, additive, bert, measured, predicted
from benchmarks.support.harness import Row, arguments, by_size, finish, folder, write_json

REPEATS = 5
ROUNDS = 9


@dataclass(frozen=True)
class Setting:
    """Model and plans of the experiment.

    Attributes:
        build: creates the model with its training step.
        part: regular expression of the operators that are BF16 in the third plan.
    """

    build: Callable[[], Case]
    part: str


class Small(nn.Module):
    """Two linear layers with a matrix product between them that belongs to no linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        result: torch.Tensor = self.second(y @ y.transpose(0, 1))
        return result


def small() -> Case:
    model, batch = Small(), (torch.randn(8, 64), torch.randn(8, 64))

    def step(model: Any, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]).float(), batch[1])

    return Case(model, batch, step, torch.optim.SGD(model.parameters(), lr=1e-6))


SETTING = Setting(lambda: bert(4, 4, 128), r"encoder\.layer\.[0-2]\.")
QUICK = Setting(small, r"first/")


def plans_of(ids: Mapping[str, str], part: str) -> dict[str, Plan]:
    """Return the paper's plans; `ids` maps adjustable operators to their operator types."""

    def plan(fmt: str, chosen: Callable[[str], bool]) -> Plan:
        return Plan(operators={name: fmt if chosen(name) else "fp32" for name in ids})

    def linear(name: str) -> bool:
        return ids[name] == "linear"

    return {
        "linear layers in BF16": plan("bf16", linear),
        "linear layers in INT8": plan("int8", linear),
        "some layers in BF16": plan("bf16", lambda name: re.match(part, name) is not None),
    }


def repeats(
    setting: Setting, count: int, rounds: int, partial: Path | None
) -> Iterator[dict[str, dict[str, float]]]:
    """Yield measured seconds and prediction errors in percent, by repeat and plan."""
    for repeat in range(count):
        torch.manual_seed(repeat)
        torch._dynamo.reset()
        case = setting.build()
        explanation = qsync_fx.explain(case.model, case.batch[0])
        planned = {str(operator) for operator in explanation.plan().operators}
        adjustable = {
            str(item.id): item.row.name
            for item in explanation.operators
            if item.row is not None and str(item.id) in planned
        }
        plans = plans_of(adjustable, setting.part)
        path = partial and partial / f"table3-{repeat}.json"
        profile, runs = measured(case, list(plans.values()), rounds, path)
        result: dict[str, dict[str, float]] = {}
        for (name, plan), run in zip(plans.items(), runs, strict=True):
            real = statistics.median(map(sum, run.steps))
            views = {
                "cost mapper": predicted(profile, plan),
                "dPRO's view": additive(profile, plan),
            }
            off = {
                view: 100 * (seconds + profile.optimizer_seconds) / real - 100
                for view, seconds in views.items()
            }
            result[name] = {"seconds": real, **off}
        yield result


def rows(repetitions: list[dict[str, dict[str, float]]]) -> Iterator[Row]:
    """Yield one row per plan, over all repeats."""
    for name in repetitions[0]:
        values = [repeat[name] for repeat in repetitions]
        row: dict[str, object] = {
            "plan": name,
            "step_ms": 1e3 * statistics.fmean(repeat["seconds"] for repeat in values),
        }
        for view in ("cost mapper", "dPRO's view"):
            row[f"{view}, error_%"] = statistics.fmean(abs(repeat[view]) for repeat in values)
            row[f"{view}, each_%"] = [round(repeat[view], 2) for repeat in values]
        yield row


def main() -> None:
    options = arguments(
        __doc__,
        repeats={"type": int, "default": REPEATS, "help": "measurements (%(default)s)"},
        rounds={"type": int, "default": ROUNDS, "help": "turns a plan in each (%(default)s)"},
        partial={
            "type": folder,
            "help": "folder for partial measurements, from which an interrupted run resumes",
        },
    )
    # With one thread, CPU time excludes the load of other processes.
    torch.set_num_threads(1)
    count, rounds = by_size(options.quick, (1, 2), (options.repeats, options.rounds))
    results: list[dict[str, dict[str, float]]] = []
    for result in repeats(
        by_size(options.quick, QUICK, SETTING),
        count,
        rounds,
        by_size(options.quick, None, options.partial),
    ):
        results.append(result)
        if options.json:
            write_json(options.json, list(rows(results)), quick=options.quick)
    finish(options, list(rows(results)))


if __name__ == "__main__":
    main()
