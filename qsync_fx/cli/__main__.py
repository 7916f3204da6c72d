"""`python -m qsync_fx.cli` is `qsync`."""

from __future__ import annotations

import sys

from qsync_fx.cli import main

if __name__ == "__main__":
    sys.exit(main())
