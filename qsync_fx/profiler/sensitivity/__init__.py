"""What a model's tensors say of its sensitivity: runs it in FP32 and looks at each operator on the way.

`measured` runs it; indicators/ are the methods, tensors/ what they look at.

Invariant: a run trains nothing and leaves no trace: see `tensors.undisturbed`. Operators are known by the ids of plans, whatever the model.

The ways to find a sensitivity; `methods` lists them.

What methods look at: runs that can be repeated and changed, the tensors that operators round, and the gates that noise flips.
"""
