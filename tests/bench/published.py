"""The catalog beside the published GPU runs, as a page: ``python -m tests.bench.published --data DIR``.

Imports each published run, simulates the scenario that is made after it, and writes what ``analysis compare`` finds.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile

import click

from analysis.compare.table import AIM_PERCENT, Comparison, amount, compare
from analysis.foreign.genrm import import_genrm
from analysis.rundir import RunDir

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "published.md"
BESIDE = (
    ("manual_1_2_1", "e2e_run_20260924"),
    ("failure_injection_genrm", "failure_injection_20260925_r2"),
    ("autoscaler_cycle", "autoscaler_prereg_v2_20260925_r5"),
    ("train_continuity", "train_continuity_20260925_r5"),
)
_HEAD = """\
# The catalog beside the published runs

Made by `python -m tests.bench.published --data DIR`; do not edit. DIR holds the public runs of the elastic judge (pull
request 370 of redai-studio/Relax: 4 x RTX 4090, Qwen3-0.6B). Each is imported (`analysis import genrm`), its scenario
is simulated with its own seed, and the two are compared (`analysis compare`, see [compare.md](compare.md)). Aim: every
phase and total within {aim:g}%, the order of protocol events the same.

What was fitted to which run: the engine's step costs to the long calls of `failure_injection` and to two frames of
`autoscaler_prereg_v2_20260925_r5`; the start-up is that of `e2e_run` alone, so that the scale-outs of the other runs
test it; the 25 s in which an engine that has run nothing shows no gauges to both autoscaler runs. Nothing else is
fitted: the rest of the phases comes from the protocol's own periods, deadlines and polls. `train_continuity` has
lengths of its steps and a start-up of its own, taken from its run, as the file says.
"""


def section(scenario: str, published: str, found: Comparison) -> list[str]:
    """One run beside its scenario, as Markdown."""
    lines = [f"## {scenario}", "", f"Beside `{published}`.", ""]
    lines += ["| | sim | published | error |", "| --- | --- | --- | --- |"]
    shown = [row for row in found.rows if row.sim is not None and row.real]
    for row in shown:
        error = "" if row.error_percent is None else f"{row.error_percent:+.1f}%"
        strong = "**" if row.group in ("phase", "total") and not row.within_aim else ""
        group = "" if row.group != "pause" else " (the driver's pause)"
        cells = (
            f"{row.name}{group}",
            amount(row.sim, row.unit),
            amount(row.typical, row.unit),
            f"{strong}{error}{strong}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    good = [
        f"{found.counted(group)[0]} of {found.counted(group)[1]} {group}s" for group in ("phase", "total", "metric")
    ]
    ((_, order),) = found.orders
    said = "the same" if order.equal and order.same_sequence else "NOT the same"
    lines += ["", f"Within {AIM_PERCENT:g}%: {', '.join(good)}. Order of the {order.names} protocol events that the "
              f"published run recorded: {said}.", ""]  # fmt: skip
    return lines


def page(data: pathlib.Path, folder: pathlib.Path) -> str:
    """The whole page.

    Raises:
        BadInput: a published run is not there.
        RuntimeError: a scenario did not run; the text is what it said.
    """
    lines = [_HEAD.format(aim=AIM_PERCENT)]
    for scenario, published in BESIDE:
        out = folder / scenario
        command = [sys.executable, "-m", "scenarios", "run", scenario, "--backend", "sim", "--no-report"]
        ran = subprocess.run([*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise RuntimeError(f"{scenario}: exit code {ran.returncode}\n{ran.stdout}{ran.stderr}")
        real = import_genrm(data / published, folder / published).directory
        lines += section(scenario, published, compare(RunDir.open(out), [real]))
    return "\n".join(lines) + _FOOT


_FOOT = """
## What is off, and why

- Latencies of `manual_1_2_1`: the published ones are the client's, with some 0.1 s of its own and of the proxy between
  it and the gateway. In the scenario that time is the client's `think_s`, so that the load is the same.
- The second published autoscaler run, `autoscaler_prereg_v2_20260926_final_r3`, is no measure of the load: it ran with
  deterministic inference, which the profile does not model (1,568 requests instead of 3,142). Its phases agree: its
  decisions come 20.1 s, 55.5 s and 74.8 s after what they wait for.
"""


@click.command()
@click.option("--data", required=True, type=click.Path(path_type=pathlib.Path, exists=True, file_okay=False))
@click.option("--out", type=click.Path(path_type=pathlib.Path), default=PAGE, show_default=True)
def main(data: pathlib.Path, out: pathlib.Path) -> None:
    """Write the page."""
    with tempfile.TemporaryDirectory() as folder:
        made = page(data, pathlib.Path(folder))
    out.write_text(made, encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()
