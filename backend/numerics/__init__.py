"""Rounding arithmetic: the definition in torch (`reference`, `philox`) and kernels (`native`)."""
