"""Coverage of a plan: modules in compiled graphs, modules that run uncompiled, and the causes.

Dynamo decides frame by frame which code it compiles and which it leaves to Python.
`compilation_log` records its decisions and maps them to modules, `findings` explains them and
compares them with a plan, and `first_step_check` reports them after the first step. Start with
`findings.findings`.
"""
