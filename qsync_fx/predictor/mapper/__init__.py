"""From a plan to states, casts and seconds: what a `ModelGraph` and the `Times` of a device make of it."""

from qsync_fx.predictor.mapper.states import Cast, States, states

__all__ = ["Cast", "States", "states"]
