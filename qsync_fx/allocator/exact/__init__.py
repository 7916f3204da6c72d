"""The exact allocator: plans as a mixed-integer linear program, which HiGHS solves.

`program` is a linear program as it is built and solved, `formats` what operators compute in and give out as linear expressions of what is
chosen, `prices` what states take, `casting` and `memory` what conversions and kept values do, `device_program` the program of one class of
devices, `bounding` what is held under any plan, `relaxing` how one of thousands of operators is solved, `learned` what is known of plans
that were looked at, `search` programs that are solved and judged in turns, `trying` what plans are looked at that no program gave, `exact`
the allocator.

Invariant: with every choice fixed to zero or one, a program has the states of the cost mapper and the seconds of the replayer, for the
prices that it was built with.
"""
