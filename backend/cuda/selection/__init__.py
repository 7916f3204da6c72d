"""Kernel selection: valid configurations, candidates, and the decision for a kernel or torch.

`select.decide` chooses for a problem, and `select.of_problems` lists the kernels to compile ahead
of time; start reading there. `candidates` lists the configurations for a problem, built in or added
by users, and `constraints` defines the valid ones and the problems that they serve. `estimate`
predicts the times of layers that were not measured.
"""
