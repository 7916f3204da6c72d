"""Inputs of `qsync plan`: profiles and sensitivities from files, the catalog or measurements.

Invariant: data in files is not computed again, and slow work shows progress.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from qsync_fx import torch_internals as internals
from qsync_fx.cli import model_args
from qsync_fx.cli.model_args import named
from qsync_fx.errors import OptionError, nearest, shown
from qsync_fx.progress import progress

if TYPE_CHECKING:
    from qsync_fx.allocator.problem import DeviceClass
    from qsync_fx.cli.model_args import Trained
    from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
    from qsync_fx.predictor.model import ModelGraph
    from qsync_fx.predictor.replayer.cluster import Cluster

STEPS = 8
"""Number of steps over which sensitivities are averaged if they are computed here."""


@dataclass(frozen=True)
class PlanInputs:
    """Profiles and sensitivities for planning, by class of devices or "" for all.

    `sensitivity` is None if the profiles contain it, `trained` is None if only files are given.
    """

    profiles: Mapping[str, Any]
    cluster: Cluster | None
    sensitivity: Sensitivity | Mapping[str, Sensitivity] | None
    trained: Trained | None


def read(arguments: argparse.Namespace, cluster: Cluster | None) -> PlanInputs:
    """Return the inputs of a command line; check them, then measure the missing ones."""
    from qsync_fx.allocator.problem_builder import check_precisions
    from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
    from qsync_fx.profiler.profile import Profile
    from qsync_fx.timeline.device_profiles import of_files

    paths = named(arguments.profile, "--profile")
    profiles: dict[str, Any] = {
        name: Profile.load(path, any_machine=True) for name, path in paths.items()
    }
    inputs = None
    if arguments.sensitivity is not None:
        inputs = Sensitivity.load(arguments.sensitivity)
    if arguments.model is None:
        if not profiles and (
            cluster is None or all(device.profile is None for device in cluster.devices.values())
        ):
            raise OptionError(
                "neither a model nor a profile is given",
                where="MODULE:CALLABLE",
                do="add MODULE:CALLABLE, or profiles with --profile or in the cluster file",
            )
        from_files = PlanInputs(profiles, cluster, inputs, None)
        _check(arguments, from_files)
        return from_files
    trained = model_args.read_training(arguments)
    _check(arguments, PlanInputs(profiles, cluster, inputs, trained))
    if cluster is not None and "" not in profiles:
        profiles = {**of_files(cluster, profiles), **profiles}
        profiles |= _of_catalog(cluster, profiles, trained, arguments)
    result = PlanInputs(profiles, cluster, inputs, trained)
    if trained.precisions is not None and profiles:
        check_precisions(profiles, trained.precisions)
    if not profiles:
        result = replace(result, profiles={"": _measured(trained, arguments, inputs is None)})
    if inputs is None and any(profile.sensitivity is None for profile in result.profiles.values()):
        if arguments.batch is None and not arguments.recompute:
            _fits(result, arguments)
        return replace(result, sensitivity=sensitivities(result, arguments.method))
    return result


def _check(arguments: argparse.Namespace, inputs: PlanInputs) -> None:
    """Raise `QSyncError` for arguments that are invalid with any profile."""
    from qsync_fx.allocator.api import get_allocator
    from qsync_fx.allocator.measure_and_replan import check_max_replans
    from qsync_fx.allocator.problem_builder import PlanRequest
    from qsync_fx.formats import precision

    PlanRequest(**request(arguments, inputs)).check()
    for change in arguments.set:
        precision(change.rpartition("=")[2])
    if arguments.max_replans is not None:
        check_max_replans(arguments.max_replans)
        if arguments.max_replans > 0 and inputs.trained is None:
            raise OptionError(
                "--max-replans runs the plan, which requires the model",
                where="MODULE:CALLABLE",
                do="add MODULE:CALLABLE, or remove --max-replans",
            )
    get_allocator(arguments.allocator)
    if inputs.trained is not None:
        model_args.optimizer(arguments.optimizer, inputs.trained.module)
    if inputs.cluster is not None:
        _check_names(arguments, inputs.cluster)
    if arguments.pareto:
        from qsync_fx.allocator.analysis import check_points

        check_points(arguments.points)


def _check_names(arguments: argparse.Namespace, cluster: Cluster) -> None:
    names = {
        "--device": [arguments.device],
        "--memory": named(arguments.memory, "--memory"),
        "--profile": named(arguments.profile, "--profile"),
    }
    for option, classes in names.items():
        for name in filter(None, classes):
            if name not in cluster.devices:
                do = nearest(name[:40], cluster.devices)
                raise OptionError(
                    f"the cluster has no class of devices {shown(name)}", where=option, do=do
                )


def _fits(available: PlanInputs, arguments: argparse.Namespace) -> None:
    """Raise `PlanError` if no plan fits into memory, before sensitivities are computed.

    Memory does not depend on sensitivities, which take minutes, so equal values replace them.
    """
    from qsync_fx.allocator.api import find_plan
    from qsync_fx.errors import PlanError
    from qsync_fx.formats import FORMATS
    from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity

    def equal(profile: Any) -> Sensitivity:
        narrow = {name: 1.0 for name in profile.precisions if FORMATS[name].bits < 32}
        return Sensitivity(
            "second_order", "", {item.id: dict(narrow) for item in profile.graph.operators}, steps=1
        )

    cluster = available.cluster
    limited = cluster is not None and any(
        device.memory is not None for device in cluster.devices.values()
    )
    if not arguments.memory and not limited:
        return
    inputs = {name: equal(profile) for name, profile in available.profiles.items()}
    try:
        find_plan(
            available.profiles.get("", available.profiles),
            cluster,
            objective=_objective(arguments, available),
            memory=_memory(arguments),
            sensitivity=inputs.get("", inputs),
        )
    except PlanError as error:
        if error.where is not None and error.where.startswith("memory of"):
            raise


def sensitivities(available: PlanInputs, method: str) -> Sensitivity | dict[str, Sensitivity]:
    """Return sensitivities of each profile's narrow formats, computed by `method` if missing."""
    from qsync_fx.formats import FORMATS
    from qsync_fx.profiler.sensitivity.estimate import sensitivity

    trained = available.trained
    if trained is None:
        raise OptionError(
            "sensitivities are missing, and their computation requires the model",
            where="MODULE:CALLABLE",
            do="add MODULE:CALLABLE, or a file of sensitivities",
        )
    result: dict[str, Sensitivity] = {}
    for name, profile in available.profiles.items():
        if profile.sensitivity is not None:
            result[name] = profile.sensitivity
            continue
        narrow = [fmt for fmt in profile.precisions if FORMATS[fmt].bits < 32]
        result[name] = sensitivity(
            trained.module,
            trained.step,
            trained.batches,
            method,
            narrow,
            STEPS,
            options=replace(trained.arguments.options, target=_target(profile.graph.device)),
        )
    return result.get("", result)


def resizer(available: PlanInputs) -> Callable[[DeviceClass, int], DeviceClass] | None:
    """Return a function that changes the batch size of a class of devices; None without a model."""
    from qsync_fx.allocator.evaluator import resized

    trained = available.trained
    if trained is None:
        return None

    @functools.cache
    def symbolic(device: str, formats: tuple[str, ...]) -> ModelGraph:
        return _of_any_batch(trained, device, formats)

    def other(part: DeviceClass, batch: int) -> DeviceClass:
        return resized(part, symbolic(part.graph.device, part.graph.formats), batch)

    return other


def _target(device: str) -> str | None:
    from qsync_fx.devices import TARGETS

    return device if device in TARGETS else None


def _of_any_batch(trained: Trained, device: str, formats: tuple[str, ...]) -> ModelGraph:
    import torch

    from qsync_fx.diagnostics import explain
    from qsync_fx.profiler.model_graph_builder import build_model_graph

    args, kwargs = internals.tree_map_only(torch.Tensor, torch.clone, trained.batches[0])
    tensors = [
        leaf
        for leaf in internals.tree_leaves((args, kwargs))
        if isinstance(leaf, torch.Tensor) and leaf.dim()
    ]
    for tensor in tensors:
        if tensor.shape[0] == tensors[0].shape[0]:
            internals.mark_dynamic(tensor, 0)
    torch.compiler.reset()
    options = {"target": _target(device)}
    return build_model_graph(explain(trained.module, *args, options=options, **kwargs), formats)


def _of_catalog(
    cluster: Cluster,
    profiles: Mapping[str, Any],
    trained: Trained,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    from qsync_fx.devices import get
    from qsync_fx.formats import FORMATS
    from qsync_fx.profiler.analytic_profile import catalog_profile

    missing = {
        name: item.device
        for name, item in cluster.devices.items()
        if name not in profiles and item.device is not None
    }
    result = {}
    with progress("profiles from the catalog", len(missing)) as done:
        for name, called in missing.items():
            device = get(called)
            formats = [fmt for fmt in trained.precisions or device.units if fmt in device.units]
            narrow = [fmt for fmt in formats if FORMATS[fmt].bits <= 32]
            optimizer = model_args.optimizer(arguments.optimizer, trained.module)
            result[name] = catalog_profile(
                device, trained.module, trained.step, trained.batches[0], narrow, optimizer
            )
            done(name)
    return result


def _measured(trained: Trained, arguments: argparse.Namespace, sensitivity: bool) -> Any:
    from qsync_fx.profiler.measurement import measure

    return measure(
        trained.module,
        trained.step,
        trained.batches,
        trained.precisions,
        optimizer=model_args.optimizer(arguments.optimizer, trained.module),
        sensitivity="second_order" if sensitivity else None,
        options=model_args.measured(arguments),
    )


def run_arguments(arguments: argparse.Namespace, available: PlanInputs) -> dict[str, Any]:
    """Return the arguments of `find_plan` that run the plan here.

    Empty if --max-replans is 0, without a model, or by default if no profile is of this machine or
    the plan may leave devices out.
    """
    from qsync_fx.allocator.measure_and_replan import MAX_REPLANS
    from qsync_fx.devices.machine import here_for

    current = any(
        profile.machine == here_for(profile.machine) for profile in available.profiles.values()
    )
    trained, limit = available.trained, arguments.max_replans
    chosen = current and arguments.objective != "cost"
    if trained is None or limit == 0 or (limit is None and not chosen):
        return {}
    return {
        "model": trained.module,
        "step": trained.step,
        "batches": trained.batches,
        "optimizer": model_args.optimizer(arguments.optimizer, trained.module),
        "options": model_args.measured(arguments),
        "max_replans": MAX_REPLANS if limit is None else limit,
    }


def batch_arguments(arguments: argparse.Namespace, available: PlanInputs) -> dict[str, Any]:
    """Return the arguments of `find_plan` that plan batches and recomputation, or else that run
    the plan here.
    """
    if arguments.batch is None and arguments.min_batch is not None:
        do = "add --batch global"
        raise OptionError("batches are not planned", where="--min-batch", do=do)
    if arguments.batch is None and not arguments.recompute:
        return run_arguments(arguments, available)
    if arguments.max_replans:
        name = "--recompute" if arguments.batch is None else "--batch"
        message = f"a plan with {name} cannot be run with the measured step"
        raise OptionError(message, where="--max-replans", do=f"remove it, or {name}")
    if arguments.batch is None:
        return {"recompute": True}
    return {
        "recompute": arguments.recompute,
        "batch": arguments.batch,
        "min_batch": arguments.min_batch or 1,
        "resized": resizer(available),
    }


def global_batch(text: str) -> str | tuple[int, int]:
    """Return "global", or the range of samples of a step, such as "1024-2048"."""
    if text == "global":
        return text
    least, _, most = text.partition("-")
    return int(least), int(most)


def request(arguments: argparse.Namespace, available: PlanInputs) -> dict[str, Any]:
    """Return the fields of `PlanRequest` that a command line sets, by name."""
    fields = {
        name: getattr(arguments, name) for name in ("budget", "target", "precisions", "margin")
    }
    return {
        **fields,
        "objective": _objective(arguments, available),
        "memory": _memory(arguments),
        "codecs": arguments.codecs or (),
        "inside_codecs": arguments.inside_codecs or (),
    }


def _memory(arguments: argparse.Namespace) -> Any:
    result = named(arguments.memory, "--memory")
    return result.get("", result) or None


def _objective(arguments: argparse.Namespace, available: PlanInputs) -> str:
    """Return the objective; by default "hybrid" for several classes of devices, else "fastest"."""
    if arguments.objective is not None:
        return str(arguments.objective)
    several = len(available.profiles) > 1 or (
        available.cluster is not None and len(available.cluster.devices) > 1
    )
    return "hybrid" if several else "fastest"


def limit(text: str) -> str | float:
    """Return a limit as a number, or as the name of a format."""
    try:
        return float(text)
    except ValueError:
        return text
