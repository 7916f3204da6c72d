"""Replayer: timeline of a training step on all devices of a cluster, from their schedules (QSync).

`cluster_step.simulate` computes the step; start there. `device_timeline` has the closed forms,
which equal an event simulation for any number of devices, `collectives` gradient buckets and
all-reduces, and `cluster` devices and links. `trace_files` and `trace_schedules` read traces of
torch.profiler, which may come from any source.
"""
