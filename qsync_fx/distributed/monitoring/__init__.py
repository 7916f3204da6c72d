"""Monitoring of devices and links during training.

`Pace` and `drift` (drift.py) compare compute time and memory with the plan, `ProbedLinks`
(link_probe.py) measures all-reduces between steps, and `PeakCheck` (memory_use.py) measures peak
memory. `qsync_fx.distributed.replan` decides on another plan from them.
"""
