"""Profiles of a model at batch sizes between measured ones.

Invariants: the time of an operator under a plan is linear in the batch between neighbouring
measured sizes, is never negative, and never decreases with the batch. Beyond the measured sizes,
the line of the nearest two continues. Sizes of tensors and operations follow the same lines, which
is exact for sizes that are affine in the batch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from qsync_fx.errors import ProfileError, shown
from qsync_fx.graph.cost_algebra import Cost
from qsync_fx.predictor.memory.peak_memory import LossMemory
from qsync_fx.predictor.model.model_file import stored
from qsync_fx.predictor.model.model_graph import ModelGraph, ModelOperator
from qsync_fx.profiler.profile import BatchMeasurement, Profile
from qsync_fx.profiler.run_statistics import MeasuredRun

_NUMBER = re.compile(r"\d+(?=[,\]])")


class BatchInterpolation:
    """Profiles at any batch size, from a profile with two or more measured sizes.

    Raises `ProfileError` for a single size, or if an operator differs between sizes.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._measured = sorted(measurements(profile), key=lambda item: item.batch_size)
        self._sizes = [item.batch_size for item in self._measured]
        if len(self._sizes) < 2:
            do = "measure another one: measure(..., batch_sizes=(8, 32)), or qsync measure "
            message = f"the profile covers one batch size, {self._sizes[0]}"
            raise ProfileError(message, do=f"{do}MODULE:CALLABLE --batch-sizes 8,32")
        first, *others = self._measured
        for other in others:
            _check_same_operators(first, other)
        self._runs = _common_runs(self._measured)
        self._seconds = [
            _monotone(np.stack([_seconds(run) for run in runs])) for runs in self._runs
        ]

    def at(self, batch: int) -> Profile:
        """Return the profile for a batch size; one that was not measured is interpolated.

        User plans that were measured at this size only stay in the profile.
        """
        if batch < 1:
            raise ProfileError(f"a batch of {batch} samples is impossible", do="give 1 or more")
        nearest = min(self._measured, key=lambda item: abs(item.batch_size - batch))
        model, graph, loss, runs = nearest.model, nearest.stored, nearest.loss_memory, []
        if nearest.batch_size == batch:
            common = [run.label for each in self._runs for run in each]
            runs = [run for run in nearest.runs if run.label not in common]
        else:
            model = replace(model, digest="")
            graph, loss = stored(self._graph(batch)), self._loss(batch)
        sensitivity = self._profile.sensitivity
        if sensitivity is not None and self._profile.batch_size is not None:
            sensitivity = sensitivity.at_batch(self._profile.batch_size, batch)
        place = self._measured.index(nearest)
        return replace(
            self._profile,
            model=model,
            stored=graph,
            runs=[*(self._run(index, place, batch) for index in range(len(self._runs))), *runs],
            sensitivity=sensitivity,
            fingerprint=self._profile.fingerprint if batch == self._profile.batch_size else None,
            loss_memory=loss,
            batch_size=batch,
            batches=[item for item in self._measured if item.batch_size != batch],
        )

    def _run(self, index: int, nearest: int, batch: int) -> MeasuredRun:
        """Return a run at a batch size, with the relative spread of the nearest size's run."""
        runs = self._runs[index]
        like, (lower, share) = runs[nearest], self._segment(batch)
        each = self._seconds[index]
        line = (each[lower] + share * (each[lower + 1] - each[lower])).clip(min=0).tolist()
        count, calls = len(like.operators), len(like.quantized)
        forward, backward = line[:count], line[count : 2 * count]
        quantized = [
            replace(call, seconds=seconds, numel=self._size([c.numel for c in same], batch))
            for call, seconds, same in zip(
                like.quantized,
                line[2 * count : 2 * count + calls],
                zip(*(run.quantized for run in runs), strict=True),
                strict=True,
            )
        ]
        outside = line[-2:]
        forward_s, backward_s = outside[0] + sum(forward), outside[1] + sum(backward)
        forward_s += sum(call.seconds for call in quantized if not call.backward)
        backward_s += sum(call.seconds for call in quantized if call.backward)
        passes, optimizer = like.passes, self._profile.optimizer_seconds
        spread = [(step[0] + step[1]) / passes for step in like.steps]
        return replace(
            like,
            steps=[(forward_s * ratio, backward_s * ratio, optimizer) for ratio in spread],
            peak_bytes=self._size([run.peak_bytes for run in runs], batch),
            operators=[
                replace(item, forward=before, backward=after)
                for item, before, after in zip(like.operators, forward, backward, strict=True)
            ],
            quantized=quantized,
        )

    def _graph(self, batch: int) -> ModelGraph:
        """Return the model graph for a batch size that was not measured."""
        graphs = [item.graph for item in self._measured]

        def operator(same: Sequence[ModelOperator]) -> ModelOperator:
            costs = {state: cost([item.costs[state] for item in same]) for state in same[0].costs}
            return replace(same[0], shape=shape([item.shape for item in same]), costs=costs)

        def cost(same: Sequence[Cost]) -> Cost:
            sizes = (
                self._size(sizes, batch) for sizes in zip(*(c.sizes for c in same), strict=True)
            )
            return same[0].each(lambda _: next(sizes))

        def shape(same: Sequence[str]) -> str:
            sides = zip(*(map(int, _NUMBER.findall(text)) for text in same), strict=True)
            numbers = (str(self._size(each, batch)) for each in sides)
            return _NUMBER.sub(lambda _: next(numbers), same[0])

        values = tuple(
            replace(
                same[0],
                numel=self._size([value.numel for value in same], batch),
                fixed=self._size([value.fixed for value in same], batch),
            )
            for same in zip(*(graph.values for graph in graphs), strict=True)
        )
        operators = map(operator, zip(*(graph.operators for graph in graphs), strict=True))
        return replace(graphs[0], values=values, operators=tuple(operators))

    def _loss(self, batch: int) -> LossMemory | None:
        losses = [item.loss_memory for item in self._measured if item.loss_memory is not None]
        if len(losses) < len(self._measured):
            return None
        return LossMemory(
            self._size([loss.held for loss in losses], batch),
            self._size([loss.most for loss in losses], batch),
        )

    def _segment(self, batch: int) -> tuple[int, float]:
        """Return the index of the lower size of a segment, and the batch's position in it."""
        upper = int(np.clip(np.searchsorted(self._sizes, batch), 1, len(self._sizes) - 1))
        low, high = self._sizes[upper - 1], self._sizes[upper]
        return upper - 1, (batch - low) / (high - low)

    def _size(self, sizes: Sequence[int], batch: int) -> int:
        """Return a size at a batch from those at the measured batches, rounded up."""
        if len(set(sizes)) == 1:
            return sizes[0]
        lower, _ = self._segment(batch)
        low, high = self._sizes[lower], self._sizes[lower + 1]
        more = (sizes[lower + 1] - sizes[lower]) * (batch - low)
        return max(0, sizes[lower] - (-more // (high - low)))


def measurements(profile: Profile) -> list[BatchMeasurement]:
    """Return the measurements of a profile at each batch size; raise if its size is unknown."""
    if profile.batch_size is None:
        message = "the batch size of the profile is unknown"
        raise ProfileError(message, do="measure the model again with this version of qsync_fx")
    first = BatchMeasurement(
        profile.batch_size, profile.model, profile.stored, profile.runs, profile.loss_memory
    )
    return [first, *profile.batches]


def merge_batch_sizes(profiles: Sequence[Profile]) -> Profile:
    """Return profiles that differ only in batch size as one.

    It has the links, codecs and sensitivity of the first profile.

    Raises:
        ProfileError: the profiles differ in more than the batch, or two have the same batch size.
    """
    first, *others = profiles
    for other in others:
        for name in ("machine", "precisions", "optimizer", "memory_budget"):
            values = getattr(first, name), getattr(other, name)
            if values[0] != values[1]:
                message = f"profiles of one device class have another {name}: "
                message += f"{shown(str(values[0]))} and {shown(str(values[1]))}"
                raise ProfileError(message, where="profiles", do="measure all batch sizes alike")
        _check_same_model(first, other)
    batches = [item for other in others for item in measurements(other)]
    result = replace(first, batches=[*first.batches, *batches])
    sizes = [item.batch_size for item in measurements(result)]
    if twice := {size for size in sizes if sizes.count(size) > 1}:
        message = f"two profiles have {min(twice)} samples in a batch"
        raise ProfileError(message, where="profiles", do="give one profile for each batch size")
    if others:
        BatchInterpolation(result)
    return result


def _check_same_model(first: Profile, other: Profile) -> None:
    names = [
        f"{item.name} of {item.parameters} parameters ({item.conditions or 'default options'})"
        for item in (first.model, other.model)
    ]
    if names[0] != names[1]:
        message = f"profiles of one device class are of two models: {' and '.join(names)}"
        raise ProfileError(message, where="profiles", do="give profiles of one model")


def _check_same_operators(first: BatchMeasurement, other: BatchMeasurement) -> None:
    """Raise `ProfileError` for the first operator or tensor that differs by more than sizes."""
    graphs = first.graph, other.graph
    ids = [[operator.id for operator in graph.operators] for graph in graphs]
    where = next((a for a, b in zip(*ids, strict=False) if a != b), None)
    if where is None and len(ids[0]) != len(ids[1]):
        where = max(ids, key=len)[min(map(len, ids))]
    if where is None:
        pairs = zip(*(map(_without_sizes, graph.operators) for graph in graphs), strict=True)
        where = next((a.id for (a, x), (b, y) in pairs if (a, x) != (b, y)), None)
    if where is None:
        values = ([replace(value, numel=0, fixed=0) for value in graph.values] for graph in graphs)
        where = next((a.name for a, b in zip(*values, strict=True) if a != b), None)
    rest = [(graph.formats, graph.parameters, graph.outputs, graph.device) for graph in graphs]
    if where is None and rest[0] != rest[1]:
        where = "the formats, parameters or outputs of the model"
    if where is not None:
        raise ProfileError(
            f"with {other.batch_size} samples the model differs from that with {first.batch_size} "
            "in more than sizes",
            where=where,
            do="measure batch sizes at which the model runs the same operators, above 1",
        )


def _without_sizes(operator: ModelOperator) -> tuple[ModelOperator, object]:
    costs = [(state, list(cost.saved)) for state, cost in operator.costs.items()]
    return replace(operator, shape=_NUMBER.sub("", operator.shape), costs={}), costs


def _common_runs(measured: Sequence[BatchMeasurement]) -> list[list[MeasuredRun]]:
    """Return the runs of each plan that was measured at all batch sizes, by plan and size.

    Runs have the calls of quantizers only if they are the same at all sizes.
    """
    result = []
    for run in measured[0].runs:
        same = [
            other
            for item in measured
            for other in item.runs
            if (other.label, other.states) == (run.label, run.states)
        ]
        if len(same) < len(measured):
            continue
        calls = {tuple((c.operator, c.before, c.after) for c in each.quantized) for each in same}
        if len(calls) > 1:
            same = [replace(each, quantized=[]) for each in same]
        result.append(same)
    if not result:
        do = "measure all batch sizes in the same formats"
        raise ProfileError("no plan was measured at all batch sizes", do=do)
    return result


def _seconds(run: MeasuredRun) -> NDArray[np.float64]:
    """Return all times of a run: operators forward, backward, quantizers, outside operators."""
    forward = [item.forward for item in run.operators]
    backward = [item.backward for item in run.operators]
    quantized = [call.seconds for call in run.quantized]
    return np.array([*forward, *backward, *quantized, *run.outside])


def _monotone(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the nearest times that do not decrease with the batch: isotonic regression.

    `seconds` has shape [batch sizes, times]; see Robertson et al., Order Restricted Statistical
    Inference, 1988, the max-min formula.
    """
    count = len(seconds)
    means = [
        [seconds[low : high + 1].mean(axis=0) for high in range(low, count)] for low in range(count)
    ]
    return np.stack(
        [
            np.max([np.min(means[low][index - low :], axis=0) for low in range(index + 1)], axis=0)
            for index in range(count)
        ]
    )
