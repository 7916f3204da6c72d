"""When each device of a cluster does what in a training step: operators, gradients as DDP sends them, and who waits for whom.

`buckets` says which gradients travel together, `local` when they are ready on one device, `step` when they travel, `cluster` what devices
and links there are, `traces` reads what torch's profilers wrote.

Invariant: pure functions of schedules. A closed form in place of a simulation, over any number of devices and plans at once; the tests
hold that it equals a simulation of events.

Training steps as torch's profilers saw them: Kineto's traces of what ran when, and execution traces of what belongs to what.

`file` reads the JSON, `kineto` the events, `execution` the graph, `traced` makes schedules of steps, `ranks` puts those of several ranks
together.

Invariant: a trace comes from anywhere. What is cut off, runs backwards or in a circle is an error that names it.
"""
