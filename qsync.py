"""The log "qsync" of torch: `TORCH_LOGS="qsync"` logs the graph after each pass.

torch reads TORCH_LOGS while it is imported, before a package can register an artifact, and accepts
the names of modules, which it does not import. `python -m qsync` is the command `qsync`.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from qsync_fx.cli import main

    sys.exit(main())
