# ruff: noqa: E501 - one row of a table a line
"""The readers of public traces and the drawn workloads."""

from __future__ import annotations

import json
import pathlib
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from analysis.errors import BadInput
from scenarios.schema import WorkloadModel
from scenarios.workloads import synthetic
from scenarios.workloads.arrival import REORDER_WINDOW, Arrival, Counts
from scenarios.workloads.azure import read_azure
from scenarios.workloads.burstgpt import read_burstgpt
from scenarios.workloads.mooncake import read_mooncake
from scenarios.workloads.source import TRACES, closed_loop, open_loop
from sim.random import Streams

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
Reader = Callable[..., Iterator[Arrival]]


@pytest.fixture
def write(tmp_path: pathlib.Path) -> Callable[..., pathlib.Path]:
    def write(*lines: str, end: str = "\n", name: str = "trace") -> pathlib.Path:
        path = tmp_path / name
        path.write_bytes(end.join(lines).encode())
        return path

    return write


def _azure(*rows: str) -> tuple[str, ...]:
    return (AZURE, *(f"2023-11-16 18:17:{row}" for row in rows))


def _mooncake(timestamp: Any, prompt: Any = 600, output: Any = 5, blocks: Any = (1, 2)) -> str:
    return json.dumps({"timestamp": timestamp, "input_length": prompt, "output_length": output, "hash_ids": blocks})


# --- good rows ---


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_azure_keeps_seven_fractional_digits_as_integers(write: Callable[..., pathlib.Path], end: str) -> None:
    path = write(*_azure("03.9799600,4808,10", "04.0319601,3180,8"), end=end)
    assert list(read_azure(path)) == [Arrival(0, 4808, 10), Arrival(52_000_100, 3180, 8)]


def test_azure_reads_days_offsets_and_whole_seconds(write: Callable[..., pathlib.Path]) -> None:
    rows = ("2024-02-29 23:59:59+00:00,1,1", "2024-03-01 00:00:00.000000001,1,1", "2024-03-01 01:00:00+01:00,1,1")
    times = [arrival.t_ns for arrival in read_azure(write(AZURE, *rows))]
    # The last is 00:00:00 UTC: one nanosecond before the second, so it comes before it.
    assert times == [0, 1_000_000_000, 1_000_000_001]


def test_burstgpt_takes_columns_by_name_and_sessions(write: Callable[..., pathlib.Path]) -> None:
    path = write("Timestamp,Session ID,Model,Request tokens,Response tokens", "5,s1,GPT-4,10,3", "5.5,s2,GPT-4,20,4")
    assert list(read_burstgpt(path)) == [Arrival(0, 10, 3, (), "s1"), Arrival(500_000_000, 20, 4, (), "s2")]


def test_mooncake_blocks_drive_the_prefix(write: Callable[..., pathlib.Path]) -> None:
    path = write(_mooncake(0), "", _mooncake(27.5, 512, 1, [1]))
    assert list(read_mooncake(path)) == [Arrival(0, 600, 5, (1, 2)), Arrival(27_500_000, 512, 1, (1,))]


def test_equal_times_keep_the_order_of_the_file(write: Callable[..., pathlib.Path]) -> None:
    path = write(*_azure("03.0,1,1", "03.0,2,1", "03.0,3,1"))
    assert [arrival.prompt_tokens for arrival in read_azure(path)] == [1, 2, 3]


def test_small_disorder_is_mended_and_the_earliest_is_time_zero(write: Callable[..., pathlib.Path]) -> None:
    path = write(*_azure("05.0,1,1", "03.0,2,1", "04.0,3,1"))
    assert [(a.t_ns, a.prompt_tokens) for a in read_azure(path)] == [(0, 2), (10**9, 3), (2 * 10**9, 1)]


def test_wide_disorder_is_an_error(write: Callable[..., pathlib.Path]) -> None:
    path = write(*(_mooncake(1000 + number) for number in range(REORDER_WINDOW + 1)), _mooncake(0))
    with pytest.raises(BadInput, match=rf":{REORDER_WINDOW + 2}: column 'timestamp'.*sort the file"):
        list(read_mooncake(path))


def test_zero_output_tokens_are_passed_over_and_counted(write: Callable[..., pathlib.Path]) -> None:
    counts = Counts()
    path = write(*_azure("03.0,1,0", "04.0,2,1", "05.0,3,0"))
    assert list(read_azure(path, counts=counts)) == [Arrival(0, 2, 1)]
    assert (counts.rows, counts.zero_output) == (3, 2)


def test_speed_up_is_exact_and_limit_counts_arrivals(write: Callable[..., pathlib.Path]) -> None:
    path = write(*_azure("00.0,1,1", "00.3,2,0", "00.3,3,1", "00.7,4,1"))
    assert [a.t_ns for a in read_azure(path, speed_up=0.1)] == [0, 3 * 10**9, 7 * 10**9]
    assert [a.prompt_tokens for a in read_azure(path, limit=2)] == [1, 3]


# --- bad rows: file, line, column, value ---

BAD = [
    (read_azure, [AZURE, "2023-11-16 18:17:61.0,1,1"], r"trace:2: column 'TIMESTAMP': '2023-11-16 18:17:61.0'"),
    (read_azure, [AZURE, "2023-02-30 18:17:01.0,1,1"], r"trace:2: column 'TIMESTAMP'.*no month has"),
    (read_azure, [AZURE, "yesterday,1,1"], r"trace:2: column 'TIMESTAMP': 'yesterday': is no time; write it as"),
    (read_azure, [AZURE, "2023-11-16 18:17:01.1234567891,1,1"], r"trace:2: column 'TIMESTAMP'"),
    (read_azure, [AZURE, "2023-11-16 18:17:01,1,1", "", "2023-11-16 18:17:01,x,1"], r"trace:4: column 'ContextTokens': 'x'"),
    (read_azure, [AZURE, "2023-11-16 18:17:01,0,1"], r"trace:2: column 'ContextTokens': 0: must be at least 1"),
    (read_azure, [AZURE, "2023-11-16 18:17:01,1,-3"], r"trace:2: column 'GeneratedTokens': '-3'"),
    (read_azure, [AZURE, "2023-11-16 18:17:01,1,1.5"], r"trace:2: column 'GeneratedTokens': '1.5'"),
    (read_azure, [AZURE, "2023-11-16 18:17:01,1,99999999999"], r"trace:2: column 'GeneratedTokens'.*must not exceed"),
    (read_azure, [AZURE, "2023-11-16 18:17:01,1"], r"trace:2: column 'GeneratedTokens'.*2 values, the header 3"),
    (read_azure, [AZURE, "2023-11-16 18:17:01,1,1,1"], r"trace:2: column 'number 4'"),
    (read_azure, ["TIMESTAMP,ContextTokens", "2023-11-16 18:17:01,1"], r"trace:1: the header has no column 'Generated"),
    (read_azure, [""], r"trace: is empty"),
    (read_azure, [AZURE], r"trace: has no row with output tokens"),
    (read_burstgpt, [BURST, "-1,m,1,1,2,l"], r"trace:2: column 'Timestamp': '-1'"),
    (read_burstgpt, [BURST, "nan,m,1,1,2,l"], r"trace:2: column 'Timestamp': 'nan'"),
    (read_burstgpt, [BURST, '0,"m,1,1,2,l'], r"trace:2: no row of CSV"),
    (read_mooncake, ["{"], r"trace:1: column 'character 2'.*no JSON"),
    (read_mooncake, ["[1]"], r"trace:1: .*no JSON object"),
    (read_mooncake, ['{"timestamp": 0}'], r"trace:1: column 'input_length'.*missing"),
    (read_mooncake, [_mooncake(-1)], r"trace:1: column 'timestamp': -1"),
    (read_mooncake, [_mooncake(True)], r"trace:1: column 'timestamp': True"),
    (read_mooncake, [_mooncake(0, "600")], r"trace:1: column 'input_length': '600'"),
    (read_mooncake, [_mooncake(0, 600, 5, [1, "2"])], r"trace:1: column 'hash_ids'"),
    (read_azure, [AZURE + "\r2023-11-16 18:17:01,1,1\r"], r"trace:1: the header is no row of CSV.*carriage return alone"),
    (read_azure, ["TIMESTAMP,ContextTokens,GeneratedTokens,ContextTokens", "x"], r"trace:1: .*several columns 'Context"),
    (read_azure, [AZURE, "2023-11-16 18:17:01,1," + "9" * 5000], r"trace:2: column 'GeneratedTokens'.*must not exceed"),
    (read_azure, [AZURE, "2023-11-16 18:17:01,4\x008,1"], r"trace:2: column 'ContextTokens': '4.x008'"),
    (read_azure, [AZURE, "0001-01-01 00:00:00,1,1", "9999-12-31 00:00:00,1,1"], r"trace:3: .*1000000000 s after the first"),
    (read_azure, [AZURE, "x" * (1 + (1 << 20))], r"trace:2: the line is longer than 1048576 bytes"),
    (read_burstgpt, [BURST, "1e999999,m,1,1,2,l"], r"trace:2: column 'Timestamp': '1e999999'"),
    (read_burstgpt, [BURST, "1_0,m,1,1,2,l"], r"trace:2: column 'Timestamp': '1_0'"),
    (read_mooncake, ['{"timestamp": 1e9999999999999999999999}'], r"trace:1: a number is too long or too large"),
    (read_mooncake, [_mooncake(10**400)], r"trace:1: column 'timestamp': 1000.*must be milliseconds"),
    (read_mooncake, ['{"timestamp": ' + "9" * 5000 + "}"], r"trace:1: a number is too long or too large"),
    (read_mooncake, ["[" * 100_000], r"trace:1: nested too deeply"),
    (read_mooncake, [_mooncake(0, 600, 5, [1, 2**63])], r"trace:1: column 'hash_ids'.*below 2\*\*63"),
    (read_mooncake, [_mooncake(0, 512, 5, [1, 2])], r"trace:1: column 'hash_ids'.*2 blocks of 512 tokens are more"),
]  # fmt: skip


@pytest.mark.parametrize(("reader", "lines", "message"), BAD)
def test_bad_row_is_named(write: Callable[..., pathlib.Path], reader: Reader, lines: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        list(reader(write(*lines)))


def test_absent_file_and_bytes_that_are_no_text_are_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(BadInput, match="absent: no such file"):
        list(read_azure(tmp_path / "absent"))
    path = tmp_path / "binary"
    path.write_bytes(AZURE.encode() + b"\n\xff\xfe")
    with pytest.raises(BadInput, match=r"binary:2: byte 1 is no UTF-8"):
        list(read_azure(path))


# --- memory ---


def test_memory_does_not_grow_with_the_trace(write: Callable[..., pathlib.Path]) -> None:
    peaks = []
    for rows in (5_000, 40_000):
        path = write(*(_mooncake(number) for number in range(rows)), name=str(rows))
        tracemalloc.start()
        assert sum(1 for _ in read_mooncake(path)) == rows
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.2


# --- the public files ---


def test_the_shipped_trace_is_read_whole() -> None:
    arrivals = list(read_azure(TRACES / "AzureLLMInferenceTrace_code.csv"))
    assert len(arrivals) == 8819
    assert arrivals[0] == Arrival(0, 4808, 10)
    # 18:17:03.9799600 to 19:14:19.9280160
    assert arrivals[-1] == Arrival(3_435_948_056_000, 549, 173)
    assert all(later.t_ns >= earlier.t_ns for earlier, later in zip(arrivals, arrivals[1:], strict=False))


@pytest.mark.shared
def test_the_shipped_trace_is_the_public_one_unchanged(shared: pathlib.Path) -> None:
    name = "AzureLLMInferenceTrace_code.csv"
    assert (TRACES / name).read_bytes() == (shared / "data" / "traces" / name).read_bytes()


@pytest.mark.shared
def test_the_public_mooncake_trace(shared: pathlib.Path) -> None:
    arrivals = list(read_mooncake(shared / "data" / "traces" / "mooncake_synthetic_trace.jsonl"))
    assert len(arrivals) == 3993
    assert arrivals[0].prompt_tokens == 40160 and arrivals[0].prefix_blocks[:3] == (0, 1, 2)
    assert len(arrivals[0].prefix_blocks) == 79


@pytest.mark.shared
def test_the_burstgpt_head_has_a_failed_request(shared: pathlib.Path) -> None:
    counts = Counts()
    arrivals = list(read_burstgpt(shared / "data" / "dumps" / "burstgpt_schema_synthetic_head.csv", counts=counts))
    assert (len(arrivals), counts.zero_output) == (39, 1)


# --- drawn workloads ---


def _model(**changes: Any) -> WorkloadModel:
    given: dict[str, Any] = {
        "service": "s",
        "arrivals": {"poisson": {"rate_per_s": 100.0}},
        "prompt_tokens": {"lognormal": {"median": 700.0, "p99": 4000.0}},
        "output_tokens": {"uniform": {"low": 3, "high": 9}},
        "for_s": 100.0,
    }
    return WorkloadModel.model_validate({**given, **changes})


def test_poisson_has_its_rate_and_sizes_their_quantiles() -> None:
    arrivals = list(open_loop(_model(), None, Streams(3).stream))
    assert len(arrivals) == pytest.approx(10_000, rel=0.05)
    prompts = sorted(arrival.prompt_tokens for arrival in arrivals)
    assert prompts[len(prompts) // 2] == pytest.approx(700, rel=0.05)
    assert prompts[len(prompts) * 99 // 100] == pytest.approx(4000, rel=0.15)
    assert {arrival.output_tokens for arrival in arrivals} == set(range(3, 10))
    assert arrivals[-1].t_ns < 100 * synthetic.NS


def test_same_seed_same_arrivals_other_seed_others() -> None:
    first, again, other = (list(open_loop(_model(), None, Streams(seed).stream)) for seed in (3, 3, 4))
    assert first == again != other


def test_constant_rate_is_exact_and_shared_without_gap_or_overlap() -> None:
    model = _model(arrivals={"constant": {"rate_per_s": 3.0}}, for_s=None, requests=10, clients=3)
    shares = [list(open_loop(model, None, Streams(0).stream, share)) for share in range(3)]
    times = sorted(arrival.t_ns for share in shares for arrival in share)
    assert times == [number * synthetic.NS // 3 for number in range(10)]


def test_a_trace_is_shared_without_gap_or_overlap(write: Callable[..., pathlib.Path]) -> None:
    path = write(*_azure("00.0,1,1", "00.3,2,1", "00.4,3,1", "00.7,4,1"))
    trace = {"format": "azure", "file": "trace"}
    model = WorkloadModel.model_validate({"service": "s", "trace": trace, "clients": 2})
    shares = [[a.prompt_tokens for a in open_loop(model, path, Streams(0).stream, share)] for share in range(2)]
    assert shares == [[1, 3], [2, 4]]


def test_a_closed_loop_gives_each_session_its_turns() -> None:
    model = _model(arrivals={"closed_loop": {"sessions": 4, "turns": 3}}, for_s=None)
    turns = list(closed_loop(model, Streams(0).stream, 2)[0][1])
    assert len(turns) == 3 and {turn.session for turn in turns} == {"session-000002"}


def test_phases_of_a_closed_loop_share_a_prefix_as_far_as_their_prompts_go() -> None:
    phase = {"prompt_tokens": {"fixed": 1300}, "output_tokens": {"fixed": 5}, "shared_prefix_tokens": 2048}
    model = _model(
        arrivals={"closed_loop": {"sessions": 2, "turns": 2}}, for_s=None,
        phases=[{"from_s": 5, **phase}, {"from_s": 9, **phase, "shared_prefix_tokens": 0}],
    )  # fmt: skip
    phases = closed_loop(model, Streams(0).stream, 1, 512)
    assert [from_s for from_s, _ in phases] == [0.0, 5.0, 9.0]
    first, shared, alone = (list(turns) for _, turns in phases)
    assert {turn.prefix_blocks for turn in first} == {()} == {turn.prefix_blocks for turn in alone}
    assert [turn.prefix_blocks for turn in shared] == [(0, 1)] * 2  # 1,300 tokens hold two whole blocks
    assert {turn.session for turn in (*first, *shared, *alone)} == {"session-000001"}


def test_lognormal_draws_are_cut() -> None:
    draw = synthetic.lognormal(Streams(1).stream("x"), 100, 10_000, most=150)
    drawn = [draw() for _ in range(1000)]
    assert max(drawn) == 150 and min(drawn) >= 1
