"""Exact allocator: plans as a mixed-integer linear program (MILP), solved by HiGHS.

`MilpAllocator` runs `MilpSearch`, which alternately solves a program and evaluates its plan.
`build_and_solve` builds the program of all device classes from one `DeviceProgram` per class. With
integer choices, a program has the states of the cost mapper and, for the state costs it was built
with, the seconds of the replayer. Start reading at `search`.
"""

from typing import Final

from qsync_fx.allocator.milp.milp_allocator import MilpAllocator

ALLOCATORS: Final = (MilpAllocator(),)
