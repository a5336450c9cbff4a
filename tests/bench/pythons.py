"""Digests of the whole catalog on several Pythons: the same on each.

``python -m tests.bench.pythons PYTHON...`` runs every scenario of the catalog but ``scale_10k`` once in this
interpreter and once in each that is named (each with the project installed) and prints a line a scenario; exit code 1
where two differ, 2 where a run left no evidence. A difference is most often a function of the standard library that
computes otherwise: ``sum`` of floats rounds differently from Python 3.12 on.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile

import click

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
_TOO_LARGE = ("scale_10k",)


def digest(python: str, scenario: str, folder: pathlib.Path) -> str:
    """SHA-256 of the evidence of a run of its default seed; empty where it left none."""
    out = folder / "run"
    command = [python, "-m", "scenarios", "run", scenario, "--backend", "sim", "--no-report", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=False)
    events = out / "events.jsonl"
    return hashlib.sha256(events.read_bytes()).hexdigest() if events.is_file() else ""


@click.command()
@click.argument("pythons", nargs=-1, required=True)
@click.option("--scenario", "only", multiple=True, help="Instead of all; may be given more than once.")
def main(pythons: tuple[str, ...], only: tuple[str, ...]) -> None:
    """Whether PYTHONS make the same evidence as this interpreter."""
    names = only or sorted(path.stem for path in (ROOT / "scenarios" / "catalog").glob("*.yaml"))
    code = 0
    for name in names:
        if name in _TOO_LARGE and not only:
            continue
        found = []
        for python in (sys.executable, *pythons):
            with tempfile.TemporaryDirectory() as folder:
                found.append(digest(python, name, pathlib.Path(folder)))
        same = len(set(found)) == 1
        said = "no evidence" if not all(found) else "same" if same else "DIFFERENT"
        print(f"{said:11} {name}: {' '.join(each[:16] or '-' for each in (found[:1] if same else found))}", flush=True)
        code = max(code, 2 if not all(found) else 0 if same else 1)
    sys.exit(code)


if __name__ == "__main__":
    main()
