"""Timing and memory measurement of training steps on the device.

`step_timers` times steps and the lines of Inductor's wrappers, `inductor_lines` maps lines to graph
nodes, and `attribution` maps their times to operators. `measured_memory` measures peak memory, and
`step_validation` checks and compiles the user's step. Start with `step_timers.TrainingStep`.
"""
