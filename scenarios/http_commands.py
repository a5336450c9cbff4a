"""Commands about what is served over HTTP: ``python -m scenarios openapi``, ``python -m scenarios monitor``."""

from __future__ import annotations

import pathlib
import sys

import click

from analysis.errors import BadInput


@click.command()
@click.option("--service", metavar="NAME", help="Only what a real run serves for a scaled service of that name.")
@click.option("--kind", type=click.Choice(["judge", "rollout"]), help="With --service: which replicas it has (judge).")
@click.option("--out", type=click.Path(path_type=pathlib.Path), metavar="FILE", help="Write it there.")
@click.option(
    "--check", type=click.Path(path_type=pathlib.Path), metavar="FILE", help="Compare: exit code 1 if not equal."
)
def openapi(service: str | None, kind: str | None, out: pathlib.Path | None, check: pathlib.Path | None) -> None:
    """Print the OpenAPI document of gateway, scaling and autoscaler, made of the code."""
    from analysis.rundir import write_atomic
    from protocol.openapi import ApiName, as_text, default_document, document

    if out is not None and check is not None:
        raise BadInput("give --out or --check, not both")
    if service is None and kind is not None:
        raise BadInput(f"--kind {kind} goes with --service NAME; without it the document has both kinds")
    if service is not None and not (service and service.replace("_", "").replace("-", "").isalnum()):
        raise BadInput(f"--service {service!r}: a name has letters, digits, - and _")
    if service is None:
        found = default_document()
    else:
        own: ApiName = "rollout" if kind == "rollout" else "scale"
        found = document({f"/{service}": own, f"/{service}/autoscaler": "autoscaler"})
    text = as_text(found)
    if check is not None:
        try:
            kept = check.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"--check {check}: {getattr(error, 'strerror', None) or error}") from error
        if kept != text:
            click.echo(
                f"{check}: is not what the code serves; python -m scenarios openapi --out {check} writes it anew"
            )
            sys.exit(1)
        click.echo(f"{check}: current")
    elif out is not None:
        write_atomic(out, text)
        click.echo(f"{out}: {len(found['paths'])} paths, {len(found['components']['schemas'])} schemas")
    else:
        click.echo(text, nl=False)
