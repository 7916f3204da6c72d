"""What allocators are compared with: uniform and full precision, the paper's allocator with the orders of others, and batches by speed.

Invariant: where an allocator would say that no plan is within the limits, a baseline answers, and says that it exceeds them.
"""

from qsync_fx.allocator.baselines.dynamic_batches import DynamicBatches
from qsync_fx.allocator.baselines.orders import Hessian, Random
from qsync_fx.allocator.baselines.uniform import FullPrecision, Uniform

__all__ = ["DynamicBatches", "FullPrecision", "Hessian", "Random", "Uniform"]
