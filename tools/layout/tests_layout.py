"""usage: tests_layout.py TREE - moves test folders to mirror the tree, makes tests.support a package."""

import ast
import collections
import os
import re
import subprocess
import sys
from pathlib import Path

T = Path(sys.argv[1])
DIRS = {  # longest first
    "tests/allocator/exact/bounding": "tests/allocator/milp/memory_bound",
    "tests/allocator/exact/linear": "tests/allocator/milp",
    "tests/allocator/exact": "tests/allocator/milp",
    "tests/allocator/paper": "tests/allocator/recovery",
    "tests/allocator/studies": "tests/allocator/analysis",
    "tests/backend/cuda/choose": "tests/backend/cuda/selection",
    "tests/backend/cuda/libraries": "tests/backend/cuda/kernel_build",
    "tests/backend/cuda/run": "tests/backend/cuda/runtime",
    "tests/backend/cuda/source": "tests/backend/cuda/codegen",
    "tests/backend/cuda/tune": "tests/backend/cuda/tuning",
    "tests/backend/dynamo": "tests/backend/dynamo_hooks",
    "tests/cached": "tests/plan_cache",
    "tests/codec": "tests/serialization",
    "tests/explanation": "tests/diagnostics",
    "tests/predictor/mapper": "tests/predictor/cost_mapper",
    "tests/predictor/reckoned": "tests/predictor/analytic_times",
    "tests/predictor/replay": "tests/predictor/replayer",
    "tests/predictor/sensitivity": "tests/predictor/indicator",
    "tests/profiling/gradients": "tests/profiler/links",
    "tests/profiling/statistics": "tests/profiler/sensitivity",
    "tests/profiling": "tests/profiler",
    "tests/switching": "tests/plan_switching",
}
FILES = {
    "tests/test_precision.py": "tests/test_formats.py",
    "tests/test_installed.py": "tests/test_entry_points.py",
    "tests/test_files.py": "tests/serialization/test_atomic_files.py",
    "tests/test_dot.py": "tests/diagnostics/test_dot.py",
}
moves = {}
for p in sorted((T / "tests").rglob("*")):
    if not p.is_file() or "__pycache__" in p.parts:
        continue
    rel = str(p.relative_to(T))
    new = FILES.get(rel)
    if not new:
        for a, b in DIRS.items():
            if rel.startswith(a + "/"):
                new = b + rel[len(a) :]
                break
    if new and new != rel:
        moves[rel] = new
assert len(set(moves.values())) == len(moves), [k for k, c in collections.Counter(moves.values()).items() if c > 1]
for a, b in moves.items():
    assert not (T / b).exists() or b in moves, b
    (T / b).parent.mkdir(parents=True, exist_ok=True)
    (T / a).rename(T / b)
for d, _, f in os.walk(T / "tests", topdown=False):
    if set(os.listdir(d)) <= {"__pycache__"}:
        subprocess.run(["rm", "-rf", d])
# support
SUP = {}
for p in (T / "tests/support").rglob("*.py"):
    if p.name != "__init__.py":
        SUP[p.stem] = ".".join(p.relative_to(T).with_suffix("").parts)


def rewrite(s, path):
    try:
        t = ast.parse(s)
    except SyntaxError:
        return s
    L = s.split("\n")
    ed = []
    for n in ast.walk(t):
        if isinstance(n, ast.ImportFrom) and n.level == 0 and n.module in SUP:
            i = n.lineno - 1
            L[i] = re.sub(rf"from {n.module} import", f"from {SUP[n.module]} import", L[i], 1)
        elif isinstance(n, ast.Import) and any(a.name in SUP for a in n.names):
            i = n.lineno - 1
            ind = " " * n.col_offset
            out = []
            for a in n.names:
                if a.name in SUP:
                    pkg, _, m = SUP[a.name].rpartition(".")
                    out.append(f"{ind}from {pkg} import {m}" + (f" as {a.asname}" if a.asname else ""))
                else:
                    out.append(f"{ind}import {a.name}" + (f" as {a.asname}" if a.asname else ""))
            tail = L[i][n.end_col_offset :]
            out[-1] += tail
            L[i] = "\n".join(out)
    s = "\n".join(L)
    s = re.sub(
        r"^pytest_plugins = \[(.*)\]",
        lambda m: (
            "pytest_plugins = ["
            + ", ".join('"' + SUP.get(x.strip().strip('"'), x.strip().strip('"')) + '"' for x in m.group(1).split(","))
            + "]"
        ),
        s,
        flags=re.M,
    )
    return s


for top in ("tests", "benchmarks", "examples"):
    for p in (T / top).rglob("*.py"):
        s = p.read_text()
        r = rewrite(s, p)
        if r != s:
            p.write_text(r)
for d in {p.parent for p in (T / "tests/support").rglob("*.py")} | {T / "tests/support", T / "tests"}:
    i = d / "__init__.py"
    if not i.exists():
        i.write_text("")
(T / "tests/support/__init__.py").write_text(
    '"""Helpers that tests share: rank scripts, models, problems, emulators; imported as `tests.support...`."""\n'
)
# gpu package
# paths in texts
pats = [(a, b) for a, b in FILES.items()] + [(a + "/", b + "/") for a, b in DIRS.items()]
pat = re.compile("|".join(re.escape(a) for a, _ in pats))
tab = dict(pats)
for p in [
    *T.rglob("*.md"),
    T / "Makefile",
    T / "pyproject.toml",
    *(T / "tests").rglob("*.py"),
    *(T / "benchmarks").rglob("*.py"),
    *(T / "qsync_fx").rglob("*.py"),
    *(T / "cpp").rglob("*.h"),
]:
    if ".venv" in p.parts or not p.is_file():
        continue
    s = p.read_text()
    r = pat.sub(lambda m: tab[m.group(0)], s)
    if r != s:
        p.write_text(r)
# pyproject pythonpath
p = T / "pyproject.toml"
s = p.read_text()
s = re.sub(
    r"# What tests share lies in support/.*\npythonpath = \[[^\]]*\]",
    '# Tests import shared helpers as tests.support, and what they share with benchmarks as benchmarks.support.\npythonpath = ["."]',
    s,
)
p.write_text(s)


def sub(path, *pairs):
    p = T / path
    s = p.read_text()
    for a, b in pairs:
        if a not in s:
            print("NOT FOUND", path, a[:60])
        s = s.replace(a, b)
    p.write_text(s)


sub(
    "tests/support/processes/ranks.py",
    (
        "SUPPORT = Path(__file__).resolve().parents[1]\n",
        "SUPPORT = Path(__file__).resolve().parents[1]\nROOT = SUPPORT.parents[1]\n",
    ),
    ('os.pathsep.join(sorted({str(path.parent) for path in SUPPORT.rglob("*.py")}))', "str(ROOT)"),
    (
        "What they run lies in ../communication and ../distributed, and imports what lies in any folder of tests/support by its bare name.",
        "The scripts are in ../communication and ../distributed; PYTHONPATH is the root of the repository, so that they import tests.support.",
    ),
)
sub(
    "tests/gpu/sanitize.py",
    (
        """sys.path.extend(
    str(Path(__file__).resolve().parents[1] / place) for place in (".", "support/cuda/on_cpu", "support/models")
)""",
        """sys.path.append(str(Path(__file__).resolve().parents[2]))""",
    ),
)
sub(
    "tests/gpu/build_kernels.py",
    (
        """sys.path.extend(
    str(Path(__file__).resolve().parents[1] / place) for place in (".", "support/cuda/on_cpu", "support/models")
)""",
        """sys.path.append(str(Path(__file__).resolve().parents[2]))""",
    ),
)

for p in [*(T / "tests").rglob("*.py"), *(T / "benchmarks").rglob("*.py")]:
    s = p.read_text()
    r = re.sub(r"^(\s*)from gpu import", r"\1from tests.gpu import", s, flags=re.M).replace(
        '"gpu.kit"', '"tests.gpu.kit"'
    )
    if r != s:
        p.write_text(r)
sub(
    "tests/gpu/run.py",
    (
        """sys.path.extend(
        str(Path(__file__).resolve().parents[1] / place) for place in (".", "support/cuda/on_cpu", "support/models")
    )""",
        "sys.path.append(str(Path(__file__).resolve().parents[2]))",
    ),
)
sub(
    "tests/backend/cuda/tuning/test_cuda_tables.py",
    (
        '{str(Path(__file__).parents[3] / "support" / "cuda")!r})\nfrom tuning_samples',
        "{str(Path(__file__).parents[4])!r})\nfrom tests.support.cuda.tuning_samples",
    ),
    ("table.save(Path", "tuning.save_table(Path"),
    ("from qsync_fx.backend.cuda.tuning import table\n", "from qsync_fx.backend.cuda import tuning\n"),
)
sub(
    "tests/backend/cuda/kernel_build/test_cuda_cache.py",
    (
        '{"PYTHONPATH": str(Path(__file__).parents[3] / "support" / "cuda" / "compiled")}',
        '{"PYTHONPATH": str(Path(__file__).parents[4])}',
    ),
)
sub(
    "tests/backend/cuda/kernel_build/test_cuda_builders.py",
    ("from small_units import", "from tests.support.cuda.compiled.small_units import"),
    ('tests=str(Path(__file__).parents[3] / "support" / "cuda" / "compiled")', "tests=str(Path(__file__).parents[4])"),
)
sub(
    "tests/backend/cuda/test_gpu_selection.py",
    ('[str(TESTS), str(TESTS / "support/cuda/on_cpu"), *sys.path]', "[str(TESTS.parent), *sys.path]"),
)
sub(
    "tests/test_install.py",
    (
        "sys.path.append({str(ROOT / 'tests/support/cuda/compiled')!r}); from small_units",
        "sys.path.append({str(ROOT)!r}); from tests.support.cuda.compiled.small_units",
    ),
)
