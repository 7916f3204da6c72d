"""The plan that a model trains under where none is asked for: found from a profile that was measured here, and kept beside it.

`fingerprint` tells a model, `kept` is the file of such a plan and where it lies, `candidates` says which of them is this model's.

Invariant: nothing is measured, searched or written here. A plan that is not surely of this model, machine and batch is not taken, and why
not is said.
"""
