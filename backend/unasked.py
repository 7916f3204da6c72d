"""Plans that nobody asked for: what a cached profile has for a model, found, put into the pipeline and told.

Invariant: a plan is in force only for models for which neither a plan nor a precision was asked, which includes autocast around the model.
What is taken is told once for each model, and why nothing is, once for each reason.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence

import torch

from qsync_fx.cached.candidates import SWITCH, Candidates, candidates_for
from qsync_fx.coverage.log import log_of
from qsync_fx.errors import PlanWarning
from qsync_fx.graph import PrecisionGraph
from qsync_fx.options import Options
from qsync_fx.passes.assign import Assign
from qsync_fx.passes.base import Pass
from qsync_fx.passes.cached_plan import CachedPlan
from qsync_fx.passes.tracing.frames import Place
from qsync_fx.plan.plan import CACHED

_LOG = logging.getLogger("qsync_fx")


def candidates(here: Place, options: Options, device: torch.device) -> Candidates | None:
    """Returns the plans that a graph may get without having asked; None where there are none."""
    if here.root is None:
        return None
    found = candidates_for(here.root, options, log_of(options).unasked.get(here.root))
    # A device that qsync_fx does not run on, which torch may not know autocast for, is told by others.
    return None if found is None or torch.is_autocast_enabled(device.type) else found


def with_cached_plan(passes: Sequence[Pass], found: Candidates | None, tell: Callable[[str], None]) -> tuple[Pass, ...]:
    """Returns the passes with the one that takes a plan, where there are any; `tell` is told why none is taken."""
    if found is None:
        return tuple(passes)
    at = next(at for at, step in enumerate(passes) if isinstance(step, Assign))
    return (*passes[:at], CachedPlan(found, tell), *passes[at:])


def note_unasked(graph: PrecisionGraph, here: Place, options: Options) -> None:
    """Notes down the plan that a graph has got without having asked, and says so of the model's first one."""
    plan = graph.context.options.plan
    if not options.automatic or plan is None or here.root is None:
        return
    log = log_of(options)
    if log.unasked.get(here.root) != plan:
        log.unasked[here.root] = plan
        _LOG.warning("%s: %s", type(here.root).__name__, plan.notes[CACHED])


def tell_of_a_stale_profile(why: str, here: Place, options: Options) -> None:
    """Says once that a profile is there and is not taken."""
    log, name = log_of(options), type(here.root).__name__
    if here.root is None or not here.root.training or name in log.stale:
        return
    log.stale.add(name)
    text = (
        f"a profile of {name} is in the cache, but {why}. So it trains as if there were none; measure it again "
        f"(qsync_fx.measure(...).save()), or switch cached plans off: the option cached_plan=False, or {SWITCH}=0."
    )
    warnings.warn(text, PlanWarning, stacklevel=2)
