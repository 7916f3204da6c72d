"""Kernel selection: valid configurations, candidates, and the decision for a kernel or torch.

`select.decide` chooses for a problem, and `select.of_problems` lists the kernels to compile ahead
of time; start reading there. `candidates` lists the configurations for a problem, built in or added
by users. `constraints` defines the valid configurations and the problems that they serve.
"""
