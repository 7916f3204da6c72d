"""Kernels and steps on an NVIDIA GPU; `make bench-gpu` runs them all."""
