"""Whether SGLang takes arguments: ``ENGINE_PYTHON flag_check.py [--cpu] -- ARGUMENT...``; exit code 2, and why not.

A script for the engine's own environment, which alone knows what its version of SGLang takes. It starts no server and
looks for no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import sys
from typing import NoReturn

REFUSED = 2


class _Parser(argparse.ArgumentParser):
    """One line, without the usage, which names 500 options."""

    def error(self, message: str) -> NoReturn:
        print(message)
        sys.exit(REFUSED)


def _stand_ins() -> None:
    path = pathlib.Path(__file__).resolve().parent.parent / "sglang_cpu" / "server.py"
    spec = importlib.util.spec_from_file_location("sglang_cpu_server", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))  # it makes SGLang importable as it is imported


def main(words: list[str]) -> None:
    options, arguments = words[: words.index("--")], words[words.index("--") + 1 :]
    if "--cpu" in options:
        _stand_ins()
    server_args = importlib.import_module("sglang.srt.server_args")  # of the engine's environment, not of this one
    parser = _Parser(allow_abbrev=False, add_help=False)
    server_args.ServerArgs.add_cli_args(parser)
    parser.parse_args(["--model-path", "any", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
