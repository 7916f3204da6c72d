"""What a user's step gives its model, and what the backend makes of that model: found by running the step once, as written."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._dynamo.config
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from qsync_fx.cached.fingerprint import Fingerprint, fingerprint
from qsync_fx.errors import ProfileError
from qsync_fx.explanation import Explanation, explain
from qsync_fx.explanation.replan import WRITTEN
from qsync_fx.graph.values import describe
from qsync_fx.options import Options
from qsync_fx.predictor.memory import LossMemory
from qsync_fx.profiling.measuring.first_step import checking
from qsync_fx.profiling.measuring.losses import loss_in_step
from qsync_fx.profiling.measuring.steps import StepSeconds, Training
from qsync_fx.profiling.profile import Model


@dataclass(frozen=True)
class Observed:
    """
    Attributes:
        explanation: what the backend does to the model, with no plan.
        model: which model that is.
        fingerprint: by which its graphs are known for its.
        seconds: how long the step took as written.
        loss: what its loss takes; None where that could not be found out.
    """

    explanation: Explanation
    model: Model
    fingerprint: Fingerprint
    seconds: StepSeconds
    loss: LossMemory | None


def observed(module: nn.Module, training: Training, options: Mapping[str, object]) -> Observed:
    """Runs a step twice, and explains the model with the inputs that it was called with first; then its loss, without the model.

    The second step is the one that is timed: the first one makes what all others find there.

    Raises:
        ProfileError: the step does not train the model: it does not call it, returns no loss or one that is no number, or differentiates
            that itself.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    results: list[Any] = []
    before = module.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
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
            do="write step(model, batch) so that it calls the model it is given and returns the loss",
        )
    seconds = training.run(module)
    # A model that is called several times has its results beside one another, of which a model graph does not tell.
    loss = loss_in_step(training.step, module, training.batch, results[0]) if len(results) == 1 else None
    results.clear()
    args, kwargs = calls[0]
    # Dynamo makes sizes symbolic that it has seen to change, and what is measured is of one size.
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        # What a profile of the model has found before is nothing to what it is.
        explanation = explain(module, *args, options=replace(Options.parse(options), cached_plan=False), **kwargs)
    if not explanation.operators:
        raise ProfileError(
            "Dynamo compiled no part of the model, so there is nothing to measure",
            where="; ".join(explanation.breaks) or type(module).__name__,
            do="remove the graph break; qsync_fx.explain says more",
        )
    written = [op for part in explanation.graphs for op in part.snapshots.graphs[WRITTEN].operators()]
    found = fingerprint(module, written, Options.parse(options))
    return Observed(explanation, model_of(module, explanation, options), found, seconds, loss)


def model_of(module: nn.Module, explanation: Explanation, options: Mapping[str, object]) -> Model:
    """Returns what tells a model in its mode, with inputs of these shapes and under these options, from others."""
    lines = [f"{op.id} {describe(op.graph.value(op.node))}" for op in explanation.operators]
    lines += [f"{name} {describe(tensor)}" for name, tensor in _tensors(module).items()]
    evaluated = [f"{name} evaluates" for name, part in module.named_modules() if not part.training]
    asked = Options.parse(options).beside_plan
    digest = hashlib.sha256("\n".join([*lines, *evaluated, *filter(None, [asked])]).encode()).hexdigest()[:16]
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return Model(type(module).__name__, digest, parameters, asked, len(evaluated))


def _alone(returned: Any) -> Any:
    """Returns what a model returned, without what it was computed from; what is one tensor stays one."""
    found: dict[int, Tensor] = {}

    def detached(tensor: Tensor) -> Tensor:
        return found.setdefault(id(tensor), tensor.detach().requires_grad_(tensor.requires_grad))

    return tree_map_only(Tensor, detached, returned)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
