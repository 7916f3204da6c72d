"""Entry point of `python -m qsync_fx.cli`, which is the same as `qsync`."""

from __future__ import annotations

import sys

from qsync_fx.cli import main

if __name__ == "__main__":
    sys.exit(main())
