"""Linear programs, whatever they are of.

`program` is one as it is built and solved; `core` solves one with whole choices, `relaxing` one of thousands of them, nearly,
from what choices would cost `alone`.
"""
