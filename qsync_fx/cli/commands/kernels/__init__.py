"""`qsync kernels`: compile CUDA kernels before they are needed, and see and clear what is kept."""

from __future__ import annotations

from qsync_fx.cli.command import Command
from qsync_fx.cli.commands.kernels import build, kept

_ABOUT = """\
CUDA kernels are compiled by nvcc when they are first needed, and kept.

This command compiles them before, for this machine or for one that has no
compiler, and shows and clears what is kept."""

_EXAMPLES = """\
examples:
  qsync kernels build --arch sm_80 --model bert:small --precision int8
  qsync kernels build --arch sm_90a --output kernels      to carry elsewhere,
      where QSYNC_KERNELS_PATH=/path/to/kernels finds them
  qsync kernels list --json | jq .[].name
  qsync kernels clear --older-than 30d"""

COMMAND = Command(
    "compile CUDA kernels, see and clear them",
    about=_ABOUT,
    examples=_EXAMPLES,
    actions={"build": build.BUILD, "list": kept.LIST, "clear": kept.CLEAR, "path": kept.PATH},
)
