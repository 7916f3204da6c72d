"""Private names of torch, imported on first use by torch_internals.py."""

# ruff: noqa: I001 (ordered by subject)

from typing import Any

# Operators and the dispatcher: classes of call targets in graphs; kernels that the tracer or
# autocast would choose; modes that tracing enters and leaves.
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket, OperatorBase
from torch._C import DispatchKey, _current_graph_task_id, _dispatch_has_kernel
from torch._C import _dispatch_has_kernel_for_dispatch_key, _set_deterministic_algorithms
from torch._C import _cuda_getCurrentRawStream, _cuda_getDevice
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

# Functions without a public equivalent: products, fused layers, checks, delays on a GPU.
from torch import _check, _int_mm, _native_multi_head_attention, _scaled_mm
from torch import _transformer_encoder_layer_fwd
from torch.cuda import _sleep
from torch._prims_common import suggest_memory_format

# Nested arguments and results; formulas of symbolic sizes.
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves
from torch.utils._pytree import tree_map, tree_map_only, tree_unflatten
from torch.utils._sympy import functions as sympy_functions

# Autograd: callbacks at the end of a backward pass, and state that hooks depend on.
from torch._C._autograd import _profiler_enabled

# Fake tensors and graph modules: tracing without data.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental._backward_state import BackwardState
from torch._guards import CompileContext, Guard, TracingContext, active_fake_mode

# Dynamo: registration of the backend, results per frame, guards, recompilation.
from torch._dynamo import config as dynamo_config, mark_dynamic, maybe_mark_dynamic
from torch._dynamo import optimize as dynamo_optimize, trace_rules
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.backends.registry import _BACKENDS, _COMPILER_FNS, lookup_backend
from torch._dynamo.backends.registry import register_backend
from torch._dynamo.callback import callback_handler
from torch._dynamo.convert_frame import CatchErrorsWrapper, compile_lock, input_codes
from torch._dynamo.eval_frame import OptimizeContext, OptimizedModule, _debug_get_cache_entry_list
from torch._dynamo.eval_frame import get_compiler_fn, innermost_backend
from torch._dynamo.exc import BackendCompilerFailed, RestartAnalysis, ShortenTraceback, SkipFrame
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, ConstantSource, GlobalStateSource, LocalSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters, get_optimize_ddp_mode
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, reset_code
from torch._C._dynamo.eval_frame import set_code_exec_strategy

# AOTAutograd and its partitioner: the split of a joint graph into forward and backward.
from torch._functorch import config as functorch_config
from torch._functorch._activation_checkpointing.knapsack import dp_knapsack
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition

# Inductor: lowerings of our operators, passes over its graphs, generated kernels.
from torch._inductor import config as inductor_config, debug as inductor_debug
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.custom_graph_pass import get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ExternKernel, Pointwise
from torch._inductor.lowering import constrain_to_fx_strides, lowerings as inductor_lowerings
from torch._inductor.lowering import make_fallback, make_pointwise, register_lowering, to_dtype
from torch._inductor.ops_handler import OpsHandler
from torch._inductor.virtualized import V, ops as inductor_ops

# Process groups and DistributedDataParallel: the group of all ranks, the wrapper that runs.
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store, _world

# Without annotations in torch.
_execution_engine: Any
_get_data_attr: Any
_saved_tensors_hooks_is_enabled: Any
_empty_strided_cpu: Any
_get_active_ddp_module: Any

OPTIONAL: frozenset[str]
PATHS: dict[str, tuple[str, str]]

__all__ = [
    "_BACKENDS",
    "_COMPILER_FNS",
    "AttrSource",
    "BackendCompilerFailed",
    "BackwardState",
    "CatchErrorsWrapper",
    "CompileContext",
    "ConstantSource",
    "CustomGraphPass",
    "CustomPartitionerFn",
    "DispatchKey",
    "ExternKernel",
    "FakeTensor",
    "FakeTensorMode",
    "GlobalStateSource",
    "GraphLowering",
    "Guard",
    "GuardBuilder",
    "HigherOrderOperator",
    "InputMutationAOTOutput",
    "InstructionTranslator",
    "LocalSource",
    "OpOverload",
    "OpOverloadPacket",
    "OperatorBase",
    "OpsHandler",
    "OptimizeContext",
    "OptimizedModule",
    "Pointwise",
    "PyCodeCache",
    "RestartAnalysis",
    "ShortenTraceback",
    "SkipFrame",
    "TracingContext",
    "V",
    "_FrameAction",
    "_FrameExecStrategy",
    "_LazyGraphModule",
    "_check",
    "_cuda_getCurrentRawStream",
    "_cuda_getDevice",
    "_current_graph_task_id",
    "_debug_get_cache_entry_list",
    "_disable_current_modes",
    "_dispatch_has_kernel",
    "_dispatch_has_kernel_for_dispatch_key",
    "_enter_autocast",
    "_exit_autocast",
    "_get_default_group",
    "_get_default_store",
    "_int_mm",
    "_native_multi_head_attention",
    "_profiler_enabled",
    "_scaled_mm",
    "_set_deterministic_algorithms",
    "_sleep",
    "_transformer_encoder_layer_fwd",
    "_world",
    "active_fake_mode",
    "aot_autograd",
    "boxed_nop",
    "callback_handler",
    "compile_fx_inner",
    "compile_lock",
    "constrain_to_fx_strides",
    "counters",
    "dp_knapsack",
    "dynamo_config",
    "dynamo_optimize",
    "enable_python_dispatcher",
    "functorch_config",
    "get_compiler_fn",
    "get_default_op_list",
    "get_hash_for_files",
    "get_optimize_ddp_mode",
    "inductor_config",
    "inductor_debug",
    "inductor_lowerings",
    "inductor_ops",
    "innermost_backend",
    "input_codes",
    "install_guard",
    "is_in_torch_dispatch_mode",
    "keystr",
    "lookup_backend",
    "make_fallback",
    "make_pointwise",
    "mark_dynamic",
    "maybe_mark_dynamic",
    "min_cut_rematerialization_partition",
    "register_backend",
    "register_lowering",
    "reset_code",
    "select_decomp_table",
    "set_code_exec_strategy",
    "suggest_memory_format",
    "sympy_functions",
    "to_dtype",
    "trace_rules",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]
