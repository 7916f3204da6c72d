"""Operators whose results hold the values that they are given, or constants: views, lookups, conversions, writes."""
