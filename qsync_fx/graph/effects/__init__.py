"""What nodes do beside computing a value: switch modes (`modes`), write (`writes`), share memory (`memory`), call a graph (`bodies`).

`sharing` follows from it: how far one cast is shared.
"""
