"""Huge pages: the reported status of a process equals the kernel's behavior."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from qsync_fx.devices.machine import SWITCH, huge_pages, of

GLIBC = ("glibc", "2.36")


@pytest.mark.parametrize(
    ("policy", "tunables", "library", "message"),
    [
        ("always [madvise] never", "", GLIBC, f"not used; faster training: {SWITCH} python ..."),
        (
            "always [madvise] never",
            "glibc.malloc.hugetlb=1",
            GLIBC,
            "used: requested by this process",
        ),
        (
            "always [madvise] never",
            "glibc.malloc.hugetlb=1:glibc.malloc.hugetlb=0",
            GLIBC,
            f"not used; faster training: {SWITCH} python ...",
        ),
        ("always [madvise] never", "glibc.malloc.hugetlb=1", ("glibc", "2.31"), "not used"),
        ("always [madvise] never", "", ("", ""), "not used"),
        ("[always] madvise never", "", GLIBC, "used for all processes of this system"),
        (
            "always madvise [never]",
            "glibc.malloc.hugetlb=1",
            GLIBC,
            "disabled on this system (/sys/kernel/mm/transparent_hugepage/enabled)",
        ),
        ("", "", GLIBC, "unknown"),
    ],
)
def test_huge_page_messages(
    policy: str, tunables: str, library: tuple[str, str], message: str
) -> None:
    state = of(policy, tunables, library)
    assert str(state) == message
    assert state.missing == ("python" in message)


@pytest.mark.skipif(not huge_pages().missing, reason=f"huge pages here: {huge_pages()}")
def test_the_switch_has_the_kernel_give_them() -> None:
    name, _, value = SWITCH.partition("=")
    code = (
        "import torch; from qsync_fx.devices.machine import huge_pages; kept = torch.ones(2**25);"
        "import re; text = open('/proc/self/smaps_rollup').read();"
        "size = int(re.search(r'AnonHugePages: +([0-9]+)', text)[1]);"
        "print(huge_pages().requested, size > 2**16)"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for variables in ({}, {name: value})
    ]
    assert outputs == ["False False", "True True"]
