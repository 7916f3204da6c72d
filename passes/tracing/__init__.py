"""Tracing: from Dynamo's graph to normalized ATen operators with ids.

`retrace` traces the graph again at the pre-dispatch level, `graph_cleanup` removes needless writes
and conversions, `dynamo_frames` finds the position of a graph in the user's model, and
`operator_ids` assigns ids. The pass `normalize` calls them; start there.
"""
