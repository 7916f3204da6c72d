"""What a step of a class of devices holds at least, under any plan, as linear expressions of states.

`kept` is what the backward pass is bound to read, at its begin, `during` what is held while gradients of products and poolings are
computed, `waiting` what has yet to be read then, `norming` what norms have written of gradients, `returning` what is held while the model's
result is computed, `feeding` what is written for its last product, and `certain` all of it.

Invariant: at whole choices no expression is above what the judge says of that plan.

From how many buffers gradients are computed, at least and at most, under any plan: a compiler writes down what comes from too many.
"""

from qsync_fx.allocator.milp.memory_bound.lower_bound import LowerBoundTerm, MemoryLowerBound

__all__ = ["LowerBoundTerm", "MemoryLowerBound"]
