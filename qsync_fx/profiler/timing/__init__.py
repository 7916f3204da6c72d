"""Time and memory of training steps on the device: start with `step_timers.TrainingStep`."""
