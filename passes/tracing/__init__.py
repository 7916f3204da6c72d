"""From what Dynamo wrote to ATen operators with ids: what `normalize` does, step by step.

`frames` and `roots` say where in the user's model a graph stands, `identity` gives operators their ids, and `in_force` tells the modes
that nodes run in.
"""
