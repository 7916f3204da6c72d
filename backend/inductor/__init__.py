"""What Inductor is told and given: settings, and formulas in place of its own where those are slow or keep much.

Invariant: nothing here decides a precision. What is computed stays the same but for the order of sums, and the numbers that dropout draws
where another dropout is asked for.
"""
