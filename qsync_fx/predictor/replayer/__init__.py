"""Replayer: timeline of a training step on all devices of a cluster, from their schedules (QSync).

It computes when operators run, when DDP's gradient buckets are ready and travel, and how long ranks
wait for each other. `ddp_buckets` assigns gradients to buckets, `device_timeline` and
`cluster_step.simulate` compute the step, `collectives` models all-reduces, and `cluster` describes
devices and links. `trace_files` and `trace_schedules` read torch.profiler traces, which may come
from any source; a truncated or cyclic trace raises an error that names the cause.
Invariant: closed forms over any number of devices and plans, equal to an event simulation (tested).
"""
