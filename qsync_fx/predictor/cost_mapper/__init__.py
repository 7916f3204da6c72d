"""From a plan to states, casts and seconds: what a `ModelGraph` and the `Times` of a device make of it."""

from qsync_fx.predictor.cost_mapper.cost_cache import scheduled
from qsync_fx.predictor.cost_mapper.cost_mapper import CostMapper, Totals
from qsync_fx.predictor.cost_mapper.plan_states import PlannedCast, States, states

__all__ = ["CostMapper", "PlannedCast", "States", "Totals", "scheduled", "states"]
