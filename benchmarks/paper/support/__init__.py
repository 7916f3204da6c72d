"""Modules shared by the experiments: data, networks, simulated ranks, run cache, figures."""
