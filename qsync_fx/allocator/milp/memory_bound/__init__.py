"""Lower bounds on the peak memory of a step over all plans, as linear expressions of states.

`MemoryLowerBound` combines the bounds of all moments: `saved_bound` at the start of the backward
pass, `forward_peaks` at the end of the forward pass, and `backward_peaks` at the gradients of
products, with the live sets of `unread_values`. Start reading at `lower_bound`, then `saved_bound`.

Invariant: with integer choices, no expression exceeds the evaluator's memory of the plan.
"""

from qsync_fx.allocator.milp.memory_bound.lower_bound import LowerBoundTerm, MemoryLowerBound

__all__ = ["LowerBoundTerm", "MemoryLowerBound"]
