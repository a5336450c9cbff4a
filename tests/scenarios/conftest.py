"""A small scenario, and the command line as a process of its own."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from scenarios.load import Scenario, parse

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

SMALL = """\
name: small
summary: Two replicas, a few seconds.
seed: 5
topology:
  nodes: 1
  gpus_per_node: 2
  services:
    chat: {initial_replicas: 2, engine: tiny-cpu}
workload:
  service: chat
  arrivals: {constant: {rate_per_s: 20}}
  prompt_tokens: {fixed: 40}
  output_tokens: {uniform: {low: 10, high: 60}}
  for_s: 3
acceptance:
  - nothing_lost: {}
limits: {time_limit_s: 100, converge_within_s: 10, shadow_s: 5}
"""

Command = Callable[..., "subprocess.CompletedProcess[str]"]


def component_of(component: str) -> str:
    """The ``--set`` that puts a class of ``tests/scenarios/components.py`` in place of the gateway."""
    return f"topology.services.chat.components={{gateway: 'tests.scenarios.components:{component}'}}"


@pytest.fixture
def small() -> Callable[..., Scenario]:
    """The small scenario, with ``--set`` changes."""

    def make(*changes: str, text: str = SMALL, folder: pathlib.Path = ROOT) -> Scenario:
        return parse(text, "small.yaml", folder, changes)

    return make


@pytest.fixture
def small_file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return path


@pytest.fixture
def command(tmp_path: pathlib.Path) -> Command:
    """``python -m scenarios ...`` in an empty folder."""

    def call(*words: Any, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
        return subprocess.run(
            [sys.executable, "-m", "scenarios", *map(str, words)],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip

    return call
