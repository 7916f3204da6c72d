"""Kernels and training steps on an NVIDIA GPU; `make bench-gpu` tunes them and runs most."""
