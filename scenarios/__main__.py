"""The command line: ``python -m scenarios`` (installed as ``seatrial``).

Exit codes: 0 pass, 1 fail, 2 bad usage or input, 3 inconclusive (also: interrupted).
"""

from __future__ import annotations

from scenarios import starting

# isort: split
import dataclasses
import json
import pathlib
import signal
import sys
import warnings
from typing import Any, NoReturn

import click

from analysis.errors import BadInput, print_anything, require_current_folder, tell_defect
from scenarios.console import Number, Shell
from scenarios.http_commands import openapi
from scenarios.load import Scenario, catalog, load
from scenarios.monitor.command import monitor
from scenarios.real_scenario import for_real
from scenarios.runner import default_directory, look_through_traces, preflight, repeat_command, run_in_sim

INCONCLUSIVE = 3


class _Said(click.ParamType):
    """A text that is not empty: ``--ray "$HEAD"`` with HEAD unset must not run elsewhere than its author thinks."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value.strip():
            self.fail("is empty; name it, or leave the option out", param, ctx)
        return str(value)


_SETS = click.option(
    "--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key, as in seed=3 or steps.0.at_s=5."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
_SEEDS_END = 2**63
_SEED = click.option("--seed", type=click.IntRange(0, _SEEDS_END - 1), help="Instead of the scenario's own.")

_HANG = click.option(
    "--hang-after", "hang_after_s", type=Number(0.1, 86_400), metavar="SECONDS",
    help="End a run in which one step of a component takes so much real time (default 60).",
)  # fmt: skip


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Sea trials for the control plane of agentic RL post-training."""
    print_anything()
    require_current_folder()


@cli.command("list")
@_JSON
def list_(as_json: bool) -> None:
    """Name the scenarios of the catalog; "real": with a real: block, so fitted to real time too."""
    shell = Shell(as_json)
    scenarios = [load(path.stem) for path in catalog()]
    width = max(len(scenario.name) for scenario in scenarios)
    document = []
    for scenario in scenarios:
        real = scenario.model.real is not None
        shell.say(f"{scenario.name:<{width}}  {'real' if real else '    '}  {scenario.model.summary}")
        document.append({"name": scenario.name, "real": real, "summary": scenario.model.summary})
    shell.document(document)


@cli.command()
@click.argument("scenario")
@_SETS
def show(scenario: str, changes: tuple[str, ...]) -> None:
    """Print a scenario file (after --set)."""
    click.echo(load(scenario, changes).text, nl=False)


@cli.command()
@click.argument("file")
@_SETS
@_JSON
def validate(file: str, changes: tuple[str, ...], as_json: bool) -> None:
    """Check a scenario file: its keys, its engine profiles, and its traces to the last row."""
    shell = Shell(as_json)
    scenario = load(file, changes)
    traces = preflight(scenario, "sim")
    for kind in scenario.model.real.set if scenario.model.real is not None else ():
        look_through_traces(for_real(scenario, kind))
    for trace in traces:
        passed = f", {trace.zero_output} rows without output tokens passed over" if trace.zero_output else ""
        shell.say(f"{trace.file}: {trace.requests} requests over {trace.last_s:.1f} s{passed}")
    shell.say(f"{scenario.source}: good")
    shell.document({"file": scenario.source, "name": scenario.name, "sha256": scenario.sha256,
                    "traces": [vars(trace) for trace in traces]})  # fmt: skip


@cli.command()
def schema() -> None:
    """Print the JSON Schema of scenario files, for editors."""
    from scenarios.json_schema import scenario_schema

    click.echo(json.dumps(scenario_schema(), indent=2))


@cli.command()
@click.argument("scenario")
@click.option("--backend", type=click.Choice(["sim", "real"]), required=True)
@_SEED
@click.option("--out", type=click.Path(path_type=pathlib.Path), help="The run directory to make; it must not exist.")
@_SETS
@_JSON
@click.option("--no-report", is_flag=True, help="Leave out report.html and trace.json.")
@click.option("--explore", is_flag=True, help="Draw orders and delays from the seed, as a sweep does.")
@click.option(
    "--engine", type=click.Choice(["emulated", "sglang-cpu", "sglang"]), help="Real: kind of engines; default: by GPU."
)
@click.option(
    "--engine-python", type=_Said(), default=None, metavar="PATH", help="Real: interpreter of the engines' environment."
)
@click.option(
    "--real-model", type=_Said(), default=None, metavar="MODEL", help="Real: name or folder of SGLang's model."
)
@click.option(
    "--engine-argument", "engine_arguments", multiple=True, metavar="NAME[=VALUE]",
    help="Real: an option of SGLang for every engine, such as page-size=16. May be repeated.",
)  # fmt: skip
@click.option("--ray", type=_Said(), default=None, metavar="ADDRESS", help="Real: host:port of a Ray cluster to use.")
@click.option(
    "--http", "http_port", type=click.IntRange(0, 65535), metavar="PORT",
    help="Real: serve the control APIs of scaled services on this port of 127.0.0.1 (0: any free one).",
)  # fmt: skip
@_HANG
def run(
    scenario: str,
    backend: Any,
    seed: int | None,
    out: pathlib.Path | None,
    changes: tuple[str, ...],
    as_json: bool,
    no_report: bool,
    explore: bool,
    engine: Any,
    engine_python: str | None,
    real_model: str | None,
    engine_arguments: tuple[str, ...],
    ray: str | None,
    http_port: int | None,
    hang_after_s: float | None,
) -> None:
    """Run a scenario and judge it."""
    from real.cluster import imports_of_ray

    shell = Shell(as_json)
    with imports_of_ray(own_cluster=backend == "real" and not ray):  # it imports the components
        checked = load(scenario, changes)
    seed = checked.model.seed if seed is None else seed
    if backend == "real":
        if explore or hang_after_s is not None:
            raise BadInput("--explore and --hang-after go with --backend sim")
        chosen = {
            "--engine": engine, "--engine-python": engine_python or "", "--real-model": real_model or "",
            "--ray": ray or "",
        }  # fmt: skip
        more: dict[str, Any] = {"http_port": http_port, "engine_arguments": engine_arguments}
        _run_for_real(shell, scenario, checked, seed, out, changes, chosen, more, not no_report)
    if engine or engine_python or real_model or engine_arguments or ray or http_port is not None:
        raise BadInput(
            "--engine, --engine-python, --real-model, --engine-argument, --ray and --http go with --backend real"
        )
    traces = preflight(checked, backend)
    repeat = repeat_command(scenario, seed, changes, explore)
    out = default_directory(checked, backend, seed) if out is None else out
    with shell.running(checked.name, _expected_s(checked, traces)) as watch:
        ran = run_in_sim(
            checked, seed,
            out=out, repeat=repeat, explore=explore, report=not no_report, watch=watch, hang_after_s=hang_after_s,
        )  # fmt: skip
    shell.ran(checked, seed, ran, traces, repeat)
    sys.exit(ran.verdict.exit_code)


def _run_for_real(
    shell: Shell,
    name: str,
    checked: Scenario,
    seed: int,
    out: pathlib.Path | None,
    changes: tuple[str, ...],
    chosen: dict[str, Any],
    more: dict[str, Any],
    report: bool,
) -> NoReturn:
    from scenarios.real_preflight import RealOptions, plan
    from scenarios.real_run import Interrupts, run_in_real

    with Interrupts() as interrupts, interrupts.admitted():  # SIGTERM too: a probe of the plan may have begun a folder
        planned = plan(checked, dataclasses.replace(RealOptions(*chosen.values()), **more))
    options = [word for option, value in chosen.items() if value for word in (option, value)]
    options += [f"--engine-argument={argument}" for argument in more["engine_arguments"]]
    repeat = repeat_command(name, seed, changes, False, "real", options)
    out = default_directory(checked, "real", seed) if out is None else out
    with shell.running_for_real(checked.name) as watch:
        ran = run_in_real(planned, seed, out=out, repeat=repeat, report=report, watch=watch)
    shell.ran_for_real(planned.scenario, seed, ran, planned.traces, repeat)
    sys.exit(ran.verdict.exit_code)


@cli.command()
@click.argument("scenario")
@_SEED
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, help="How many, from the first one on.")
@click.option("--python", "pythons", multiple=True, metavar="PATH", help="Replay in this interpreter too.")
@_SETS
@_JSON
def prove(
    scenario: str, seed: int | None, seeds: int, pythons: tuple[str, ...], changes: tuple[str, ...], as_json: bool
) -> None:
    """Show that seeds replay bit for bit, in every way, or name the first divergence.

    Exit code 3: all are equal, but some runs did not complete.
    """
    from scenarios.prove import prove_scenario

    shell = Shell(as_json)
    checked = load(scenario, changes)
    preflight(checked, "sim")
    first = _first_seed(checked, seed, seeds)
    proof = prove_scenario(checked, first, seeds, pythons, shell.note)
    for line in proof.lines():
        shell.say(line)
    shell.document(proof.as_json())
    sys.exit({"pass": 0, "fail": 1, "inconclusive": 3}[proof.result])


@cli.command()
@click.argument("scenario")
@_SEED
@click.option("--seeds", type=click.IntRange(1), default=100, show_default=True)
@click.option("--jobs", type=click.IntRange(1), help="Worker processes; default 1, with --ray one for each CPU.")
@click.option(
    "--ray", type=_Said(), default=None, metavar="ADDRESS", help="Spread over a Ray cluster: host:port, or auto."
)
@click.option("--out", type=click.Path(path_type=pathlib.Path), help="Folder for run directories; it must not exist.")
@click.option("--sample", type=click.IntRange(0), default=1, show_default=True, help="Passing seeds to keep as well.")
@_HANG
@_SETS
@_JSON
def sweep(
    scenario: str,
    seed: int | None,
    seeds: int,
    jobs: int | None,
    ray: str | None,
    out: pathlib.Path | None,
    sample: int,
    hang_after_s: float | None,
    changes: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run many seeds with drawn orders and delays; group what fails."""
    from scenarios.sweep import sweep_scenario

    shell = Shell(as_json)
    checked = load(scenario, changes)
    preflight(checked, "sim")
    first = _first_seed(checked, seed, seeds)
    swept = sweep_scenario(
        checked, scenario, first, seeds,
        jobs=jobs, out=out, sample=sample, changes=changes, shell=shell, hang_after_s=hang_after_s, ray=ray or "",
    )  # fmt: skip
    for line in swept.lines():
        shell.say(line)
    shell.document(swept.as_json())
    sys.exit(swept.exit_code)


def _first_seed(scenario: Scenario, given: int | None, count: int) -> int:
    """The first of so many seeds, each of which ``run --seed`` takes."""
    first = scenario.model.seed if given is None else given
    if first + count > _SEEDS_END:
        left = _SEEDS_END - first
        raise BadInput(f"--seeds {count}: from {first} on there are {left}; take fewer, or a smaller --seed")
    return first


def _expected_s(scenario: Scenario, traces: list[Any]) -> float | None:
    """About how long a run will be, in simulated seconds; None where nobody can say."""
    lengths = [trace.last_s for trace in traces]
    lengths += [workload.for_s for workload in scenario.model.workload if workload.for_s is not None]
    return max(lengths, default=0.0) + 30.0 if lengths else None


cli.add_command(openapi)
cli.add_command(monitor)
if __name__ != "__main__":  # else main() says so
    starting.imported()


def main() -> None:
    """The entry point: every refusal is one message and exit code 2."""
    try:
        starting.imported()
        code = cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except BadInput as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the impatient press twice, and it is on its way out
        # The interrupted step's own coroutines are never awaited now; Python would say so below the message.
        warnings.simplefilter("ignore", RuntimeWarning)
        click.echo(starting.TOLD, err=True)
        sys.exit(starting.INTERRUPTED)
    except Exception:
        tell_defect()
        sys.exit(INCONCLUSIVE)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
