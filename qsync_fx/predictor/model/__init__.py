"""What states, casts, costs and memory of any plan follow from, as a value: `ModelGraph`, made by `model_graph` from an explanation."""

from qsync_fx.predictor.model.builder import build_model_graph
from qsync_fx.predictor.model.model_graph import ModelGraph

__all__ = ["ModelGraph", "build_model_graph"]
