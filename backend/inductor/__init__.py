"""Inductor integration: settings, decompositions, lowerings and graph passes.

They replace Inductor defaults that are slow or save many bytes for backward.
`inductor_config.inductor` returns the settings and `decompositions.for_inductor` the table of
decompositions; `layouts` and `recompute_policy` contain the graph passes.

Invariant: precisions do not change, nor do results, except for the order of sums and the values
that another dropout drops. Start at `inductor_config.py`.
"""
