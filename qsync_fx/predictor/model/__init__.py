"""What states, casts, costs and memory of any plan follow from, as a value: `ModelGraph`, made by `model_graph` from an explanation."""

from qsync_fx.predictor.model.build import model_graph
from qsync_fx.predictor.model.value import ModelGraph

__all__ = ["ModelGraph", "model_graph"]
