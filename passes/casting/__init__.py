"""Casts: how they are made and shared, the seed that their roundings draw from, and what leaves the graph."""
