"""The torch.compile backend "qsync": from a Dynamo graph to mixed-precision compiled code.

`entry.qsync` is the backend function and `compile.compile_graph` its implementation; start reading
there. `dynamo_hooks` observes Dynamo, `weight_cache` and `numeric_guards` support training.
`operators` defines the `qsync::` operators, `numerics` their rounding, `cuda` their kernels, and
`inductor` configures the inner compiler.
"""
