"""Observation of a user's training step, and the plans under which its model is measured.

An operator's time depends on its state and on the formats of its neighbours. So products run in
each format combined with each float format of the other operators.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from qsync_fx.diagnostics.explain_model import explain
from qsync_fx.diagnostics.explanation import Explanation
from qsync_fx.errors import ProfileError
from qsync_fx.formats import Precision
from qsync_fx.graph.fx_utils import describe
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.ops.spec import Kind
from qsync_fx.options import Options
from qsync_fx.passes.cached_plan import Fingerprint, fingerprint
from qsync_fx.plan.plan import Plan
from qsync_fx.predictor.memory.peak_memory import LossMemory
from qsync_fx.profiler.profile import Model
from qsync_fx.profiler.timing.measured_memory import loss_in_step
from qsync_fx.profiler.timing.step_timers import StepSeconds, TrainingStep, checking
from qsync_fx.torch_internals import dynamo_config, tree_map_only


@dataclass(frozen=True)
class ObservedStep:
    """Results of running a step as written; the explanation is without a plan."""

    explanation: Explanation
    model: Model
    fingerprint: Fingerprint
    seconds: StepSeconds
    loss: LossMemory | None


def observed(
    module: nn.Module, training: TrainingStep, options: Mapping[str, object]
) -> ObservedStep:
    """Run a step twice, explain the model with its first inputs, and measure the loss's memory.

    The second step is timed, since the first one allocates and initializes.

    Raises:
        ProfileError: the step does not call the model, or returns no loss of it.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    results: list[Any] = []
    before = module.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    behind = module.register_forward_hook(lambda _, args, result: results.append(_alone(result)))
    try:
        replace(training, step=checking(training.step, module)).run(module)
    finally:
        before.remove()
        behind.remove()
    if not calls:
        raise ProfileError(
            f"the step did not call the model, a {type(module).__name__}",
            where="step",
            do="let step(model, batch) call the model it is given and return the loss",
        )
    seconds = training.run(module)
    loss = None
    # The results of several calls are live together, which a model graph does not describe.
    if len(results) == 1:
        loss = loss_in_step(training.step, module, training.batch, results[0])
    results.clear()
    args, kwargs = calls[0]
    # A profile has fixed sizes, but Dynamo makes sizes symbolic after they change.
    with dynamo_config.patch(automatic_dynamic_shapes=False):
        # The explanation must not depend on a plan that is cached for the model.
        explanation = explain(
            module, *args, options=replace(Options.parse(options), cached_plan=False), **kwargs
        )
    if not explanation.operators:
        raise ProfileError(
            "Dynamo compiled no part of the model, so there is nothing to measure",
            where="; ".join(explanation.breaks) or type(module).__name__,
            do="remove the graph break; qsync_fx.explain lists them",
        )
    written = [op for part in explanation.graphs for op in part.written.operators()]
    identity = fingerprint(module, written, Options.parse(options))
    model = model_of(module, explanation, options)
    return ObservedStep(explanation, model, identity, seconds, loss)


def model_of(module: nn.Module, explanation: Explanation, options: Mapping[str, object]) -> Model:
    lines = [f"{op.id} {describe(op.graph.value(op.node))}" for op in explanation.operators]
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lines += [f"{name} {describe(tensor)}" for name, tensor in tensors]
    evaluated = [f"{name} evaluates" for name, part in module.named_modules() if not part.training]
    requested = Options.parse(options).non_default_options
    text = "\n".join([*lines, *evaluated, *filter(None, [requested])])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return Model(type(module).__name__, digest, parameters, requested, len(evaluated))


def _alone(returned: Any) -> Any:
    """Return a model's output detached from its graph; repeated tensors stay shared."""
    result: dict[int, Tensor] = {}

    def detached(tensor: Tensor) -> Tensor:
        return result.setdefault(id(tensor), tensor.detach().requires_grad_(tensor.requires_grad))

    return tree_map_only(Tensor, detached, returned)


States = tuple[tuple[str, OperandState], ...]


def profile_plans(
    explanation: Explanation, precisions: Sequence[Precision]
) -> dict[str, tuple[Plan, States]]:
    """Return the plans to measure, by label, with the resulting states of the operators."""
    result: dict[str, tuple[Plan, States]] = {}
    for fmt in precisions:
        add(result, str(fmt), Plan.uniform(fmt), explanation)
    adjustable = [op for op in explanation.operators if op.kind is Kind.ADJUSTABLE]
    chosen = [op.id for op in adjustable]
    multiplying = [op.id for op in adjustable if op.row is not None and op.row.products]
    for products in precisions:
        # Scaled formats serve products only, so other operators run in a float format.
        for others in [fmt for fmt in precisions if not fmt.scaled] or [products]:
            formats = dict.fromkeys(chosen, others) | dict.fromkeys(multiplying, products)
            plan = Plan(operators=formats)
            add(result, f"{products} products, {others} else", plan, explanation)
    return result


def add(
    result: dict[str, tuple[Plan, States]], label: str, plan: Plan, explanation: Explanation
) -> None:
    """Add a plan unless an existing one puts all operators into the same states."""
    states = tuple(
        (str(op.id), OperandState.of(op.note)) for op in explanation.replanned(plan).operators
    )
    if states not in [entry for _, entry in result.values()]:
        result[label] = plan, states
