"""The side-by-side benchmark: its works are the same every time, and it says what is missing or wrong."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest
from click.testing import CliRunner
from rich.console import Console

from tests.bench import peers, works

SMALL = works.Work("small", "ten requests", 2, count=10, rate_per_s=100)


def _row(label: str, code: str) -> peers.Row:
    return peers.Row("fake", label, (sys.executable, "-c", code), works=("small",))


def test_poisson_work_is_the_same_every_time() -> None:
    first = list(works.requests(SMALL, None))
    assert first == list(works.requests(SMALL, None))
    assert [r.arrival_us for r in first] == sorted(r.arrival_us for r in first)
    assert len({r.blocks for r in first}) == 10


@pytest.mark.shared
def test_traces_are_read_whole(shared: pathlib.Path, tmp_path: pathlib.Path) -> None:
    counts = {w.name: works.write(w, shared, tmp_path / w.name) for w in works.WORKS if w.trace}
    assert counts == {"azure": 8819, "mooncake": 3993}
    first = json.loads((tmp_path / "azure").read_text(encoding="utf-8").splitlines()[1])
    assert (first["timestamp"], first["input_length"], first["output_length"]) == (52.0, 3180, 8)
    assert len(first["hash_ids"]) == 7


@pytest.mark.parametrize("peer", ["dynosim", "vidur"])
def test_absent_peer_is_named_with_its_installation(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SEATRIAL_DYNOSIM_PYTHON", "SEATRIAL_VIDUR_PYTHON", "SEATRIAL_VIDUR"):
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(peers.main, ["--peer", peer, "--work", "fixed"])
    assert result.exit_code == 2
    assert "is not installed" in result.output
    assert "pip install" in result.output


def test_speed_is_the_median_over_the_requests_of_the_work() -> None:
    good = _row("good", 'print(\'noise\'); print(\'{"seconds": 0.5, "requests": 10, "completed": 10}\')')
    results = peers.compare([good], [SMALL], 3, Console(quiet=True))
    assert [(r["requests_per_s"], r["lowest"], r["highest"], len(r["runs"])) for r in results] == [
        (20.0, 20.0, 20.0, 3)
    ]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise SystemExit('out of cheese')", "out of cheese"),
        ('print(\'{"seconds": 0.5, "requests": 10, "completed": 9}\')', "9 of 10 completed"),
        ("print('not json')", "Expecting value"),
    ],
)
def test_a_row_that_fails_has_an_error_and_no_figure(code: str, words: str) -> None:
    (result,) = peers.compare([_row("bad", code)], [SMALL], 2, Console(quiet=True))
    assert words in result["error"]
    assert "requests_per_s" not in result
