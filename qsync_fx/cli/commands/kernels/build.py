"""`qsync kernels build`: kernels are compiled before they are needed.

Invariant: what this prints is what `qsync_fx.backend.cuda.libraries.cache` would load.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qsync_fx.cli import model, output
from qsync_fx.cli.command import Command
from qsync_fx.cli.commands.kernels.kept import table_of
from qsync_fx.errors import KernelError, OptionError, nearest

if TYPE_CHECKING:
    from qsync_fx.backend.cuda.kernel.config import Arch
    from qsync_fx.backend.cuda.source.unit import Unit

_ABOUT = """\
Compiles CUDA kernels. No GPU is needed.

With --model, those that the model's layers need when they are trained in the
precision or by the plan given; the model may be on the CPU. Otherwise one for
each product and format."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        metavar="ARCH",
        action="append",
        help="what to compile for, such as sm_80 or sm_90a; repeatable; by default this machine's GPUs",
    )
    parser.add_argument(
        "--every-candidate",
        action="store_true",
        help="all kernels that the tuner may choose from, not only those that run where nothing was tuned",
    )
    parser.add_argument(
        "--jobs", metavar="N", type=int, help="how many compilers run at once; by default as cores and memory allow"
    )
    parser.add_argument("--output", metavar="DIR", type=Path, help="folder to keep them in, in place of the cache")
    model.add(parser, "--model")


def _build(arguments: argparse.Namespace) -> None:
    from qsync_fx.backend.cuda.libraries import cache, compiler

    architectures = [_arch(name) for name in arguments.arch] if arguments.arch else _own_architectures()
    folder = None if arguments.output is None else cache.prepare(arguments.output.absolute())
    units = [unit for arch in architectures for unit in _units(arch, arguments)]
    if not units:
        raise OptionError(
            "there is nothing to compile: torch computes all products of this model",
            where=arguments.model,
            do="--every-candidate compiles what the tuner may choose from; see qsync inspect for the precisions",
        )
    since = time.monotonic()
    built = compiler.attempt(units, jobs=arguments.jobs, folder=folder)
    entries = [cache.read(path.parent) for path in built.libraries.values()]
    output.show(table_of(entry for entry in entries if entry is not None))
    seconds, place = time.monotonic() - since, folder or cache.root()
    output.note(f"{len(built.libraries)} kernels for {', '.join(architectures)} in {place}, {seconds:.0f} s")
    if built.failures:
        raise _failed(list(built.failures.values()), len(units))


def _failed(failures: Sequence[KernelError], total: int) -> KernelError:
    first = failures[0]
    if len(failures) == 1 and total == 1:
        return first
    return type(first)(
        f"{len(failures)} of {total} kernels could not be compiled; the first: {first.what}",
        where=first.where,
        do=first.do,
    )


def _arch(name: str) -> Arch:
    from qsync_fx.backend.cuda.kernel.config import ARCHITECTURES

    for arch in ARCHITECTURES:
        if arch == name:
            return arch
    raise OptionError(
        f"{name!r} is no architecture that there are kernels for", where="--arch", do=nearest(name, ARCHITECTURES)
    )


def _own_architectures() -> list[Arch]:
    import torch

    from qsync_fx.backend.cuda.run.device import known_of

    found = [known_of(torch.device("cuda", index)).arch for index in range(torch.cuda.device_count())]
    known = [arch for arch in dict.fromkeys(found) if arch is not None]
    if not known:
        raise OptionError(
            "this machine has no GPU that there are kernels for",
            where="--arch",
            do="say what to compile for, as in --arch sm_80",
        )
    return known


def _units(arch: Arch, arguments: argparse.Namespace) -> list[Unit]:
    from qsync_fx.backend.cuda.choose import ahead

    if arguments.model is None:
        for option in model.given(arguments):
            raise OptionError(
                "without a model there is nothing to train so", where=model.flag(option), do="name one with --model"
            )
        return ahead.of_all(arch)
    from qsync_fx.backend.cuda.run.device import assumed
    from qsync_fx.backend.operators.multiplying.collect import problems_of

    given = model.read(arguments)
    # Wherever the model lies, what decides is the device that the kernels are for.
    with assumed(arch, on=given.device.type):
        return ahead.of_problems(problems_of(given.explain()), arch, arguments.every_candidate)


BUILD = Command("compile kernels", _build, _arguments, _ABOUT)
