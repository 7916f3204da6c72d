"""The allocator of QSync, as its section V has it: from the fastest plan that fits into memory, operators get wider formats again.

`units` is what is decided together, `blocks` the parts of a model that are searched alone, `initial` the fastest plan of each, `recovery`
the heaps of operators to be widened, and `greedy` the allocator.
"""

from qsync_fx.allocator.paper.greedy import Greedy

__all__ = ["Greedy"]
