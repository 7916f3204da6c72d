"""Operators that multiply tensors: products, convolutions, attention, and what is built of them."""
