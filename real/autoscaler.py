"""Serve our autoscaler over scale APIs that somebody else serves: ``python -m real.autoscaler --config FILE``.

One process, without Ray. The services are those of ``service_targets`` in the configuration, each the URL of a scale
API (docs/api.md), of ours or of another that speaks like it. Exit codes: 0 when asked to stop (SIGTERM, Ctrl-C), 1 when
a background task failed, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pydantic

import real.needs  # noqa: F401 - first: what is missing is told in one line

# isort: split
from protocol.config import HttpConfig
from protocol.openapi import document
from protocol.scaling.http_tables import autoscaler_routes
from protocol.scaling.policy import AutoscalerConfig
from protocol.serving.http import HttpAnswer, HttpRequest, json_answer
from real.http_server import HttpServer, ServerSettings
from real.options import Usage, is_url, token_in, url_host
from real.scale_target import HttpAutoscalerApi
from real.serving import Log, add_listening, listening, local_world, run_command


async def serve(
    config: AutoscalerConfig,
    settings: ServerSettings,
    *,
    target_token: str,
    start: bool,
    log: Callable[[str], None],
    stop: asyncio.Event,
) -> int:
    """Serve until ``stop`` is set; returns the exit code. Raises PortTaken: nothing was served."""

    def emitted(kind: str, fields: dict[str, Any]) -> None:
        if kind == "autoscaler.request":
            log(f"{fields['service']}: {fields['action']} to {fields['target']}: {fields['what']} ({fields['state']})")

    async with local_world(stop, emitted) as world:
        scaler = await world.backend.spawn(
            HttpAutoscalerApi, config, world.session, token=target_token, begin=start, name="autoscaler"
        )  # fmt: skip
        http = HttpConfig()
        described = document({"": "autoscaler"})

        async def openapi(request: HttpRequest) -> HttpAnswer:
            return json_answer(described)

        server = HttpServer(autoscaler_routes(http, scaler, {("GET", "/openapi.json"): openapi}), settings)
        try:
            host, port = await server.start()
            services = ", ".join(f"{name} ({url})" for name, url in config.service_targets.items()) or "none yet"
            log(f"serving on http://{url_host(host)}:{port} for {services}")
            if not start:
                log("nothing is decided before POST /start")
            await stop.wait()
            log("stopping: nothing more is decided")
            await scaler.wind_down()
        finally:
            await server.stop()
    return world.exit_code(log)


def read_config(path: str) -> AutoscalerConfig:
    """A configuration in a file, as GET /config answers it. Raises Usage."""
    try:
        given = json.loads(pathlib.Path(path).read_text(encoding="utf-8"), object_pairs_hook=_once)
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise Usage(f"--config {path}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(given, dict):
        raise Usage(f"--config {path}: write a JSON object, as GET /config answers it")
    try:
        # Who names no rollout service has none: the default is another deployment's.
        config = AutoscalerConfig.model_validate({"rollout_service_url": None, **given})
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise Usage(f"--config {path}: {key + ': ' if key else ''}{first['msg']}") from None
    for name, url in config.service_targets.items():
        if not is_url(url):  # nobody could ever be asked there
            raise Usage(
                f"--config {path}: service_targets.{name}: {url!r} is no URL of a scale API; as in "
                "http://127.0.0.1:8090/genrm"
            )
    return config


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of which no key is written twice; raises ValueError."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is written twice; leave one out")
        found[key] = value
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m real.autoscaler", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--config", required=True, metavar="FILE", help="JSON, as GET /config answers it")
    parser.add_argument("--start", action="store_true", help="decide at once, without waiting for POST /start")
    add_listening(parser, grace_s=5.0)
    parser.add_argument("--target-token-file", metavar="FILE", help="the token that the services ask for")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = _parser().parse_args(arguments)

    def serving() -> Callable[[Log, asyncio.Event], Awaitable[int]]:
        settings = listening(given)
        target_token = token_in(given.target_token_file, "--target-token-file")
        config = read_config(given.config)
        return lambda log, stop: serve(
            config, settings, target_token=target_token, start=given.start, log=log, stop=stop
        )  # fmt: skip

    return run_command(serving)


if __name__ == "__main__":
    sys.exit(main())
