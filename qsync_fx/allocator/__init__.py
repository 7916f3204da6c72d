"""Which operator of a model computes in which format on which device: what chooses a plan.

`problem` says what is to be decided and within which limits, judging/ what a plan costs, `answer` what an allocator found.

Invariant: an answer says of a plan what the judge says of it: the cost mapper, the memory model and the replayer. What an allocator reckons
with meanwhile is its own.
"""

from qsync_fx.allocator.evaluator import Judge, Judged, judged
from qsync_fx.allocator.plan_result import Allocator, Answer, Note, NoteKind, Round
from qsync_fx.allocator.problem import DeviceClass, Problem

__all__ = ["Allocator", "Answer", "DeviceClass", "Judge", "Judged", "Note", "NoteKind", "Problem", "Round", "judged"]
