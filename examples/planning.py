"""Plan search of the demo's ranks, and the predictions for both trainings.

Invariant: predictions use only the profiles that the ranks measure before the trainings start.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path

import data
import torch
from messages import FORMATS, ROLES, RUNS, Job, Phase, PlanMessage, Prediction
from training import Batch, batches, fresh, step_of

import qsync_fx
from qsync_fx.allocator.evaluator import PlanEvaluator
from qsync_fx.plan.cluster_plan import read_plan
from qsync_fx.predictor.cost_mapper import states
from qsync_fx.predictor.memory import TrainingMemory, peak_bytes
from qsync_fx.profiler.model_graph_builder import build_model_graph
from qsync_fx.profiler.timing.measured_memory import optimizer_memory

_SEEN = 4
"""Number of batches that the sensitivities are averaged over."""
_REPLANS = 2
"""Maximum rounds of running the plan and solving again; a round takes about 20 s."""


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
    step, steps = step_of(job, images), 0

    def counted(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        nonlocal steps
        steps += 1
        pipe.send(Phase("measuring", steps))
        return step(model, batch)

    memory = _default_memory(job, images) if job.memory is None else job.memory
    plan = qsync_fx.distributed.measure_and_plan(
        model,
        counted,
        list(islice(batches(job, images, 0), _SEEN)),
        optimizer=optimizer,
        device_class=job.role,
        memory={ROLES[1]: memory},
        precisions=FORMATS[job.rank],
        repeats=job.rounds,
        max_replans=_REPLANS,
        save=job.plan,
        progress=False,
    )
    print(f"measured in {steps} steps")
    if plan.answer is not None and plan.survey is not None:
        for role, profile in plan.survey.profiles.items():
            profile.save(job.profile(role))
        problem = plan.answer.problem
        runs = dict(zip(RUNS, (problem.uniform(), plan.answer.plans), strict=True))
        foreseen = {
            name: _foreseen(PlanEvaluator(problem, plans), job.timeline(name))
            for name, plans in runs.items()
        }
        baseline = PlanEvaluator(problem, runs[RUNS[0]]).timeline
        qsync_fx.save_report(
            job.output / "report.html",
            plan.answer,
            plan.survey.profiles,
            {"uniform low precision": baseline},
            title="qsync_fx demo: a training and an inference device",
        )
        pipe.send(PlanMessage(plan.answer.text(job.width), memory, foreseen))
    return plan


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


def _foreseen(judge: PlanEvaluator, timeline: Path) -> Prediction:
    """Return the prediction of a training, and write its timeline."""
    judge.timeline.save_perfetto(timeline)
    judged = judge.evaluate()
    ranks = [judged.classes[role] for role in ROLES]
    return Prediction(
        judged.seconds,
        tuple(rank.computing for rank in ranks),
        tuple(rank.waiting + rank.sending for rank in ranks),
        tuple(rank.peak_bytes or 0 for rank in ranks),
        judged.variance,
    )
