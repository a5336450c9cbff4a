"""``python -m tests.bench.scale``: its usage, and one small size of it."""

from __future__ import annotations

import json

import pytest

from tests.bench import scale


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["0"], "argument REQUESTS: '0' is no whole number above 0"),
        (["10", "-5"], "argument REQUESTS: '-5' is no whole number above 0"),
        (["²"], "argument REQUESTS: '²' is no whole number above 0"),
        (["1e6"], "argument REQUESTS: '1e6' is no whole number above 0"),
        (["--replicas", "none"], "argument --replicas: 'none' is no whole number above 0"),
        (["--replicas"], "argument --replicas: expected one argument"),
        (["--replica-count", "3"], "unrecognized arguments: --replica-count"),
    ],
)
def test_bad_usage_is_one_message_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        scale.main(arguments)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == ""
    assert err.startswith("usage: python -m tests.bench.scale") and says in err.splitlines()[-1]


@pytest.mark.parametrize(("requests", "code", "result"), [(60, 1, "inconclusive"), (5100, 0, "pass")])
def test_a_small_size(requests: int, code: int, result: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before 5,000 requests its second fault does not come: such a run says nothing of it, and does not pass."""
    assert scale.main(["--replicas", "20", str(requests)]) == code
    row, growth = capsys.readouterr().out.splitlines()
    shown = json.loads(row)
    assert (shown["replicas"], shown["requests"], shown["result"]) == (20, requests, result)
    assert growth == f"cost of a request from {requests:,} to {requests:,}: +0.0%"


def test_the_sizes_are_those_of_the_page_unless_others_are_given() -> None:
    given = scale._parser().parse_args([])
    assert (tuple(given.requests), given.replicas) == (scale.SIZES, scale.REPLICAS)
    assert scale._parser().parse_args(["7"]).requests == [7]
