"""``python -m real.engines``: sets up engines that run without a GPU.

install sglang-cpu   make the environment of genuine SGLang on the CPU
tiny-model FOLDER    write the tiny model that it serves
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import signal
import sys
from collections.abc import Iterator

from real.sglang_cpu import environment


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 done, 2 not done (the reason is printed), 130 interrupted."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "install":
            with _ended_as_by_ctrl_c():
                python = environment.install(options.into, options.python, say=lambda line: print(line, flush=True))
            if not environment.is_found(python):
                print(f"use it with --engine-python {python} or {environment.VARIABLE}={python}")
        else:
            from real import tiny_model  # needs safetensors of the real install; installing SGLang does not

            print(tiny_model.write(options.folder, options.version, options.shards))
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is not installed; pip install -e '.[real]'", file=sys.stderr)
        return 2
    except (environment.EnvironmentFailed, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


@contextlib.contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """At SIGTERM too what was begun is removed, and pip does not go on in a folder that nobody has locked."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m real.engines", description="Engines that run without a GPU.")
    commands = parser.add_subparsers(dest="command", required=True)
    install = commands.add_parser("install", help="make the environment of an engine")
    install.add_argument("engine", choices=["sglang-cpu"])
    install.add_argument(
        "--into", type=pathlib.Path, default=environment.DEFAULT, metavar="FOLDER",
        help="default: %(default)s; absent, empty, or made by an install before",
    )  # fmt: skip
    install.add_argument("--python", default=sys.executable, help="interpreter to make it with, 3.11 to 3.13")
    model = commands.add_parser("tiny-model", help="write the tiny model, 1.4 MB in Hugging Face layout")
    model.add_argument("folder", type=pathlib.Path)
    model.add_argument("--version", default="0", help="label that its weights are drawn from (default: 0)")
    model.add_argument("--shards", type=int, default=2, help="number of safetensors files (default: 2)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
