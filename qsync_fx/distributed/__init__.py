"""Data-parallel training over unequal ranks. Start with guard_training.py.

`guard` wraps training: ranks agree before the first step (agreement.py), and an error on one rank
ends training on every rank. `measure_and_plan` profiles each rank and returns the plan of the
cluster; `Replanning` solves again upon drift in speed, memory or links. `compress` compresses
gradients, `check_replicas` compares parameters. `DistributedBatchSampler` gives ranks batches of
different sizes, and `average_by_batch` weights their gradients. `TrainingState` is the state for
checkpoints.
"""

from qsync_fx.distributed.agreement import check_replicas
from qsync_fx.distributed.batch_sampler import DistributedBatchSampler
from qsync_fx.distributed.compress_gradients import compress
from qsync_fx.distributed.fleet_plan import FleetPlan, measure_and_plan
from qsync_fx.distributed.guard_training import Guard, guard
from qsync_fx.distributed.replan import Replanning, ReplanReport
from qsync_fx.distributed.sample_weighted_mean import average_by_batch
from qsync_fx.distributed.training_state import TrainingState

__all__ = [
    "DistributedBatchSampler",
    "FleetPlan",
    "Guard",
    "ReplanReport",
    "Replanning",
    "TrainingState",
    "average_by_batch",
    "check_replicas",
    "compress",
    "guard",
    "measure_and_plan",
]
