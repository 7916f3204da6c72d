"""Training steps as torch's profilers saw them: Kineto's traces of what ran when, and execution traces of what belongs to what.

`file` reads the JSON, `kineto` the events, `execution` the graph, `traced` makes schedules of steps, `ranks` puts those of several ranks
together.

Invariant: a trace comes from anywhere. What is cut off, runs backwards or in a circle is an error that names it.
"""
