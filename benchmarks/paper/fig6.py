"""QSync's Fig. 6: predicted timeline of a step with the uniform plan and with the recovered plan.
The model is VGG-16-BN on ClusterA (16 V100 and 16 T4 of the catalog), with the sensitivities of
benchmarks/plans/fleets.py. The recovered plan may take no longer than the uniform plan. "step_ms"
and "waiting_*_ms" are predicted times, "variance" is the plan's, and "operators" counts the T4's
formats. --picture draws the tracks of the JSON files in --timelines, which ui.perfetto.dev opens.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from qsync_fx.allocator.evaluator import PlanEvaluator
from qsync_fx.allocator.milp.milp_allocator import MilpAllocator
from qsync_fx.timeline.timeline import Timeline

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import plots
from benchmarks.plans.fleet_models import CASES, QUICK
from benchmarks.plans.fleets import COUNTS, narrow, problem, traced
from benchmarks.plans.trained_sensitivity import FOLDER_OPTION, trained_sensitivity
from benchmarks.support.harness import Row, arguments, by_size, finish, folder, to_write

COLORS = {
    "forward": plots.SKY,
    "backward": plots.BLUE,
    "cast": plots.PURPLE,
    "outside": plots.GREY,
    "optimizer": plots.GREEN,
    "waiting": plots.ORANGE,
    "sending": plots.RED,
}


def main() -> None:
    options = arguments(
        __doc__,
        folder=FOLDER_OPTION,
        timelines={
            "type": folder,
            "default": "runs/paper",
            "help": "where timelines for ui.perfetto.dev are written (%(default)s)",
        },
        picture={"type": to_write, "help": "where the picture is written (SVG)"},
    )
    model = by_size(options.quick, "resnet", "vgg16bn")
    case = (by_size(options.quick, QUICK, CASES))[model]
    graphs, sensitivity = traced(case), trained_sensitivity(model, case, "t4", options)
    planning = problem(graphs, sensitivity, case.batch, COUNTS[0], None)
    rows: list[Row] = []
    timelines: dict[str, Timeline] = {}
    for name, answer in {
        "uniform": narrow(planning),
        "ours": MilpAllocator().allocate(planning),
    }.items():
        timelines[name] = timeline = PlanEvaluator(planning, answer.plans).timeline
        timeline.save_perfetto(options.timelines / f"fig6-{name}.json")
        rows.append(
            {
                "model": model,
                "plan": name,
                "step_ms": 1e3 * timeline.seconds,
                **{
                    f"waiting_{device}_ms": 1e3 * seconds
                    for device, seconds in timeline.waiting.items()
                },
                "variance": answer.evaluation.variance,
                "operators": dict(Counter(answer.plans["t4"].values())),
            }
        )
    if options.picture:
        plots.save(draw(timelines), options.picture)
    finish(options, rows)


def draw(timelines: Mapping[str, Timeline]) -> Any:
    """Return a figure with a panel per step and a track per device class and activity."""
    figure, panels = plt.subplots(len(timelines), figsize=(8, 1.9 * len(timelines)), sharex=True)
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        tracks = {
            f"{cluster.count} {device}, {activity}": pieces[device]
            for device, cluster in timeline.played.cluster.devices.items()
            for activity, pieces in (
                ("computation", timeline.computing),
                ("communication", timeline.communicating),
            )
        }
        for track, pieces in tracks.items():
            axes.barh(
                [track] * len(pieces),
                [1e3 * (piece.end - piece.begin) for piece in pieces],
                left=[1e3 * piece.begin for piece in pieces],
                color=[COLORS[piece.kind] for piece in pieces],
            )
        axes.invert_yaxis()
        axes.set_title(f"{name}: {1e3 * timeline.seconds:.1f} ms per step")
    panels[-1].set_xlabel("time, ms")
    legend = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    figure.legend(
        handles=legend,
        loc="outside lower center",
        ncols=len(legend),
        handlelength=1,
        columnspacing=1,
    )
    return figure


if __name__ == "__main__":
    main()
