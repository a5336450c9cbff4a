"""Runs the genuine SGLang server on a CPU: ``ENGINE_PYTHON .../server.py`` takes the arguments of sglang.launch_server.

A script for the engine's own environment (``real.sglang_cpu.environment``), not a module of the driver's. Three things
that SGLang imports at start are not to be had on a CPU; ``stand_ins/`` has one for each, put on the path here and, as
multiprocessing hands ``sys.path`` on and imports this file again, in SGLang's own child processes too.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys

STAND_INS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "stand_ins")


def prepare() -> None:
    """Make ``import sglang`` possible in this process. Must run before anything imports torchvision or triton."""
    if STAND_INS not in sys.path:
        sys.path.insert(0, STAND_INS)
    # The thousands of modules below are objects that stay: looking for garbage among them is a fifth of the start.
    gc.set_threshold(200_000, 20, 1_000)
    # The folder of this script comes first on the path of its process; its modules are not for the engine to find.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != here]
    importlib.import_module("triton_stand_in").install()
    importlib.import_module("torchvision_schemas").declare()


prepare()

if __name__ == "__main__":
    import runpy

    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
