"""First contact with a GPU, in ten minutes: does what we have compile, compute and train there, and
how fast?

    make smoke-gpu                       or, in one cell of a notebook:
    python3 tests/gpu/smoke.py --install --out runs/smoke

No virtual environment, pytest or transformers is needed: a stock machine with a driver, torch, g++
and nvcc will do, and without nvcc it says what is had without. Each stage is a function below,
runs by itself, and goes into one JSON; the text at the end is what to paste into a report.

Invariant: a stage that does not run is named with the reason, and the status is 1 where one has
    failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SITE = "site"
WHEELS = ".wheels"
"""Where `make wheels` has put what a machine without network lacks."""

LIMIT = 600.0
"""Seconds after which no stage is started any more."""


class SkippedError(Exception):
    """A stage that this machine has nothing for."""


def lacking(device: str) -> str:
    """Says what is not there that every stage needs; "" where nothing is.

    Asked before anything is installed, which takes minutes.
    """
    if importlib.util.find_spec("torch") is None:
        return (
            f"no torch for {sys.executable}: name a Python that has it, as in make smoke-gpu "
            "GPU_PYTHON=/usr/bin/python3"
        )
    import torch

    if device != "cuda" or torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"no GPU: torch {torch.__version__} is built without CUDA"
    driver = (
        "nvidia-smi tells what the driver finds"
        if shutil.which("nvidia-smi")
        else "there is no driver (nvidia-smi)"
    )
    hidden = (
        f", CUDA_VISIBLE_DEVICES={seen!r}"
        if (seen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None
        else ""
    )
    return (
        f"no GPU: torch {torch.__version__} for CUDA {torch.version.cuda} finds none; "
        f"{driver}{hidden}"
    )


def install(site: Path) -> None:
    """Puts qsync_fx, and what of it is missing beside this torch, into a folder of its own; nothing
    else on the machine changes.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [name for name in project["dependencies"] if not name.startswith("torch")]
    modules = {name: name.split(">")[0].split("[")[0].replace("-", "_") for name in needed}
    missing = [name for name, module in modules.items() if importlib.util.find_spec(module) is None]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "-q",
        "--target",
        str(site),
        "--upgrade",
    ]
    if wheels := [*(ROOT / WHEELS).glob("*.whl")]:
        pip += [
            "--no-index",
            "--find-links",
            str(wheels[0].parent),
            "-c",
            str(ROOT / "constraints.txt"),
        ]
    headers = (
        []
        if importlib.util.find_spec("cutlass_library")
        else project["optional-dependencies"]["cuda"][:1]
    )
    wanted, asked = [*missing, *headers], set[str]()
    while wanted:
        subprocess.run([*pip, "--no-deps", *wanted], check=True)
        asked |= {*wanted}
        wanted = [name for name in unmet(site) if name not in asked]
    # Without network nothing can be fetched to build with: what is on this machine has to do.
    build = ["--no-build-isolation"] if wheels else []
    subprocess.run([*pip, "--no-deps", *build, str(ROOT)], check=True)


def unmet(site: Path) -> list[str]:
    """Returns what packages in a folder require that is neither there nor on this machine.

    Pip itself would put what is here in the folder again, numpy in front of the one that torch is
    used with. Of CUTLASS nothing but headers is read.
    """
    from pip._vendor.packaging.requirements import Requirement

    found: dict[str, None] = {}
    for package in importlib.metadata.distributions(path=[str(site)]):
        for line in (package.requires or ()) if package.name != "nvidia-cutlass" else ():
            needed = Requirement(line)
            if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
                continue
            here = importlib.util.find_spec(re.sub(r"\W", "_", needed.name))
            if here is None and not [
                *importlib.metadata.distributions(name=needed.name, path=[str(site), *sys.path])
            ]:
                found[f"{needed.name}{needed.specifier}"] = None
    return [*found]


def versions(device: Any) -> dict[str, Any]:
    """What this machine is."""
    import torch

    from qsync_fx.backend.cuda import toolchain
    from qsync_fx.backend.cuda.runtime import quantize_launch
    from qsync_fx.backend.cuda.runtime.device_state import known_of
    from qsync_fx.errors import QSyncError

    def told(tool: Callable[[], Any]) -> str:
        try:
            return str(tool())
        except QSyncError as error:
            return f"missing: {error.what}"

    found: dict[str, Any] = {
        "python": platform.python_version(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "cores": os.cpu_count(),
        "nvcc": told(toolchain.nvcc),
        "host": told(lambda: toolchain.host_compiler(toolchain.nvcc())),
        "cutlass": told(lambda: toolchain.dotted(toolchain.cutlass().version)),
    }  # fmt: skip
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        known = known_of(device)
        found |= {
            "gpu": properties.name, "capability": f"{properties.major}.{properties.minor}",
            "memory": properties.total_memory,
            "kernels": known.arch or f"none: {known.reason}", "lacks": quantize_launch.told(device),
        }  # fmt: skip
    return found


def kernels(device: Any) -> dict[str, Any]:
    """Eight units for this device, one of each kind: compiled, and to the last bit what torch
    computes.
    """
    import smoke_kernels

    from qsync_fx.backend.cuda.runtime.device_state import known_of

    known = known_of(device)
    if known.arch is None:
        raise SkippedError(known.reason)
    return smoke_kernels.each(known.arch, device)


def launches(device: Any) -> dict[str, Any]:
    """A product on a stream of its own, and replayed in a CUDA graph."""
    import smoke_kernels

    if device.type != "cuda":
        raise SkippedError("there is no stream without a GPU")
    return smoke_kernels.streams_and_graphs(device)


def training(device: Any) -> dict[str, Any]:
    """Three steps of a small BERT and a small ResNet, by "aot_eager" and by Inductor: loss near
    FP32's, and our operators ran.
    """
    import smoke_models

    return smoke_models.trained(device)


def speed(device: Any) -> dict[str, Any]:
    """Wall-clock and device time of steps: FP32, autocast FP16 eager and compiled, qsync."""
    import smoke_models

    return smoke_models.timed(device)


STAGES = {stage.__name__: stage for stage in (versions, kernels, launches, training, speed)}


HANGS = 150.0
"""Seconds after which a stage that still runs says where it is, on standard error, and goes on."""


def run(device: Any, out: Path, stages: list[str], seconds: float) -> dict[str, Any]:
    """Runs stages and returns the report, which is written after each of them."""
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "device": str(device),
        "stages": {},
    }
    start = time.monotonic()
    for name in stages:
        since = time.monotonic()
        print(f"smoke: {name}", file=sys.stderr, flush=True)
        found: dict[str, Any]
        if since - start > seconds:
            found = {"status": "skipped", "why": f"{seconds:.0f} s were over"}
        else:
            faulthandler.dump_traceback_later(HANGS)
            try:
                found = {"status": "passed", "found": STAGES[name](device)}
            except SkippedError as why:
                found = {"status": "skipped", "why": str(why)}
            except Exception as error:  # noqa: BLE001  whatever it is, the other stages run, and it is told
                found = {
                    "status": "failed",
                    "why": f"{type(error).__name__}: {error}",
                    "trace": traceback.format_exc(),
                }
            finally:
                faulthandler.cancel_dump_traceback_later()
        report["stages"][name] = found | {"seconds": round(time.monotonic() - since, 1)}
        out.mkdir(parents=True, exist_ok=True)
        (out / "smoke.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def text(report: dict[str, Any]) -> str:
    """Returns what to paste into a report."""
    lines = [f"qsync_fx smoke test, {report['date']}, {report['device']}"]
    for name, stage in report["stages"].items():
        lines.append(
            f"{stage['status']:>8}  {name} ({stage['seconds']} "
            f"s){': ' + stage['why'] if 'why' in stage else ''}"
        )
        for key, value in stage.get("found", {}).items():
            lines.append(f"{'':>10}{key}: {value if isinstance(value, str) else json.dumps(value)}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "smoke")
    parser.add_argument(
        "--install",
        action="store_true",
        help="put qsync_fx and what it lacks into a folder in --out, and use it",
    )
    parser.add_argument("--device", default="cuda", help="cpu shows that this script runs")
    parser.add_argument("--stages", nargs="*", choices=STAGES, default=list(STAGES))
    parser.add_argument("--seconds", type=float, default=LIMIT)
    given = parser.parse_args(arguments)
    if lacks := lacking(given.device):
        print(f"{lacks}; nothing was tested", file=sys.stderr)
        return 1
    site = given.out.resolve() / SITE
    if given.install:
        install(site)
    for folder in (Path(__file__).resolve().parent, *([site] if site.is_dir() else [])):
        sys.path.insert(0, str(folder))
    import torch

    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device(given.device)
    report = run(device, given.out, given.stages, given.seconds)
    print(text(report))
    print(f"\nall of it: {given.out / 'smoke.json'}")
    return int(any(stage["status"] == "failed" for stage in report["stages"].values()))


if __name__ == "__main__":
    sys.exit(main())
