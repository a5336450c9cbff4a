"""``python -m scenarios monitor RUN|URL``: replay, follow, or look once."""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Iterator

import click
from rich.console import Console
from rich.live import Live

from analysis.errors import BadInput
from scenarios.console import Number
from scenarios.monitor.board import Board, render, svg_of, text_of
from scenarios.monitor.run_source import Follower, Watched, all_services_of, chosen, info_of, services_of

_FRAMES_PER_S = 10.0


@click.command()
@click.argument("source", metavar="RUN|URL")
@click.option("--service", metavar="NAME", help="Which service; needed where there are several.")
@click.option(
    "--svg", type=click.Path(path_type=pathlib.Path), metavar="FILE", help="Write the last board as a picture."
)
@click.option("--at", "at_s", type=Number(min=0), metavar="SECONDS", help="A run: show it as of that time.")
@click.option(
    "--speed", type=Number(0.1, 10_000), default=20.0, show_default=True, metavar="FACTOR",
    help="A run that is over, on a terminal: how much faster than it was.",
)  # fmt: skip
@click.option(
    "--every", "every_s", type=Number(0.1, 3600), default=2.0, show_default=True, metavar="SECONDS",
    help="A live run or a URL: how often to look.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Look once, print, and end.")
@click.option("--token-file", type=click.Path(path_type=pathlib.Path), metavar="FILE", help="A URL: its bearer token.")
def monitor(
    source: str,
    service: str | None,
    svg: pathlib.Path | None,
    at_s: float | None,
    speed: float,
    every_s: float,
    once: bool,
    token_file: pathlib.Path | None,
) -> None:
    """Show what a scaled service and its autoscaler do: a run, live or over, or a control API."""
    console = Console()
    if "://" in source:
        if at_s is not None:
            raise BadInput("--at goes with a run; a service only knows its present")
        boards = _of_url(source, service, _token(token_file), every_s, once)
    else:
        if token_file is not None:
            raise BadInput("--token-file goes with a URL")
        boards = _of_run(pathlib.Path(source), service, at_s, speed, every_s, once, console.is_terminal)
    last = _shown(boards, console, once or at_s is not None)
    if svg is not None and last is not None:
        _write(svg, svg_of(last))
        click.echo(f"{svg}: written", err=True)


def _shown(boards: Iterator[Board], console: Console, once: bool) -> Board | None:
    """Show board after board; the last one stays. Ctrl-C ends it as the end of the source does."""
    last: Board | None = None
    try:
        if once or not console.is_terminal:
            before = ""
            for last in boards:
                text = text_of(last)
                if text != before:
                    sys.stdout.write(text)
                    sys.stdout.flush()
                before = text
            return last
        with Live(console=console, auto_refresh=False, screen=False) as live:
            for last in boards:
                live.update(render(last), refresh=True)
    except KeyboardInterrupt:
        pass
    return last


def _of_url(url: str, service: str | None, token: str, every_s: float, once: bool) -> Iterator[Board]:
    from scenarios.monitor.url_source import Served

    served = Served(url, service, token)
    yield served.board()
    while not once:
        time.sleep(every_s)
        yield served.board()


def _of_run(
    path: pathlib.Path,
    service: str | None,
    at_s: float | None,
    speed: float,
    every_s: float,
    once: bool,
    terminal: bool,
) -> Iterator[Board]:
    info = info_of(path)
    told = services_of(info)
    follower = Follower(path)
    others = all_services_of(info)
    names = list(told) if told or others else follower.asked()  # of a scenario of others, the evidence alone can tell
    name = chosen(names, service, f"{path} ({info.scenario})", others)
    watched = Watched(name, f"{info.scenario}, {info.backend}, seed {info.seed}", told.get(name))
    if follower.finished:
        yield from _replayed(follower, watched, at_s, speed if terminal and not once else None)
        return
    while True:
        over = follower.finished
        if over:  # what its processes had written has been merged, in its right order
            watched = Watched(name, f"{info.scenario}, {info.backend}, seed {info.seed}", told.get(name))
            yield from _replayed(follower, watched, at_s, None)
            return
        for event in follower.look():
            if at_s is None or event.t_s <= at_s:
                watched.feed(event)
        yield watched.board()
        if once or watched.over or (at_s is not None and watched.t_s >= at_s):
            return
        if not path.is_dir():
            raise BadInput(f"{path}: has been removed while it was watched")
        time.sleep(every_s)


def _replayed(follower: Follower, watched: Watched, at_s: float | None, speed: float | None) -> Iterator[Board]:
    """A run that is over: at so many times its speed, or its end at once."""
    shown_s = 0.0
    for event in follower.whole():
        if at_s is not None and event.t_s > at_s:
            break
        while speed is not None and event.t_s > shown_s + speed / _FRAMES_PER_S:
            shown_s += speed / _FRAMES_PER_S
            yield watched.board()
            time.sleep(1 / _FRAMES_PER_S)
        watched.feed(event)
    yield watched.board()


def _token(path: pathlib.Path | None) -> str:
    from real.options import Usage, token_in  # the command line loads no world before one is asked for

    try:
        return token_in(path)
    except Usage as error:
        raise BadInput(str(error)) from None


def _write(path: pathlib.Path, text: str) -> None:
    from analysis.rundir import write_atomic

    if path.is_dir() or not path.parent.is_dir():
        raise BadInput(f"--svg {path}: {'is a directory' if path.is_dir() else 'its folder does not exist'}")
    write_atomic(path, text)
