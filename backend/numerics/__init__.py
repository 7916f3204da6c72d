"""Arithmetic without operators: what rounding means (`reference`, `philox`), and the native kernels that do it faster (`native`)."""
