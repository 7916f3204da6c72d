"""The backend's name in Accelerate and in Trainer of Hugging Face, whose list of names is fixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qsync_fx.options import Options

_NAME = "QSYNC"


def enable_accelerate(options: Mapping[str, object] | Options | None = None) -> None:
    """Let Accelerate and Trainer accept "qsync" as the name of a backend.

    Afterwards `Accelerator(dynamo_backend="qsync")`, `TorchDynamoPlugin(backend="qsync")`,
    `TrainingArguments(torch_compile_backend="qsync")` and ACCELERATE_DYNAMO_BACKEND=qsync work.

    Args:
        options: default options of the backend. `TorchDynamoPlugin(options=...)` overrides them,
            and a later call of this function replaces them.
    """
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin

    plugin: Any = TorchDynamoPlugin
    if _NAME not in DynamoBackend:
        member = str.__new__(DynamoBackend, _NAME)
        member._name_ = member._value_ = _NAME
        DynamoBackend._missing_ = lambda value: member if value == _NAME else None
        original = plugin.__post_init__

        def with_default_options(made: Any) -> None:
            original(made)
            if made.backend is member and made.options is None:
                made.options = plugin.qsync_options

        plugin.__post_init__ = with_default_options
    plugin.qsync_options = options
