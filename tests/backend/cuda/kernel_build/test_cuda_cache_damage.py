"""Damaged libraries and manifests in the kernel cache: lookups ignore them, builds replace them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from qsync_fx.backend.cuda.kernel_build import kernel_cache, library
from qsync_fx.backend.cuda.kernel_build.library import Manifest, Resources
from qsync_fx.errors import KernelError
from tests.support.cuda.compiled.kernel_caches import UNIT, entry_of, nothing_is_left, tools_or_skip
from tests.support.cuda.compiled.small_units import build

pytest_plugins = ["tests.support.cuda.compiled.kernel_caches"]
tools_or_skip()


def truncate(entry: kernel_cache.CacheEntry) -> None:
    entry.library.write_bytes(entry.library.read_bytes()[:-100])


def flip_a_bit(entry: kernel_cache.CacheEntry) -> None:
    content = bytearray(entry.library.read_bytes())
    content[len(content) // 2] ^= 1
    entry.library.write_bytes(content)


def link(entry: kernel_cache.CacheEntry) -> None:
    entry.library.rename(entry.folder / "moved.so")
    entry.library.symlink_to(entry.folder / "moved.so")


def change(**fields: object) -> Callable[[kernel_cache.CacheEntry], None]:
    def do(entry: kernel_cache.CacheEntry) -> None:
        path = entry.folder / library.FILE
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return do


def text(content: str | bytes) -> Callable[[kernel_cache.CacheEntry], None]:
    def do(entry: kernel_cache.CacheEntry) -> None:
        (entry.folder / library.FILE).write_bytes(
            content.encode() if isinstance(content, str) else content
        )

    return do


DAMAGE: dict[str, Callable[[kernel_cache.CacheEntry], None]] = {
    "truncated library": truncate,
    "changed library": flip_a_bit,
    "link in place of the library": link,
    "no library": lambda entry: entry.library.unlink(),
    "folder in place of the library": lambda entry: (entry.library.unlink(), entry.library.mkdir())[
        1
    ],
    "no manifest": lambda entry: (entry.folder / library.FILE).unlink(),
    "empty manifest": text(""),
    "half a manifest": lambda entry: text((entry.folder / library.FILE).read_text()[:200])(entry),
    "other bytes": text(b"\xff\xfe\x00"),
    "nested": text("[" * 50_000),
    "long": text(" " * 100_000 + "{}"),
    "no object": text("[]"),
    "another key": change(content="0" * 64),
    "another tool": change(tools="0" * 64),
    "a name that leads elsewhere": change(name="../../../small"),
    "another name": change(name="other"),
    "another digest": change(sha256="0" * 64),
    "another size": change(size=1),
    "a size that is no number": change(size="1"),
    "not a number": change(seconds=float("nan")),
    "a later format": change(format=2),
    "a field too many": change(extra=1),
    "refused and there": change(refused="because"),
    "control characters": change(compilers="\x1b[31m"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entry_is_ignored(damage: str, home: Path) -> None:
    entry = entry_of(home)
    key = entry.manifest.content, entry.manifest.tools
    assert kernel_cache.find(home / "kernels", *key) == entry
    DAMAGE[damage](entry)
    assert kernel_cache.find(home / "kernels", *key) is None
    assert kernel_cache.find(home / "kernels", key[0], None) is None
    assert list(kernel_cache.entries(home / "kernels")) == [entry.folder]


def test_damaged_entry_is_rebuilt(home: Path, calls: Callable[[], int]) -> None:
    DAMAGE["truncated library"](entry_of_damaged := entry_of(home))
    path = build([UNIT])[UNIT]
    assert calls() == 1
    assert path == entry_of_damaged.library
    assert entry_of(home).library == path
    assert nothing_is_left(home)


@given(
    st.text()
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists
    ).map(json.dumps)
)
def test_any_text_is_a_manifest_or_an_error(anything: str) -> None:
    with pytest.raises(KernelError):
        library.MANIFEST.decode(anything)


VALID = Manifest(
    "0" * 64,
    "1" * 64,
    "small",
    "sm_90a",
    "2" * 64,
    12345,
    "",
    Resources(1, 2, 3, 4),
    "IMMA.16832.S8",
    1.5,
    2.5,
    "nvcc",
)


@given(
    st.sampled_from([*Manifest.__dataclass_fields__, "format"]),
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
)
def test_a_manifest_with_another_value_is_valid_or_an_error(name: str, value: object) -> None:
    fields = json.loads(library.MANIFEST.encode(VALID))
    assert library.MANIFEST.decode(library.MANIFEST.encode(VALID)) == VALID
    try:
        parsed = library.MANIFEST.decode(json.dumps(fields | {name: value}))
    except KernelError:
        return
    assert library.MANIFEST.decode(library.MANIFEST.encode(parsed)) == parsed
    assert (name == "format" and value == 1) or getattr(parsed, name) == value
