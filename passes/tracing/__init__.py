"""Tracing: from Dynamo's graph to normalized ATen operators with ids.

The pass `normalize` retraces the graph (`retrace`), removes needless writes (`graph_cleanup`), and
assigns ids (`operator_ids`) from the graph's position in the model (`dynamo_frames`).
"""
