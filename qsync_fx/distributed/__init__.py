"""Training of ranks that differ: that they agree before they start, that the failure of one is told on all, that replicas stay equal.

`guard` stands around training: in agreeing/ `agreement` has the ranks compare what they are about to do, `watcher` has each of them see at
any time how the others fare, and `channel` is how they tell, apart from the collectives, in which a rank may be stuck. `replicas` compares
parameters to the last bit, `averaging` weighs gradients by the batches of the ranks. `measure_and_plan` has each rank measure itself, and
finds
the plan of all; in adapting/ `replanning` finds another when a device has changed, by what `pace` and `holding` see of each step and
`drift` makes of it.
"""

from qsync_fx.distributed.compress_gradients import compress
from qsync_fx.distributed.fleet_plan import FleetPlan, measure_and_plan
from qsync_fx.distributed.guard_training import Guard, guard
from qsync_fx.distributed.replan import Replanning, ReplanReport
from qsync_fx.distributed.replica_check import check_replicas
from qsync_fx.distributed.sample_weighted_mean import average_by_batch

__all__ = [
    "FleetPlan",
    "Guard",
    "ReplanReport",
    "Replanning",
    "average_by_batch",
    "check_replicas",
    "compress",
    "guard",
    "measure_and_plan",
]
