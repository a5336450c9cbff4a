"""The commands of ``real`` where only the core install is there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.scenarios.conftest import ROOT

_WITHOUT = """
import runpy, sys
sys.modules["aiohttp"] = None  # its import raises ModuleNotFoundError, as where it is not installed
module = sys.argv[1]
sys.argv = [module, "--help"]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["real.serve", "real.serve_sessions", "real.autoscaler", "real.emulated"])
def test_a_command_says_what_to_install(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT, module], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: aiohttp is not installed; pip install -e '.[real]'\n"


def test_an_import_gets_its_own_error() -> None:
    code = "import sys; sys.modules['aiohttp'] = None; import real.needs"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr
