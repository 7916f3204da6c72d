"""Kernel selection: valid configurations, candidates, and the decision for a kernel or torch.

`select.decide` chooses for a problem; start reading there. `candidates` lists the configurations
for a problem, built in (`candidate_tables`) or added by users, and the kernels to
compile ahead of time. `constraints` defines the valid configurations.
"""
