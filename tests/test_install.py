"""Installation as a wheel and in editable mode, from a folder with a space in its name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import Distribution, distributions
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

import qsync_fx
from qsync_fx.backend.cuda.toolchain import toolchain
from qsync_fx.errors import ToolchainError
from tests.support import tiers

ROOT = Path(__file__).resolve().parent.parent
SITE = sysconfig.get_path("platlib")


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, (
        f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )
    return done.stdout


def python(code: str, target: Path) -> str:
    # Without `site`, the environment's installation of qsync_fx is not imported. Torch comes from
    # SITE.
    before = f"import site, sys; sys.path.append({SITE!r}); site.addsitedir({str(target)!r}); "
    before += f"sys.path.insert(0, {str(target)!r}); "
    return run(sys.executable, "-S", "-c", before + code, cwd=target)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files in a clone."""
    copy = tmp_path_factory.mktemp("install") / "a clone"
    unwanted = ignore_patterns("__pycache__", "*.so", ".*_cache", ".hypothesis")
    copy.mkdir()
    for name in ("qsync_fx", "passes", "backend", "cpp"):
        copytree(ROOT / name, copy / name, symlinks=True, ignore=unwanted)
    for path in ROOT.glob("*"):
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        "out",
        ".",
        cwd=tree,
    )
    (path,) = (tree / "out").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    target = wheel.parent.parent.parent / "some place"
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(target),
        str(wheel),
        cwd=wheel.parent,
    )
    return target


def distribution(target: Path) -> Distribution:
    (result,) = distributions(path=[str(target)])
    return result


@tiers.ALL
def test_wheel_contains_only_the_package(tree: Path, wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {
        "qsync.py",  # the name of a torch log
        "qsync_fx",
        f"qsync_fx-{qsync_fx.__version__}.dist-info",
    }
    for folder, home in (
        ("qsync_fx", "qsync_fx"),
        ("passes", "qsync_fx/passes"),
        ("backend", "qsync_fx/backend"),
    ):
        sources = {
            f"{home}/{path.relative_to(tree / folder).as_posix()}"
            for path in (tree / folder).rglob("*.py*")
        }
        assert sources
        assert sources <= names
    catalog = {path.name for path in (tree / "qsync_fx/devices/catalog").iterdir()}
    assert "t4.toml" in catalog
    assert {f"qsync_fx/devices/catalog/{name}" for name in catalog} <= names
    assert {"qsync_fx/py.typed", "qsync_fx/_C.pyi"} <= names
    assert any(name.endswith("/LICENSE") for name in names)
    assert sum(name.startswith("qsync_fx/_C.") and name.endswith(".so") for name in names) == 1
    headers = (path for path in (tree / "cpp/cutlass").rglob("*") if path.is_file())
    templates = {
        f"qsync_fx/backend/cuda/templates/{path.relative_to(tree / 'cpp/cutlass').as_posix()}"
        for path in headers
    }
    assert "qsync_fx/backend/cuda/templates/abi.h" in templates <= names
    assert not [name for name in names - templates if name.endswith((".cpp", ".h", ".pyc"))]


@tiers.ALL
def test_wheel_metadata(installed: Path) -> None:
    package = distribution(installed)
    assert package.name == "qsync-fx"
    assert package.version == qsync_fx.__version__
    needed = {
        requirement.split(";")[0].strip()
        for requirement in package.requires or ()
        if "extra" not in requirement
    }
    assert needed == {
        "torch<2.16,>=2.11",
        "cattrs>=24.1",
        "filelock",
        "numpy",
        "networkx",
        "platformdirs>=4.12",
        "sympy",
        "highspy<1.16,>=1.9",
        "rich",
    }
    entries = {(entry.group, entry.name): entry.value for entry in package.entry_points}
    assert entries == {
        ("torch_dynamo_backends", "qsync"): "qsync_fx.backend.entry:qsync",
        ("console_scripts", "qsync"): "qsync_fx.cli:main",
    }


@tiers.ALL
def test_the_wheel_imports(installed: Path) -> None:
    code = (
        "import qsync_fx, qsync_fx.passes, qsync_fx.backend, qsync_fx._C as native; "
        "from importlib.metadata import entry_points; "
        "(entry,) = entry_points(group='torch_dynamo_backends', name='qsync'); "
        "print(qsync_fx.__file__, qsync_fx.passes.__file__, qsync_fx.backend.__file__, "
        "native.__file__, sep='\\n'); "
        "print(native.isa(), callable(entry.load()))"
    )
    *files, last = python(code, installed).splitlines()
    assert len(files) == 4
    assert all(file.startswith(str(installed / "qsync_fx")) for file in files)
    assert last.endswith("True")


TRAIN = """
import shutil, torch, qsync_fx
from qsync_fx import _C

assert not any(map(shutil.which, ("c++", "g++", "gcc", "cc", "clang++")))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
options = {"precision": "int8", "inner_backend": "aot_eager"}
compiled = torch.compile(model, backend="qsync", options=options)
optimizer = qsync_fx.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    loss = compiled(torch.ones(16, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(float(loss))
operators = qsync_fx.plan_coverage(compiled).operators
print({str(ran.precision) for ran in operators if ran.kind == "adjustable"})
print(qsync_fx.__file__, _C.__file__, sep="\\n")
"""


@tiers.ALL
def test_the_repaired_wheel_trains_in_a_fresh_environment_without_a_compiler(
    wheel: Path, tmp_path: Path
) -> None:
    """Repaired as by `make wheel`; a .pth file adds the torch of the tests."""
    pytest.importorskip("auditwheel")
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    repair = [str(tools / "auditwheel"), "repair", "--wheel-dir", str(tmp_path), str(wheel)]
    subprocess.run(repair, env=environment, check=True, capture_output=True)
    (repaired,) = tmp_path.glob("*.whl")
    assert "manylinux" in repaired.name
    fresh = tmp_path / "fresh"
    run(sys.executable, "-m", "venv", "--without-pip", str(fresh), cwd=tmp_path)
    interpreter = str(fresh / "bin" / "python")
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(interpreter, "-c", code, cwd=tmp_path).strip())
    (site / "torch_of_the_tests.pth").write_text(f"{SITE}\n")
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet"]
    run(*pip, "--no-deps", str(repaired), cwd=tmp_path)
    for name in ("PYTHONPATH", "CXX", "CC"):
        environment.pop(name, None)
    training = subprocess.run(
        [interpreter, "-c", TRAIN],
        env={**environment, "PATH": str(fresh / "bin")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert training.returncode == 0, training.stderr[-3000:]
    first, second, formats, *files = training.stdout.splitlines()
    assert float(second) < float(first)
    assert formats == "{'int8'}"
    assert all(file.startswith(str(site)) for file in files)


@tiers.ALL
def test_the_wheel_compiles_cuda_kernels(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel contains the headers. Paths of headers and of the cache may contain spaces."""
    try:
        toolchain()
    except ToolchainError as error:
        pytest.skip(error.what)
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path / "a cache"))
    monkeypatch.delenv("QSYNC_KERNELS_PATH", raising=False)
    code = (
        f"sys.path.append({str(ROOT)!r}); from tests.support.cuda.compiled.small_units import "
        "build, small_unit; "
        "from qsync_fx.backend.cuda.kernel_build import kernel_cache, library; "
        "unit = small_unit(); "
        "path = build([unit])[unit]; "
        "print(kernel_cache.TEMPLATES, path, library.shared_memory(path), sep='\\n')"
    )
    templates, library, memory = python(code, installed).splitlines()
    assert templates == str(installed / "qsync_fx/backend/cuda/templates")
    assert library.startswith(str(tmp_path / "a cache/kernels/"))
    assert memory == "4096"


@tiers.EVERY
def test_editable_install_finds_new_files(tree: Path, wheel: Path) -> None:
    # `pip install -e` calls this hook and unpacks its result. The fixture `wheel` runs first, since
    # both share a build.
    target = tree.parent / "editable place"
    build = (
        "import sys; from scikit_build_core.build import build_editable; "
        "print(build_editable(sys.argv[1]))"
    )
    name = run(sys.executable, "-c", build, str(target), cwd=tree).splitlines()[-1]
    zipfile.ZipFile(target / name).extractall(target)
    files = (
        "import qsync_fx, qsync_fx.passes, qsync_fx._C as native; print(qsync_fx.__file__, "
        "native.__file__, sep='\\n'); "
    )
    ours, native = python(files, target).splitlines()
    assert ours == str(tree / "qsync_fx/__init__.py")
    assert native.startswith(str(target))
    (tree / "passes/made_later.py").write_text(
        "from qsync_fx.passes.made_later_too.inner import VALUE\n"
    )
    (tree / "passes/made_later_too").mkdir()
    (tree / "passes/made_later_too/__init__.py").touch()
    (tree / "passes/made_later_too/inner.py").write_text("VALUE = 41\n")
    assert python("from qsync_fx.passes.made_later import VALUE; print(VALUE)", target) == "41\n"


def test_import_is_light() -> None:
    code = (
        "import qsync_fx, sys; print(*sorted({name.split('.')[0] for name in sys.modules}), "
        "*sys.modules)"
    )
    loaded = set(run(sys.executable, "-c", code, cwd=ROOT).split())
    assert "qsync_fx" in loaded
    assert not loaded & {
        "torch._inductor",
        "torch._dynamo",
        "transformers",
        "networkx",
        "rich",
        "sklearn",
        "scipy",
    }
    assert not [name for name in loaded if name.startswith("qsync_fx.passes")]


def test_the_demo_needs_no_tools_of_development() -> None:
    """`make -n` lists the commands of a setup after a change of pyproject.toml."""
    demo, full = (
        run("make", "-n", "-W", "pyproject.toml", target, cwd=ROOT) for target in ("demo", "setup")
    )
    assert 'extras["demo"]' in demo and 'extras["dev"]' not in demo
    assert 'extras["demo"]' in full and 'extras["dev"]' in full
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["demo"] == ["scikit-learn"]
    runtime = {re.split(r"[<>=]", item)[0] for item in project["dependencies"]}
    standard = sys.stdlib_module_names | {path.stem for path in (ROOT / "examples").glob("*.py")}
    for path in (ROOT / "examples").glob("*.py"):
        names = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
        assert {*names} <= standard | runtime | {"qsync_fx", "sklearn"}, path
