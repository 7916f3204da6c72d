"""Operators that compute new values element by element, or sum up along a dimension: activations, norms, reductions, losses."""
