"""Inductor integration: settings, decompositions, lowerings and graph passes.

They replace Inductor defaults that are slow or save many bytes for backward. Results do not change,
except for the order of sums and the values that another dropout drops. Start at
`inductor_config.py`.
"""
