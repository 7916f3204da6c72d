"""Model graph: the model as the predictor and the allocator read it, without torch's FX graph.

A `ModelGraph` determines states, casts, costs and memory under any plan. `model_file` stores it as
JSON, and `symbolic_sizes` handles symbolic sizes such as the batch. Start with `model_graph`.
"""

from qsync_fx.predictor.model.model_graph import ModelGraph

__all__ = ["ModelGraph"]
