"""Profiler: operator times, peak memory and sensitivity statistics of a model on a device.

`measurement.measure` returns a `profile.Profile`.
"""
