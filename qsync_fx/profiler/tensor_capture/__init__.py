"""Capture of a running model's tensors, for the sensitivity methods.

Start with `graph_capture.Captured`, which runs a model's graphs with an interchangeable runner.
"""
