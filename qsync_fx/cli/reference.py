"""A model named on a command line: "package.module:function".

Invariant: a reference that cannot be followed raises `OptionError` saying which part of it is wrong. What the user's module or function
raises itself goes through untouched.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qsync_fx.errors import OptionError, nearest, shown

_HOW_TO_WRITE_IT = 'write MODULE:CALLABLE, such as "examples.bert:small"'
_WHAT_TO_RETURN = "return (model, args) or (model, args, kwargs), args a tuple and kwargs a dictionary"

Referred = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def findable(reference: str) -> str:
    """Returns a reference whose module may be there; made for `add_argument(type=...)`, so that it is known before torch is imported.

    Raises:
        OptionError: it names no module and callable, or one that is nowhere.
    """
    module, _ = _parts(reference)
    top = module.partition(".")[0]
    _look_here_first()
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        raise _missing(top, reference)
    return reference


def load(reference: str) -> Referred:
    """Returns what the function at `reference` returns, a model and what to call it with.

    Args:
        reference: "MODULE:CALLABLE"; the module is looked for in the current folder first, as by "python -m".

    Raises:
        OptionError: there is no such module or callable, it takes arguments, or returns something else.
    """
    module, name = _parts(reference)
    factory = _attribute(_module(module, reference), name, reference)
    _check_call(factory, reference)
    return _checked(factory(), reference)


def _parts(reference: str) -> tuple[str, str]:
    module, colon, name = reference.partition(":")
    if "/" in module or module.endswith(".py"):
        dotted = module.removesuffix(".py").replace("/", ".").strip(".")
        raise OptionError(f"{shown(module)} is a path, not a module", do=f'write "{dotted}:{name or "CALLABLE"}"')
    if not colon or "" in (*module.split("."), *name.split(".")):
        raise OptionError(f"{shown(reference)} does not name a model", do=_HOW_TO_WRITE_IT)
    return module, name


def _module(name: str, reference: str) -> Any:
    _look_here_first()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that exists and imports one that does not is the user's to see in full.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise _missing(error.name, reference) from None


def _look_here_first() -> None:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)


def _missing(module: str, reference: str) -> OptionError:
    return OptionError(
        f"there is no module {shown(module)}",
        where=reference,
        do=f"run qsync in the folder that holds it (this is {os.getcwd()}), or install its package",
    )


def _attribute(value: Any, path: str, reference: str) -> Any:
    for name in path.split("."):
        if not hasattr(value, name):
            known = [key for key in vars(value) if not key.startswith("_") and callable(getattr(value, key, None))]
            owner = getattr(value, "__name__", type(value).__name__)
            raise OptionError(f"{owner} has no {shown(name)}", where=reference, do=nearest(name, known))
        value = getattr(value, name)
    return value


def _check_call(factory: Any, reference: str) -> None:
    if not callable(factory):
        raise OptionError(
            f"it is a value of type {type(factory).__name__}, which cannot be called",
            where=reference,
            do=f"name a function; {_WHAT_TO_RETURN}",
        )
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise OptionError(
            f"the function cannot be called without arguments: {error}",
            where=reference,
            do="give its parameters defaults, or name a function that calls it",
        ) from None
    except ValueError:
        # Some callables written in C do not tell their parameters; calling will show.
        return


def _checked(result: Any, reference: str) -> Referred:
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        what = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a value of type {type(result).__name__}"
        raise OptionError(f"the function returned {what}", where=reference, do=_WHAT_TO_RETURN)
    model, args, kwargs = (*result, {})[:3]
    if not callable(model):
        raise OptionError(
            f"the model is of type {type(model).__name__}", where=reference, do="return a module or function"
        )
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise OptionError(
            f"args is of type {type(args).__name__}, not a tuple",
            where=reference,
            do="for one input write (model, (x,)), with a comma; for none (model, (), kwargs)",
        )
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise OptionError("kwargs is not a dictionary of names", where=reference, do=_WHAT_TO_RETURN)
    return model, tuple(args), dict(kwargs)
