"""Passes of users: what they have done to a graph is noticed, spelled as the model is, and becomes part of it."""
