"""Plan search of the demo's ranks, and the predictions for both trainings.

Invariant: predictions use only the profiles that the ranks measure before the trainings start.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import Connection

import data
import torch
import torch.distributed as dist
from messages import FORMATS, KNOBS, ROLES, RUNS, Choice, Job, Phase, PlanMessage, Prediction
from training import Batch, batches, fresh, step_of

import qsync_fx
from qsync_fx.allocator.baselines import DynamicBatches, SizedProblems
from qsync_fx.allocator.evaluator import PlanEvaluator, evaluate_plan
from qsync_fx.allocator.plan_result import PlanResult
from qsync_fx.allocator.problem_builder import class_at_batch
from qsync_fx.distributed.fleet_plan import PlanSurvey
from qsync_fx.plan.cluster_plan import read_plan
from qsync_fx.predictor.cost_mapper import states
from qsync_fx.predictor.memory import TrainingMemory, peak_bytes
from qsync_fx.profiler.model_graph_builder import build_model_graph
from qsync_fx.profiler.timing.measured_memory import optimizer_memory
from qsync_fx.timeline.timeline import Timeline

_SEEN = 4
"""Number of batches that the sensitivities are averaged over."""
_REPLANS = 2
"""Maximum rounds of running the plan and solving again; a round takes about 20 s."""
_MEASURING, _LEAST_ROUNDS = 1.5, 3
"""Seconds that the measurement of a plan should take without compilation, and its fewest rounds."""


def uniform() -> qsync_fx.ClusterPlan:
    """Return the baseline plan: the inference rank in its narrowest format."""
    lowest = [qsync_fx.Plan.uniform(formats[-1]) for formats in FORMATS]
    return qsync_fx.ClusterPlan(dict(zip(ROLES, lowest, strict=True)), ranks=ROLES)


def load_plan(job: Job) -> qsync_fx.ClusterPlan:
    """Return the plan that the user provided, which may cover only the inference rank."""
    assert job.plan_path is not None
    plan = read_plan(job.plan_path)
    if isinstance(plan, qsync_fx.Plan):
        plan = qsync_fx.ClusterPlan({ROLES[0]: qsync_fx.Plan.uniform("fp32"), ROLES[1]: plan})
    return plan.for_ranks(ROLES)


def find_plan(job: Job, images: data.Data, pipe: Connection) -> qsync_fx.ClusterPlan:
    """Measure, and return the plan for both ranks; rank 0 reports it to the launcher."""
    model, optimizer = fresh(job, images)
    step, steps = step_of(images), 0

    def counted(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        nonlocal steps
        steps += 1
        pipe.send(Phase("measuring", steps))
        return step(model, batch)

    memory = _default_memory(job, images) if job.memory is None else job.memory
    batch = job.batches[job.rank]
    plan = qsync_fx.distributed.measure_and_plan(
        model,
        counted,
        list(islice(batches(job, images, 0), _SEEN)),
        optimizer=optimizer,
        device_class=job.role,
        memory={ROLES[1]: memory},
        precisions=FORMATS[job.rank],
        repeats=_rounds(job, images),
        max_replans=_REPLANS,
        save=job.plan,
        batch="global" if job.joint else None,
        batch_sizes=(batch // 2, batch * 3 // 2) if job.joint else (),
        progress=False,
    )
    print(f"measured in {steps} steps")
    if plan.answer is not None and plan.survey is not None:
        for role, profile in plan.survey.profiles.items():
            profile.save(job.profile(role))
        uniform = _uniform(plan.answer, plan.survey, job)
        predicted = {}
        for name, result in zip(RUNS, (uniform, plan.answer), strict=True):
            _timeline(result).save_perfetto(job.timeline(name))
            predicted[name] = _predicted(result)
        qsync_fx.save_report(
            job.output / "report.html",
            plan.answer,
            plan.survey.profiles,
            {"uniform low precision": _timeline(uniform)},
            title="qsync_fx demo: a training and an inference device",
        )
        knobs = {}
        if job.joint:
            knobs = _knobs(job, uniform, plan.answer, plan.survey)
        pipe.send(PlanMessage(plan.answer.text(job.width), memory, predicted, knobs))
    return plan


def _rounds(job: Job, images: data.Data) -> int:
    """Return the runs of each plan in the profile, the same on both ranks.

    There are fewer if steps are slow, and half as many if two batch sizes are measured.
    """
    model, _ = fresh(job, images)
    step, batch, seconds = step_of(images), next(batches(job, images, 0)), 0.0
    for _ in range(2):  # the second step has no warm-up
        began = time.perf_counter()
        step(model, batch).backward()  # type: ignore[no-untyped-call]
        seconds = time.perf_counter() - began
    slowest = torch.tensor(seconds)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    rounds = min(job.rounds, round(_MEASURING / slowest.item()) // (2 if job.joint else 1))
    return max(min(job.rounds, _LEAST_ROUNDS), rounds)


def _uniform(answer: PlanResult, survey: PlanSurvey, job: Job) -> PlanResult:
    """Return the result for uniform low precision with the given batches."""
    problem = replace(answer.problem, seconds=None)
    if job.joint:
        resized = class_at_batch(problem.classes, survey.profiles)
        batches_by_role = dict(zip(ROLES, job.batches, strict=True))
        problem = SizedProblems(problem, resized).problem(batches_by_role)
    plans = problem.uniform()
    return replace(answer, problem=problem, plans=plans, evaluation=evaluate_plan(problem, plans))


def _knobs(
    job: Job, uniform: PlanResult, answer: PlanResult, survey: PlanSurvey
) -> dict[str, Choice | None]:
    """Return the best plan with each knob; None if no plan fits into memory."""
    batches_by_role = dict(zip(ROLES, job.batches, strict=True))
    resized = class_at_batch(answer.problem.classes, survey.profiles)
    formats = None
    with contextlib.suppress(qsync_fx.PlanError):
        profiles = {
            role: item.at_batch(batches_by_role[role]) for role, item in survey.profiles.items()
        }
        same = replace(survey, profiles=profiles, batches=batches_by_role, sizing={}, joint=None)
        formats = replace(same.answer(), batches=batches_by_role)
    balanced: PlanResult | None = DynamicBatches(resized).allocate(uniform.problem)
    if balanced is not None and not balanced.fits:
        balanced = None
    results = replace(uniform, batches=batches_by_role), formats, balanced, answer
    return {
        name: None
        if result is None
        else (_predicted(result), tuple(result.batches[role] for role in ROLES))
        for name, result in zip(KNOBS, results, strict=True)
    }


def _default_memory(job: Job, images: data.Data) -> float:
    """Return the mean of the inference rank's peaks in FP32 and in its narrowest format, in bytes.

    Some operators fit into this memory in FP32, but not all of them.
    """
    model, optimizer = fresh(job, images)
    x, _ = next(batches(replace(job, rank=1), images, 0))
    graph = build_model_graph(qsync_fx.explain(model, images.normalized(x)), FORMATS[1])
    memory = TrainingMemory(optimizer_memory(optimizer), buckets=True)
    plans = [qsync_fx.Plan.uniform(name) for name in ("fp32", FORMATS[1][-1])]
    return statistics.mean(peak_bytes(states(graph, plan), memory) for plan in plans)


def _timeline(result: PlanResult) -> Timeline:
    return PlanEvaluator(result.problem, result.plans).timeline


def _predicted(result: PlanResult) -> Prediction:
    """Return the prediction of a plan."""
    ranks = [result.evaluation.classes[role] for role in ROLES]
    return Prediction(
        result.evaluation.seconds,
        tuple(rank.computing for rank in ranks),
        tuple(rank.waiting + rank.sending for rank in ranks),
        tuple(rank.peak_bytes or 0 for rank in ranks),
        result.evaluation.variance,
    )
