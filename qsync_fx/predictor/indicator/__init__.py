"""How much variance an operator in a precision adds to the gradients: formulas of tensors, and the value that holds what they give.

Invariant: pure functions. Each formula says of what it is the expectation, and a Monte Carlo test holds it to that.
"""
