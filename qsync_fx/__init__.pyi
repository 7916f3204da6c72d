"""Names of the package, which __init__.py imports on first use."""

from qsync_fx import (
    devices as devices,
    distributed as distributed,
    monitoring as monitoring,
    optim as optim,
)
from qsync_fx.allocator.api import cache_plan as cache_plan, find_plan as find_plan
from qsync_fx.diagnostics import Explanation as Explanation, explain as explain
from qsync_fx.diagnostics.coverage_report import (
    PlanCoverage as PlanCoverage,
    plan_coverage as plan_coverage,
)
from qsync_fx.errors import (
    DeviceError as DeviceError,
    OptionError as OptionError,
    PassError as PassError,
    PlanError as PlanError,
    PlanWarning as PlanWarning,
    PrecisionError as PrecisionError,
    ProfileError as ProfileError,
    QSyncError as QSyncError,
    RankError as RankError,
)
from qsync_fx.formats import FORMATS as FORMATS, Precision as Precision
from qsync_fx.graph import Operator as Operator, PrecisionGraph as PrecisionGraph
from qsync_fx.monitoring import monitor as monitor
from qsync_fx.options import Options as Options
from qsync_fx.passes.pass_base import graph_pass as graph_pass
from qsync_fx.passes.rewrite_pass import rewrite as rewrite
from qsync_fx.passes.rewrite_pattern import Match as Match
from qsync_fx.plan import ClusterPlan as ClusterPlan, Plan as Plan
from qsync_fx.plan.operator_id import OpId as OpId
from qsync_fx.plan_switching import switch_plan as switch_plan
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity as Sensitivity
from qsync_fx.predictor.replayer.cluster import Cluster as Cluster
from qsync_fx.profiler.analytic_profile import catalog_profile as catalog_profile
from qsync_fx.profiler.measurement import measure as measure
from qsync_fx.profiler.profile import Profile as Profile
from qsync_fx.profiler.sensitivity.estimate import sensitivity as sensitivity
from qsync_fx.report.document import Report as Report, save_report as save_report
from qsync_fx.rounding import rounding_stream as rounding_stream
from qsync_fx.timeline.replay_plans import replay as replay
from qsync_fx.timeline.timeline import Timeline as Timeline

__version__: str
