"""What Dynamo makes of a model around the backend: which frames it compiles, passes over or fails at, and whose code it uses again.

Invariant: nothing here changes a graph; what keeps a plan from being followed is told.
"""
