"""The model graph: a value from which states, casts, costs and memory of any plan follow."""

from qsync_fx.predictor.model.model_graph import ModelGraph

__all__ = ["ModelGraph"]
