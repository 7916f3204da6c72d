"""Measures a model on the device at hand: times of operators in context, memory, and the statistics that sensitivity is reckoned from.

`measurement` takes a profile, with what measuring/ sees of each step; statistics/ is what a sensitivity is reckoned from.

Invariant: measuring trains nothing: parameters, buffers and random number generators are as before afterwards.
"""
