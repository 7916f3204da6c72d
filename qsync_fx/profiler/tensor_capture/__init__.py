"""Capture of a running model's tensors, for the sensitivity methods.

Start with `graph_capture.Captured`, which runs a model's graphs with an interchangeable runner.
`tensor_hooks` taps operators, `rounding_sites` lists the tensors that a precision rounds,
`gradient_probes` computes their errors and derivatives, and `nonsmooth_ops` describes gates.
"""
