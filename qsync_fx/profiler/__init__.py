"""Profiler: operator times, peak memory and sensitivity statistics of a model on a device.

Start with `measurement.measure`, which returns a `profile.Profile`; `analytic_profile` computes one
for a device of the catalog. `timing` times steps, `tensor_capture` records tensors and gradients,
`sensitivity` computes the indicator's inputs, and `links` measures collectives and codecs.
`model_graph_builder` builds the predictor's `ModelGraph`.

Invariant: profiling restores parameters, buffers and random number generators.
"""
