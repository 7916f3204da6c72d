"""Run the GPU tests in parts with a time limit each and write a report: `make test-gpu`.

    python tests/gpu/run.py --parts kernels numerics --out runs/gpu

`tests.json` in the folder is rewritten after each part: its status, seconds, and numbers of passed,
failed and skipped tests. The folder also contains pytest's reports. The status is 1 if a part
failed, ran out of time or tested nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PARTS = ("kernels", "numerics", "models", "sanitize")
MERCY = 20.0
"""Seconds from interrupting a part to killing it."""


def commands(part: str, out: Path, jobs: int | None, seconds: float) -> list[str]:
    """Return the command line of a part."""
    if part == "kernels":
        many = [] if jobs is None else ["--jobs", str(jobs)]
        left = [
            "--seconds",
            str(max(1.0, seconds - 3 * MERCY)),
            "--json",
            str(out / "kernels.json"),
        ]
        return [sys.executable, str(HERE / "build_kernels.py"), *many, *left]
    if part == "sanitize":
        limits = ["--seconds", str(seconds / 2 - MERCY), "--json", str(out / "sanitize.json")]
        return [sys.executable, str(HERE / "sanitize.py"), *limits]
    files = (
        ("test_models.py", "test_memory.py")
        if part == "models"
        else (
            "test_gemm.py",
            "test_conv.py",
            "test_quantizer.py",
            "test_convert.py",
            "test_gradients.py",
        )
    )
    wrapper = [] if part == "models" else ["test_wrapper.py"]
    paths = [str(HERE / name) for name in (*files, *wrapper)]
    # Worker processes also isolate failures: a failed kernel makes the GPU unusable for its
    # process, and the other workers continue.
    workers = ["-n", "3" if part == "models" else "4", "--max-worker-restart", "50"]
    report = ["--junitxml", str(out / f"{part}.xml")]
    return [sys.executable, "-m", "pytest", "-q", *workers, "--timeout", "240", *report, *paths]


def run(part: str, out: Path, jobs: int | None, seconds: float) -> dict[str, Any]:
    """Run one part and return its report."""
    since = time.monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    # In xdist workers tests compile with one thread; GPU machines have more cores.
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    if part != "models":
        environment.setdefault("QSYNC_GPU_COMPILE", "0")
    process = subprocess.Popen(
        commands(part, out, jobs, seconds), cwd=ROOT, env=environment, start_new_session=True
    )
    late = False
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        late, status = True, _ended(process)
    except KeyboardInterrupt:
        _ended(process)
        raise
    report: dict[str, Any] = {
        "part": part,
        "status": status,
        "seconds": round(time.monotonic() - since, 1),
        "late": late,
    }
    tests = counted(out / f"{part}.xml")
    if tests is not None:
        report["tests"] = tests
    passed = tests is None or tests["passed"] > 0
    return report | {"ok": status == 0 and not late and passed}


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Interrupt a part and its children, so that it writes its report; kill them if that takes too
    long.
    """
    for number, patience in ((signal.SIGINT, MERCY), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(patience)
    return -1


def counted(report: Path) -> dict[str, int] | None:
    """Return the numbers of passed, failed and skipped tests in pytest's report, or None without
    one.
    """
    try:
        suites = ElementTree.parse(report).getroot().iter("testsuite")
    except (OSError, ElementTree.ParseError):
        return None
    total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for name in total:
            total[name] += int(suite.get(name, "0"))
    failed = total["failures"] + total["errors"]
    return {
        "passed": total["tests"] - failed - total["skipped"],
        "failed": failed,
        "skipped": total["skipped"],
    }


def machine() -> dict[str, Any]:
    """Return the versions and GPUs of this machine."""
    import torch

    from tests.gpu import kit

    report = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "arch": kit.arch(),
    }
    return report | {
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which, in order (all)"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "gpu", help="folder for what is found"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at once")
    parser.add_argument("--seconds", type=float, default=480.0, help="for each part (%(default)s)")
    options = parser.parse_args()
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from qsync_fx.serialization.atomic_files import write_text
    from tests.gpu import kit

    if reason := kit.missing():
        print(
            reason if reason.startswith("no GPU") else f"{reason}: nothing was tested",
            file=sys.stderr,
        )
        return 1
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"machine": machine(), "parts": []}
    for part in options.parts:
        print(f"== {part}", flush=True)
        (out / f"{part}.xml").unlink(missing_ok=True)
        summary["parts"].append(run(part, out, options.jobs, options.seconds))
        write_text(out / "tests.json", json.dumps(summary, indent=1) + "\n")
    for result in summary["parts"]:
        tests = result.get("tests")
        counts = (
            "" if tests is None else ", ".join(f"{count} {name}" for name, count in tests.items())
        )
        outcome = "ok" if result["ok"] else "OUT OF TIME" if result["late"] else "FAILED"
        print(f"{result['part']:10} {outcome:12} {result['seconds']:6.0f} s  {counts}")
    return 0 if all(result["ok"] for result in summary["parts"]) else 1


if __name__ == "__main__":
    sys.exit(main())
