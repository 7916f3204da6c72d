"""Which kernel computes a problem, or that torch does, and why (`select`).

`rules` say which configurations are kernels, `serving` which problems those serve, `candidates` which are tried, and `ahead` which to
compile before they are needed.
"""
