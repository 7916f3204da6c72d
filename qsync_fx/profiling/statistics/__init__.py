"""What a model's tensors say of its sensitivity: runs it in FP32 and looks at each operator on the way.

Invariant: a run trains nothing and leaves no trace: see `undisturbed`. Operators are known by the ids of plans, whatever the model.
"""
