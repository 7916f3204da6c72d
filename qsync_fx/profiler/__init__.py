"""Profiler: operator times, peak memory and sensitivity statistics of a model on a device.

Start with `measurement.measure`, which returns a `profile.Profile`. `timing` times steps,
`sensitivity` computes the indicator's inputs, and `links` measures collectives and codecs.
"""
