"""Private names of torch, which any version may change: no other module of the product uses them.

The names exist in torch 2.11.0, 2.12.1, 2.13.0 (pinned by constraints.txt), 2.14.1 and 2.15.0. To
check another version, run `make test-torch VERSION=2.15.1`: `tests/test_architecture.py` lists the
names that it lacks. Private attributes of instances, such as `OpOverload._schema`, are not here.

Invariant: importing this module imports no torch. A name is resolved on first use (PEP 562) and is
the same object as torch's; settings are modules, so that patches of their attributes reach torch.
"""

from __future__ import annotations

import pkgutil
from typing import Any, Final

_NAMES: Final = {
    # Operators and the dispatcher: classes of call targets in graphs; kernels that the tracer or
    # autocast would choose; modes that tracing enters and leaves.
    "torch._ops": "HigherOrderOperator OpOverload OpOverloadPacket OperatorBase",
    "torch._C": (
        "DispatchKey _current_graph_task_id _dispatch_has_kernel"
        " _dispatch_has_kernel_for_dispatch_key _set_deterministic_algorithms"
        " _cuda_getCurrentRawStream _cuda_getDevice"
    ),
    "torch._dispatch.python": "enable_python_dispatcher",
    "torch.utils._python_dispatch": "_disable_current_modes is_in_torch_dispatch_mode",
    "torch.amp.autocast_mode": "_enter_autocast _exit_autocast",
    # Functions without a public equivalent: products, fused layers, checks, delays on a GPU.
    "torch": (
        "_check _int_mm _native_multi_head_attention _scaled_mm _transformer_encoder_layer_fwd"
    ),
    "torch.cuda": "_sleep",
    "torch._prims_common": "suggest_memory_format",
    # Nested arguments and results; formulas of symbolic sizes.
    "torch.utils._pytree": (
        "keystr tree_flatten tree_flatten_with_path tree_leaves tree_map tree_map_only"
        " tree_unflatten"
    ),
    "torch.utils._sympy": "functions=sympy_functions",
    # Autograd: callbacks at the end of a backward pass, and state that hooks depend on.
    "torch.autograd": "Variable._execution_engine",
    "torch._C._autograd": "_get_data_attr _profiler_enabled _saved_tensors_hooks_is_enabled",
    # Fake tensors and graph modules: tracing without data.
    "torch._subclasses.fake_tensor": "FakeTensor FakeTensorMode",
    "torch.fx._lazy_graph_module": "_LazyGraphModule",
    "torch.fx.experimental._backward_state": "BackwardState",
    "torch._guards": "CompileContext Guard TracingContext active_fake_mode",
    # Dynamo: registration of the backend, results per frame, guards, recompilation.
    "torch._dynamo": (
        "config=dynamo_config mark_dynamic maybe_mark_dynamic optimize=dynamo_optimize trace_rules"
    ),
    "torch._dynamo.backends.registry": "_BACKENDS _COMPILER_FNS lookup_backend register_backend",
    "torch._dynamo.callback": "callback_handler",
    "torch._dynamo.convert_frame": "CatchErrorsWrapper compile_lock input_codes",
    "torch._dynamo.eval_frame": (
        "OptimizeContext OptimizedModule _debug_get_cache_entry_list get_compiler_fn"
        " innermost_backend"
    ),
    "torch._dynamo.exc": "BackendCompilerFailed RestartAnalysis ShortenTraceback SkipFrame",
    "torch._dynamo.guards": "GuardBuilder install_guard",
    "torch._dynamo.source": "ConstantSource GlobalStateSource LocalSource",
    "torch._dynamo.symbolic_convert": "InstructionTranslator",
    "torch._dynamo.utils": "counters get_optimize_ddp_mode",
    "torch._C._dynamo.eval_frame": (
        "_FrameAction _FrameExecStrategy reset_code set_code_exec_strategy"
    ),
    "torch._C._dynamo.guards": "_empty_strided_cpu",
    # AOTAutograd and its partitioner: the split of a joint graph into forward and backward.
    "torch._functorch": "config=functorch_config",
    "torch._functorch.partitioners": "get_default_op_list min_cut_rematerialization_partition",
    # Inductor: lowerings of our operators, passes over its graphs, generated kernels.
    "torch._inductor": "config=inductor_config debug=inductor_debug",
    "torch._inductor.codecache": "PyCodeCache",
    "torch._inductor.compile_fx": "compile_fx_inner",
    "torch._inductor.custom_graph_pass": "CustomGraphPass CustomPartitionerFn get_hash_for_files",
    "torch._inductor.decomposition": "select_decomp_table",
    "torch._inductor.graph": "GraphLowering",
    "torch._inductor.ir": "ExternKernel Pointwise",
    "torch._inductor.lowering": (
        "constrain_to_fx_strides lowerings=inductor_lowerings make_fallback make_pointwise"
        " register_lowering to_dtype"
    ),
    "torch._inductor.virtualized": "V ops=inductor_ops",
    # Process groups and DistributedDataParallel: the group of all ranks, the wrapper that runs.
    "torch.distributed.distributed_c10d": "_get_default_group _get_default_store _world",
    "torch.nn.parallel": "DistributedDataParallel._get_active_ddp_module",
}
"""Module -> its names. "a=b" renames `a` to `b`; "A.b" is an attribute of the class `A`."""

OPTIONAL: Final = frozenset({"_cuda_getCurrentRawStream", "_cuda_getDevice", "_empty_strided_cpu"})
"""Names that only builds for CUDA have, and one that its caller can do without."""

PATHS: Final = {
    name.split("=")[-1].split(".")[-1]: (module, name.split("=")[0])
    for module, names in _NAMES.items()
    for name in names.split()
}
"""Name -> (module, attribute) in torch."""


def __getattr__(name: str) -> Any:
    if name not in PATHS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = pkgutil.resolve_name(":".join(PATHS[name]))
    return value
