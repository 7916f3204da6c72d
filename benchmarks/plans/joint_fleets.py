"""Joint plans of batches and formats for simulated fleets, against plans that change one of them.
Times and memory are predicted from the catalog; sensitivities are measured by "second_order" on
trained models (trained_sensitivity.py writes them to --folder). Plans, with 16 GPUs of each kind:
"uniform" has the widest narrow format that fits on the inference GPUs, "qsync" is the exact plan
within the step time of "uniform" at equal batches, "dynamic-batches" has the widest formats and
batches in proportion to speed, "checkpointing" the widest formats at equal batches with as much
recomputation on inference GPUs as their memory requires, "joint at its time" is the joint plan of
least variance within the step time of "qsync", and "joint at its variance" the fastest within the
variance of "qsync"; both may recompute.
Training GPUs keep their widest format, TF32 from Ampere on. "free" plans let all GPUs choose:
"free uniform" has 16 bits on all, "free joint" is the fastest joint plan within its variance.
Columns: "variance" of the mean gradient by rounding, "batches" per device, "narrow" operators on
the inference GPUs, "saved" the share of activations that each class saves if it recomputes, "gap"
to the lower bound, "found_in" in seconds. Rows "gains": "speed" is the throughput of "joint at its
variance" relative to the best plan that changes one thing, with at most the variance of "qsync";
"variance" is the variance of "joint at its time" relative to "qsync", "free speed" the throughput
of "free joint" relative to "free uniform".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from qsync_fx import Sensitivity
from qsync_fx.allocator import PlanResult, Problem
from qsync_fx.allocator.api import get_allocator
from qsync_fx.allocator.baselines import DynamicBatches
from qsync_fx.allocator.evaluator import evaluate_plan, recomputing, resized
from qsync_fx.allocator.joint_batches import BUDGETS, JointBatches
from qsync_fx.allocator.plan_result import Allocator
from qsync_fx.allocator.problem import DeviceClass
from qsync_fx.allocator.problem_builder import PlanRequest, build_problem
from qsync_fx.devices import get
from qsync_fx.errors import PlanError
from qsync_fx.predictor.model import ModelGraph
from qsync_fx.predictor.replayer.cluster import Cluster, ClusterDevice

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.plans.fleet_models import CASES, QUICK, Case
from benchmarks.plans.fleets import CatalogProfile, at_batch, symbolic
from benchmarks.plans.trained_sensitivity import FOLDER_OPTION, TARGETS, trained_sensitivity
from benchmarks.support.baselines import FullPrecision
from benchmarks.support.harness import Row, arguments, by_size, finish, selected, write_cases

COUNT: Final = 16
AMPERE: Final = (8, 0)


@dataclass(frozen=True)
class Fleet:
    """Training and inference GPUs, 16 of each kind; `memory` limits an inference GPU.

    With 32% of a T4, INT8 fits at the batches of fleet_models.py, and FP16 does not (ResNet-50).
    """

    training: tuple[str, ...]
    inference: tuple[str, ...]
    memory: str = "100%"

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.training, *self.inference)


FLEETS: Final = {
    "V100 + T4": Fleet(("v100",), ("t4",)),
    "V100 + T4, 32% of memory": Fleet(("v100",), ("t4",), "32%"),
    "A100 + L4": Fleet(("a100",), ("l4",)),
    "H100 + A10": Fleet(("h100",), ("a10",)),
    "RTX 3090 + RTX 2080 Ti": Fleet(("rtx-3090",), ("rtx-2080-ti",)),
    "V100 + A100 + T4 + L4": Fleet(("v100", "a100"), ("t4", "l4")),
}


def formats(device: str) -> tuple[str, ...]:
    """Return the formats of a GPU, widest first."""
    capability = get(device).capability or AMPERE
    if capability >= AMPERE:
        return ("tf32", "bf16", "int8")
    return ("fp32", "fp16", "int8") if capability >= (7, 5) else ("fp32", "fp16")


def kind(device: str) -> str:
    """Return the device whose formats the sensitivity was measured in."""
    return next(target for target, narrow in TARGETS.items() if formats(device)[1] in narrow)


class Models:
    """Graphs and sensitivities of a model; each device is traced once, with a symbolic batch."""

    def __init__(self, case: Case, sensitivities: Mapping[str, Sensitivity]) -> None:
        self.case, self._sensitivities = case, sensitivities
        self._graphs: dict[str, ModelGraph] = {}

    def graph(self, device: str) -> ModelGraph:
        if device not in self._graphs:
            torch.manual_seed(0)
            model = self.case.build().train()
            self._graphs[device] = symbolic(model, self.case, device, formats(device))
        return self._graphs[device]

    def resized(self, part: DeviceClass, batch: int) -> DeviceClass:
        return resized(part, self.graph(part.graph.device), batch)

    def problem(self, fleet: Fleet, free: bool) -> Problem:
        """Return the problem of a fleet at equal batches, without a limit of the seconds."""
        node = Cluster.load("cluster-a").devices["t4"].node
        devices = {
            name: ClusterDevice(COUNT, device=name, batch=self.case.batch, node=node)
            for name in fleet.names
        }
        cluster = replace(Cluster.load("cluster-a"), devices=devices)
        profiles: dict[str, Any] = {}
        for name in fleet.names:
            graph = at_batch(self.graph(name), self.case.batch)
            sensitivity = self._sensitivities[kind(name)]
            profiles[name] = CatalogProfile(graph, name, sensitivity, formats(name))
        memory = dict.fromkeys(fleet.training, "100%")
        memory |= dict.fromkeys(fleet.inference, fleet.memory)
        wishes = PlanRequest(memory=memory, target=float("inf"))
        problem, _ = build_problem(cluster, profiles, wishes)
        # The objective fixes the fastest class to its widest format.
        parts = {name: replace(part, fixed_plan=None) for name, part in problem.classes.items()}
        if not free:
            for name in fleet.training:
                parts[name] = replace(parts[name], formats=formats(name)[:1])
        return replace(problem, classes=parts)


@dataclass(frozen=True)
class UniformByDevice:
    """Allocator of each GPU's format number `position`, widest first, or of its only format."""

    position: int
    name: str = "uniform"

    def allocate(self, problem: Problem) -> PlanResult:
        plans = {
            name: part.uniform(part.formats[min(self.position, len(part.formats) - 1)])
            for name, part in problem.classes.items()
        }
        return PlanResult(problem, plans, evaluate_plan(problem, plans), self.name)


@dataclass(frozen=True)
class Checkpointing:
    """Allocator of the widest formats, and of the least recomputation that meets all limits."""

    name: str = "checkpointing"

    def allocate(self, problem: Problem) -> PlanResult:
        result = FullPrecision().allocate(problem)
        inference = [name for name, part in problem.classes.items() if len(part.formats) > 1]
        for budget in BUDGETS:
            if result.fits:
                break
            parts = {name: recomputing(problem.classes[name], budget) for name in inference}
            changed = replace(problem, classes={**problem.classes, **parts})
            plans, budgets = result.plans, dict.fromkeys(inference, budget)
            evaluation = evaluate_plan(changed, plans)
            result = PlanResult(changed, plans, evaluation, self.name, memory_budgets=budgets)
        return result


def throughput(answer: PlanResult) -> float:
    samples = answer.problem.cluster.samples
    assert samples is not None
    return samples / answer.evaluation.seconds


class Comparison:
    """Plans of a fleet, as rows."""

    def __init__(self, models: Models, model: str, fleet: str) -> None:
        self.models, self.fleet = models, FLEETS[fleet]
        self.named: dict[str, Any] = {"model": model, "fleet": fleet}
        self.rows: list[Row] = []

    def solve(self, name: str, allocator: Allocator, problem: Problem) -> PlanResult | None:
        try:
            answer = allocator.allocate(problem)
        except PlanError as error:
            self.rows.append({**self.named, "plan": name, "why not": error.what})
            return None
        over = answer.evaluation.exceeds(answer.problem)
        devices = answer.problem.cluster.devices
        chosen = [
            (fmt, formats(name)[0])
            for name in self.fleet.inference
            for fmt in answer.plans[name].values()
        ]
        self.rows.append(
            self.named
            | {
                "plan": name,
                "samples_per_second": throughput(answer),
                "variance": answer.evaluation.variance,
                "batches": "/".join(str(device.batch) for device in devices.values()),
                "narrow": sum(fmt != widest for fmt, widest in chosen),
                "operators": len(chosen),
                "saved": dict(answer.memory_budgets) or None,
                "gap": answer.gap,
                "found_in": answer.took,
                "why not": ", ".join(f"{limit} +{by:.3g}" for limit, by in over.items()) or None,
            }
        )
        print(self.rows[-1], flush=True)
        return None if over else answer

    def compare(self) -> list[Row]:
        problem = self.models.problem(self.fleet, free=False)
        free = self.models.problem(self.fleet, free=True)

        def joint(problem: Problem) -> JointBatches:
            return JointBatches(
                lambda name, n: self.models.resized(problem.classes[name], n), budgets=BUDGETS
            )

        gains: dict[str, Any] = self.named | {"plan": "gains"}
        uniform = None
        for position in range(1, max(len(formats(name)) for name in self.fleet.inference)):
            if uniform is None:
                uniform = self.solve("uniform", UniformByDevice(position), problem)
        if uniform is not None:
            timed = replace(problem, seconds=uniform.evaluation.seconds)
            qsync = self.solve("qsync", get_allocator("milp"), timed)
            dynamic = self.solve(
                "dynamic-batches",
                DynamicBatches(lambda name, n: self.models.resized(problem.classes[name], n)),
                problem,
            )
            checkpointing = self.solve("checkpointing", Checkpointing(), problem)
            same_time = self.solve("joint at its time", joint(problem), timed)
            if qsync is not None:
                limit = qsync.evaluation.variance
                fastest = replace(problem, least="seconds", variance=limit)
                faster = self.solve("joint at its variance", joint(problem), fastest)
                compared = (uniform, qsync, dynamic, checkpointing)
                single = [item for item in compared if item is not None]
                best = max(throughput(p) for p in single if p.evaluation.variance <= limit)
                if faster is not None:
                    gains["speed"] = throughput(faster) / best
                if same_time is not None and limit:
                    gains["variance"] = same_time.evaluation.variance / limit
        everywhere = self.solve("free uniform", UniformByDevice(1), free)
        if everywhere is not None:
            fastest = replace(free, least="seconds", variance=everywhere.evaluation.variance)
            answer = self.solve("free joint", joint(free), fastest)
            if answer is not None:
                gains["free speed"] = throughput(answer) / throughput(everywhere)
        return [*self.rows, gains]


def main() -> None:
    options = arguments(
        __doc__,
        only={"help": "models whose names begin so", "default": None},
        folder=FOLDER_OPTION,
    )
    rows: list[Row] = []
    cases = selected(options, by_size(options.quick, {"bert": QUICK["bert"]}, CASES))
    for name, case in cases.items():
        sensitivities = {
            target: trained_sensitivity(name, case, target, options) for target in TARGETS
        }
        models = Models(case, sensitivities)
        for fleet in by_size(options.quick, ["V100 + T4"], [*FLEETS]):
            began = time.perf_counter()
            rows += Comparison(models, name, fleet).compare()
            print(f"{name}: {fleet} in {time.perf_counter() - began:.0f} s", flush=True)
            if options.json:
                write_cases(options.json, rows, quick=options.quick, by="model")
    finish(options, rows, by="model")


if __name__ == "__main__":
    main()
