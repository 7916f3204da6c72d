"""Cost mapper: operator states, casts and compute time of a model under a plan (QSync).

`CostMapper` follows the changes of a plan operator by operator. `states` maps a full plan to
operator states and casts (`States`), and `scheduled` maps them to the `Schedule` for the replayer.
The inputs are a `ModelGraph` and the `Times` of a device. Start with `plan_states`.
"""

from qsync_fx.predictor.cost_mapper.cost_mapper import CostMapper, Totals, scheduled
from qsync_fx.predictor.cost_mapper.plan_states import PlannedCast, States, states

__all__ = ["CostMapper", "PlannedCast", "States", "Totals", "scheduled", "states"]
