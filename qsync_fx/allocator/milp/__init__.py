"""The exact allocator: plans as a mixed-integer linear program, which HiGHS solves.

From the bottom to the top; a module imports from those above it in this list.

    linear          linear programs: as they are built and solved, and how one of thousands of operators is
    terms           what things take and hold as linear expressions of what is chosen: states, conversions, kept values
    bounding        what is held under any plan, likewise
    device_program  the program of one class of devices; sending, how long its gradients travel
    solving         the program of all classes, within limits; infeasible, why no plan is
    learned         what is known of plans that were looked at
    search          programs that are solved and judged in turns; trying, plans that are looked at and no program gave
    exact           the allocator: `MilpAllocator`

Invariant: with every choice fixed to zero or one, a program has the states of the cost mapper and the seconds of the replayer, for the
prices that it was built with.

What things take and hold, as linear expressions of what is chosen.

`formats` is what operators compute in and give out, `prices` what states take alone, `beside` what they take beside their neighbours,
`casting` what conversions take, `memory` what is kept; a `Charge` is what is taken, and where.

Linear programs, whatever they are of.

`program` is one as it is built and solved; `core` solves one with whole choices, `relaxing` one of thousands of them, nearly,
from what choices would cost `alone`.
"""
