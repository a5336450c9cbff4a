"""Imported first by the commands of this package: says what to install where only the core install is there.

Exit code 2 with one line, before anything else is imported. A module that is imported, not run, gets its ImportError.
"""

from __future__ import annotations

import sys

try:
    import aiohttp as _aiohttp  # noqa: F401
except ModuleNotFoundError as _error:
    _run = getattr(sys.modules["__main__"], "__spec__", None)
    if _run is not None and str(_run.name).startswith("real."):
        print(f"error: {_error.name} is not installed; pip install -e '.[real]'", file=sys.stderr)
        raise SystemExit(2) from None
    raise
