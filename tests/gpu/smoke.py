"""Smoke test of a GPU in ten minutes: compile and check kernels, train models, measure speed.

    make smoke-gpu                       or, in one cell of a notebook:
    python3 tests/gpu/smoke.py --install --out runs/smoke

It needs no virtual environment, pytest or transformers. A machine with a driver, torch, g++ and
nvcc suffices; the report names missing tools. Each stage is a function that runs independently. The
report is a JSON file and a text to paste.

Invariant: a stage that does not run is listed with the reason. The status is 1 if a stage failed.
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
"""Folder in which `make wheels` stores packages for machines without network."""

LIMIT = 600.0
"""Seconds after which no further stage starts."""


class SkippedError(Exception):
    """Stage that this machine cannot run."""


def lacking(device: str) -> str:
    """Return the requirement of all stages that this machine lacks, or "".

    This check precedes the installation, which takes minutes.
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
        f", CUDA_VISIBLE_DEVICES={visible!r}"
        if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None
        else ""
    )
    return (
        f"no GPU: torch {torch.__version__} for CUDA {torch.version.cuda} finds none; "
        f"{driver}{hidden}"
    )


def install(site: Path) -> None:
    """Install qsync_fx and its missing dependencies other than torch into a folder; the rest of the
    machine is unchanged.
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
    wanted, requested = [*missing, *headers], set[str]()
    while wanted:
        subprocess.run([*pip, "--no-deps", *wanted], check=True)
        requested |= {*wanted}
        wanted = [name for name in unmet(site) if name not in requested]
    # Without network no build tools can be fetched: use the installed ones.
    build = ["--no-build-isolation"] if wheels else []
    subprocess.run([*pip, "--no-deps", *build, str(ROOT)], check=True)


def unmet(site: Path) -> list[str]:
    """Return requirements of packages in a folder that neither it nor this machine satisfies.

    Pip itself would install packages again, with a numpy that shadows the one of torch. CUTLASS is
    skipped: only its headers are used.
    """
    from pip._vendor.packaging.requirements import Requirement

    missing: dict[str, None] = {}
    for package in importlib.metadata.distributions(path=[str(site)]):
        for line in (package.requires or ()) if package.name != "nvidia-cutlass" else ():
            needed = Requirement(line)
            if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
                continue
            spec = importlib.util.find_spec(re.sub(r"\W", "_", needed.name))
            if spec is None and not [
                *importlib.metadata.distributions(name=needed.name, path=[str(site), *sys.path])
            ]:
                missing[f"{needed.name}{needed.specifier}"] = None
    return [*missing]


def versions(device: Any) -> dict[str, Any]:
    """Return versions of the software and properties of the device."""
    import torch

    from qsync_fx.backend.cuda import toolchain
    from qsync_fx.backend.cuda.runtime import quantize_launch
    from qsync_fx.backend.cuda.runtime.device_state import known_of
    from qsync_fx.errors import QSyncError

    def version(tool: Callable[[], Any]) -> str:
        try:
            return str(tool())
        except QSyncError as error:
            return f"missing: {error.what}"

    report: dict[str, Any] = {
        "python": platform.python_version(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "cores": os.cpu_count(),
        "nvcc": version(toolchain.nvcc),
        "host": version(lambda: toolchain.host_compiler(toolchain.nvcc())),
        "cutlass": version(lambda: toolchain.dotted(toolchain.cutlass().version)),
    }  # fmt: skip
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        state = known_of(device)
        report |= {
            "gpu": properties.name, "capability": f"{properties.major}.{properties.minor}",
            "memory": properties.total_memory,
            "kernels": state.arch or f"none: {state.reason}",
            "lacks": quantize_launch.missing_kernels_message(device),
        }  # fmt: skip
    return report


def kernels(device: Any) -> dict[str, Any]:
    """Compile eight units for this device, one of each kind, and compare results with torch bit by
    bit.
    """
    import smoke_kernels

    from qsync_fx.backend.cuda.runtime.device_state import known_of

    state = known_of(device)
    if state.arch is None:
        raise SkippedError(state.reason)
    return smoke_kernels.each(state.arch, device)


def launches(device: Any) -> dict[str, Any]:
    """Run a product on a side stream, and replay it in a CUDA graph."""
    import smoke_kernels

    if device.type != "cuda":
        raise SkippedError("there is no stream without a GPU")
    return smoke_kernels.streams_and_graphs(device)


def training(device: Any) -> dict[str, Any]:
    """Train a small BERT and a small ResNet for three steps by "aot_eager" and Inductor. Losses
    must be near FP32's, and our operators must have run.
    """
    import smoke_models

    return smoke_models.trained(device)


def speed(device: Any) -> dict[str, Any]:
    """Measure wall-clock and device time of steps: FP32, autocast FP16, compiled too, and qsync."""
    import smoke_models

    return smoke_models.timed(device)


STAGES = {stage.__name__: stage for stage in (versions, kernels, launches, training, speed)}


HANGS = 150.0
"""Seconds after which a running stage prints its stack to standard error and continues."""


def run(device: Any, out: Path, stages: list[str], seconds: float) -> dict[str, Any]:
    """Run stages and return the report, which is written after each of them."""
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "device": str(device),
        "stages": {},
    }
    start = time.monotonic()
    for name in stages:
        since = time.monotonic()
        print(f"smoke: {name}", file=sys.stderr, flush=True)
        result: dict[str, Any]
        if since - start > seconds:
            result = {"status": "skipped", "why": f"{seconds:.0f} s were over"}
        else:
            faulthandler.dump_traceback_later(HANGS)
            try:
                result = {"status": "passed", "found": STAGES[name](device)}
            except SkippedError as why:
                result = {"status": "skipped", "why": str(why)}
            except Exception as error:  # noqa: BLE001  any error is reported, and the other stages run
                result = {
                    "status": "failed",
                    "why": f"{type(error).__name__}: {error}",
                    "trace": traceback.format_exc(),
                }
            finally:
                faulthandler.cancel_dump_traceback_later()
        report["stages"][name] = result | {"seconds": round(time.monotonic() - since, 1)}
        out.mkdir(parents=True, exist_ok=True)
        (out / "smoke.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def text(report: dict[str, Any]) -> str:
    """Return the report as text."""
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
    options = parser.parse_args(arguments)
    if lacks := lacking(options.device):
        print(f"{lacks}; nothing was tested", file=sys.stderr)
        return 1
    site = options.out.resolve() / SITE
    if options.install:
        install(site)
    for folder in (Path(__file__).resolve().parent, *([site] if site.is_dir() else [])):
        sys.path.insert(0, str(folder))
    import torch

    device = (
        torch.device(options.device, 0)
        if options.device == "cuda"
        else torch.device(options.device)
    )
    report = run(device, options.out, options.stages, options.seconds)
    print(text(report))
    print(f"\nall of it: {options.out / 'smoke.json'}")
    return int(any(stage["status"] == "failed" for stage in report["stages"].values()))


if __name__ == "__main__":
    sys.exit(main())
