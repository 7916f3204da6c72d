"""Private names of torch, which any version may change: no other module of the product uses them.

The names exist in torch 2.11.0, 2.12.1, 2.13.0 (pinned by constraints.txt), 2.14.1 and 2.15.0. To
check another version, run `make test-torch VERSION=2.15.1`: `tests/test_architecture.py` lists the
names that it lacks. Private attributes of instances, such as `OpOverload._schema`, are not here.

Invariant: importing this module imports no torch. A name is resolved on first use (PEP 562) and is
the same object as torch's; settings are modules, so that patches of their attributes reach torch.
"""

from typing import Final

from qsync_fx.lazy_names import declared, importer

OPTIONAL: Final = frozenset({"_cuda_getCurrentRawStream", "_cuda_getDevice", "_empty_strided_cpu"})
"""Names that only builds for CUDA have, and one that its caller can do without."""

PATHS: Final = {
    **declared(__file__),
    # Without annotations in torch.
    "_execution_engine": ("torch.autograd", "Variable._execution_engine"),
    "_get_data_attr": ("torch._C._autograd", "_get_data_attr"),
    "_saved_tensors_hooks_is_enabled": ("torch._C._autograd", "_saved_tensors_hooks_is_enabled"),
    "_empty_strided_cpu": ("torch._C._dynamo.guards", "_empty_strided_cpu"),
    "_get_active_ddp_module": (
        "torch.nn.parallel",
        "DistributedDataParallel._get_active_ddp_module",
    ),
}
"""Name -> (module, attribute) in torch."""

__getattr__ = importer(__name__, PATHS)
