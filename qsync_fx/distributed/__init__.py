"""Training of ranks that differ: that they agree before they start, that the failure of one is told on all, that replicas stay equal.

`guard` stands around training: in agreeing/ `agreement` has the ranks compare what they are about to do, `watcher` has each of them see at
any time how the others fare, and `channel` is how they tell, apart from the collectives, in which a rank may be stuck. `replicas` compares
parameters to the last bit, `averaging` weighs gradients by the batches of the ranks. `find_plan` has each rank measure itself, and finds
the plan of all; in adapting/ `replanning` finds another when a device has changed, by what `pace` and `holding` see of each step and
`drift` makes of it.
"""

from qsync_fx.distributed.averaging import average_by_batch
from qsync_fx.distributed.compressing import compress
from qsync_fx.distributed.finding import find_plan
from qsync_fx.distributed.guarding import Guard, guard
from qsync_fx.distributed.replanned import Replanned
from qsync_fx.distributed.replanning import Replanning
from qsync_fx.distributed.replicas import check_replicas
from qsync_fx.distributed.survey import FoundPlan

__all__ = [
    "FoundPlan",
    "Guard",
    "Replanned",
    "Replanning",
    "average_by_batch",
    "check_replicas",
    "compress",
    "find_plan",
    "guard",
]
