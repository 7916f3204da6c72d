"""Modules shared by all benchmarks: arguments, timing, rows and models."""
