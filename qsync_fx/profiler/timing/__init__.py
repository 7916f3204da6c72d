"""Timing and memory measurement of training steps on the device.

Start with `step_timers.TrainingStep`: `step_timers` checks, compiles and times steps and the lines
of Inductor's wrappers. `inductor_lines` attributes the times of lines to operators, and
`measured_memory` measures the memory of steps, losses and optimizers.
"""
