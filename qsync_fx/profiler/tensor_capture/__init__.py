"""Tensors of a running model, as measured indicators read them."""
