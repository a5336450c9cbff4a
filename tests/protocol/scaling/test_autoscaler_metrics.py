"""Pages of Prometheus text, percentiles over a window, and frames (scaling.md 6.2)."""

from __future__ import annotations

import bisect
import json
import math
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.scaling.metrics import (
    CRITICAL,
    GAUGES,
    HISTOGRAMS,
    HistogramWindow,
    Reading,
    aggregate,
    empty_frame,
    percentile,
    read_page,
    variance,
)

BOUNDS = (0.1, 0.5, 1.0, 5.0, 10.0)


def cumulative(samples: list[float]) -> tuple[tuple[float, float], ...]:
    """A histogram of these samples over BOUNDS."""
    return (*((b, float(sum(s <= b for s in samples))) for b in BOUNDS), (math.inf, float(len(samples))))


def gauge(value: float) -> Reading:
    return Reading(value, 0.0, 1)


def page(**values: float) -> str:
    return "".join(f'# TYPE sglang:{n} gauge\nsglang:{n}{{model_name="m"}} {v}\n' for n, v in values.items())


# --- pages ---


@pytest.mark.shared
def test_a_page_of_a_real_server_is_read(shared: pathlib.Path) -> None:
    found = read_page((shared / "data" / "dumps" / "sglang_metrics_llama31_8b.prom").read_text())
    assert found.gauges["num_running_reqs"] == 162 and found.gauges["num_queue_reqs"] == 2826
    assert found.gauges["token_usage"] == 0.28 and "gen_throughput" in found.gauges
    assert set(found.histograms) == {"ttft_p95", "itl_p95", "e2e_latency_p95"}  # that version had no queue time
    value, overflow = percentile(found.histograms["ttft_p95"], 0.95)
    assert overflow and value == 30.0  # 77% of its requests waited longer than the largest bound
    value, overflow = percentile(found.histograms["itl_p95"], 0.95)
    assert not overflow and 0.1 < value < 0.15


def test_label_sets_are_added_up_and_usage_is_their_mean() -> None:
    text = "".join(
        f'sglang:num_queue_reqs{{tp_rank="{rank}"}} 3\nsglang:token_usage{{tp_rank="{rank}"}} {0.2 + rank / 5}\n'
        f'sglang:queue_time_seconds_bucket{{tp_rank="{rank}",le="1.0"}} 2\n'
        f'sglang:queue_time_seconds_bucket{{tp_rank="{rank}",le="+Inf"}} 4\n'
        for rank in range(2)
    )
    found = read_page(text)
    assert found.gauges["num_queue_reqs"] == 6 and found.gauges["token_usage"] == pytest.approx(0.3)
    assert found.histograms["queue_time_p95"] == ((1.0, 4.0), (math.inf, 8.0))


def test_what_is_nan_was_not_observed() -> None:
    found = read_page(page(token_usage=math.nan, num_queue_reqs=0) + 'sglang:queue_time_seconds_bucket{le="1"} NaN\n')
    assert found.gauges == {"num_queue_reqs": 0.0} and not found.histograms


def test_the_names_of_other_servers_are_not_taken_for_ours() -> None:
    assert read_page("vllm:num_queue_reqs 5\nnum_queue_reqs 5\n").gauges == {}


def test_no_prometheus_text_is_an_error() -> None:
    with pytest.raises(ValueError):
        read_page("<html>502 Bad Gateway</html>\n")


_TRIPS = ['x{a="b", ="c"} 1', f"x 1 {'9' * 400}", "{", "x{", 'x{le="1"', "x", "# TYPE x", "x{} 1_0", '"x" 1']


@pytest.mark.parametrize("line", _TRIPS, ids=lambda line: line[:8])
def test_what_the_parser_trips_over_is_no_prometheus_text(line: str) -> None:
    """Of an IndexError or an OverflowError nobody would know that it is the page's fault."""
    try:
        found = read_page(f"{page(token_usage=0.5)}{line}\n")
    except ValueError:
        return
    assert found.gauges == {"token_usage": 0.5}


@pytest.mark.parametrize(
    "value", ["9" * 400, "-" + "9" * 400, "+Inf", "1e308", "1e16", "-1", "NaN"], ids=lambda value: value[:4]
)
def test_a_value_that_cannot_be_was_not_observed(value: str) -> None:
    text = (
        page(num_queue_reqs=3)
        + f'sglang:num_running_reqs {value}\nsglang:queue_time_seconds_bucket{{le="+Inf"}} {value}\n'
    )
    found = read_page(text)
    assert found.gauges == {"num_queue_reqs": 3} and not found.histograms


_NAMES = st.sampled_from(
    [*(f"sglang:{name}" for name in CRITICAL), "sglang_num_running_reqs", "sglang:queue_time_seconds_bucket", "x", ""]
)
_QUOTED = st.sampled_from(["1", "0.5", "+Inf", "-Inf", "NaN", "-1", "1e308", "9" * 400, "a", "", "\\", '\\"'])
_LABELS = st.lists(
    st.builds(
        "{}{}{}{}{}".format, st.sampled_from(["le", "a", "", "__name__", " "]), st.sampled_from(["=", "", " = "]),
        st.sampled_from(['"', "", "'"]), _QUOTED, st.sampled_from(['"', "", '",'])
    ),
    max_size=3,
).map(", ".join)  # fmt: skip
_VALUES = st.one_of(
    st.sampled_from(["1", "0", "NaN", "+Inf", "1e308", "9" * 400, "-" + "9" * 400, "9" * 5000, "1_0", "", "0x1", "٣"]),
    st.integers().map(str), st.floats().map(str),
)  # fmt: skip
_LINES = st.one_of(
    st.builds("{}{{{}}} {} {}".format, _NAMES, _LABELS, _VALUES, _VALUES),
    st.builds("{} {}".format, _NAMES, _VALUES),
    st.builds("# {} {} {}".format, st.sampled_from(["TYPE", "HELP", ""]), _NAMES, st.text(max_size=8)),
    st.text(max_size=12),
)  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(st.lists(st.one_of(st.lists(_LINES, max_size=6).map("\n".join), st.text(max_size=60)), min_size=1, max_size=4))
def test_whatever_replicas_show_comes_to_a_frame_that_is_json(texts: list[str]) -> None:
    """Each text is a page of one replica and, in turn, the pages of another one that changes its mind."""
    window, replicas = {field: HistogramWindow(60) for field in HISTOGRAMS}, {}
    for number, text in enumerate(texts):
        try:
            found = read_page(text)
        except ValueError:
            replicas[f"r{number}"] = None
            continue
        readings = {name: gauge(value) for name, value in found.gauges.items()}
        for field, buckets in found.histograms.items():
            window[field].add(number, buckets)
            p95 = window[field].p95(number)
            if p95 is not None:
                readings[field] = p95
        replicas[f"r{number}"] = readings
    frame = aggregate(replicas, (1.0, 2.0), 0, 0)
    json.dumps(frame.snapshot(), allow_nan=False)
    assert frame.num_engines == len(texts)


# --- percentiles ---


def test_a_percentile_is_interpolated_inside_of_its_bucket() -> None:
    assert percentile(((1.0, 0.0), (2.0, 100.0), (math.inf, 100.0)), 0.95) == (1.95, False)
    assert percentile(((1.0, 100.0), (math.inf, 100.0)), 0.95) == (0.95, False)


def test_a_rank_beyond_the_largest_bound_overflows() -> None:
    assert percentile(((1.0, 0.0), (2.0, 90.0), (math.inf, 100.0)), 0.95) == (2.0, True)
    assert percentile(((math.inf, 100.0),), 0.95) == (0.0, True)


def test_nothing_measured_is_no_overflow() -> None:
    assert percentile(cumulative([]), 0.95) == (0.0, False)


@given(st.lists(st.floats(0.001, 9.9), min_size=1, max_size=60))
def test_a_percentile_is_in_the_bucket_of_the_exact_one(samples: list[float]) -> None:
    value, overflow = percentile(cumulative(samples), 0.95)
    exact = sorted(samples)[math.ceil(0.95 * len(samples)) - 1]
    index = bisect.bisect_left(BOUNDS, exact)
    assert not overflow
    assert (BOUNDS[index - 1] if index else 0.0) <= value <= BOUNDS[index]


# --- windows ---


def test_a_p95_goes_down_when_the_slow_ones_are_over() -> None:
    """Hazard H7: in a published run a TTFT p95 of 3.7 s stayed for the whole idle round."""
    window, slow = HistogramWindow(60), [7.0] * 40
    window.add(0, cumulative([]))
    window.add(10, cumulative(slow))
    first = window.p95(10)
    assert first is not None and first.value > 5 and first.samples == 40
    window.add(40, cumulative(slow + [0.05] * 40))
    window.add(75, cumulative(slow + [0.05] * 80))
    later = window.p95(75)
    assert later is not None and later.value <= 0.1 and later.samples == 80
    assert window.p95(200) is None  # nothing measured is no evidence of anything


def test_what_was_before_the_first_page_is_of_unknown_age() -> None:
    window = HistogramWindow(60)
    window.add(0, cumulative([7.0] * 100))
    assert window.p95(0) is None
    window.add(10, cumulative([7.0] * 100 + [0.05]))
    found = window.p95(10)
    assert found is not None and found.samples == 1 and found.value <= 0.1


def test_a_process_that_began_anew_is_counted_from_zero() -> None:
    window = HistogramWindow(60)
    window.add(0, cumulative([7.0] * 100))
    window.add(10, cumulative([0.05] * 3))  # another process at the same address
    found = window.p95(10)
    assert found is not None and found.samples == 3 and found.value <= 0.1


def test_other_buckets_begin_anew() -> None:
    window = HistogramWindow(60)
    window.add(0, cumulative([1.0]))
    window.add(10, cumulative([1.0, 1.0]))
    window.add(20, ((2.0, 5.0), (math.inf, 5.0)))
    found = window.p95(20)
    assert found is not None and found.samples == 5


@given(st.lists(st.tuples(st.lists(st.floats(0.001, 20.0), max_size=8), st.booleans()), min_size=1, max_size=12))
def test_a_window_counts_what_was_measured_in_it(rounds: list[tuple[list[float], bool]]) -> None:
    """Whatever a server measures and however often it begins anew, no observation is counted twice or made up."""
    window, shown, measured = HistogramWindow(35), [], []
    window.add(0, cumulative(shown))
    for number, (new, restarted) in enumerate(rounds, 1):
        before = len(shown)
        shown = list(new) if restarted else shown + new
        seen = cumulative(shown)
        window.add(10 * number, seen)
        measured.append(len(new))
        if restarted and before and len(new) >= before:
            return  # a restart that cannot be told from growth: nobody can know
        found = window.p95(10 * number)
        expected = sum(measured[-4:])
        assert (0 if found is None else found.samples) == expected


# --- frames ---


BUSY = {"token_usage": gauge(0.95), "num_queue_reqs": gauge(50), "num_running_reqs": gauge(8)}


def test_a_replica_without_a_critical_field_is_unknown_and_its_other_fields_count() -> None:
    """M34 and M34b."""
    frame = aggregate({"a": BUSY, "b": {name: gauge(0) for name in GAUGES}}, (), 0, 0)
    assert frame.unknown_engines == ("a",) and frame.coverage == 1.0
    assert frame.total_queue_reqs == 50 and frame.avg_token_usage == pytest.approx(0.475)
    assert frame.field_coverage["gen_throughput"] == 0.5 and not frame.is_empty


@pytest.mark.parametrize(("each", "count", "total"), [(0.1, 10, 1.0), (1e308, 2, math.inf)])
def test_sums_are_the_same_on_every_python(each: float, count: int, total: float) -> None:
    # sum([0.1] * 10) is 0.9999999999999999 up to Python 3.11 and 1.0 from 3.12 on, and evidence would differ with it.
    replicas = {f"engine-{number}": {"gen_throughput": gauge(each)} for number in range(count)}
    assert aggregate(replicas, (), 0, 0).total_throughput == total


def test_an_idle_zero_is_not_the_same_as_nothing() -> None:
    idle = aggregate({"a": {name: gauge(0) for name in CRITICAL}}, (0.0, 0.0), 0, 0)
    assert idle.avg_token_usage == 0.0 and idle.throughput_variance == 0.0 and idle.unknown_engines == ()
    silent = empty_frame(("a", "b"), 0, 0)
    assert silent.is_empty and silent.avg_token_usage is None and silent.coverage == 0
    assert silent.unknown_engines == ("a", "b") and silent.num_engines == 2
    assert empty_frame((), 0, 0).is_empty


def test_no_latency_is_no_evidence_and_makes_nobody_unknown() -> None:
    fields = {name: gauge(0) for name in GAUGES}
    frame = aggregate({"a": {**fields, "itl_p95": Reading(0.05, 0, 9, True)}, "b": fields}, (), 0, 0)
    assert frame.field_coverage["itl_p95"] == 0.5 and frame.unknown_engines == ()
    assert frame.max_itl_p95 == 0.05 and frame.max_itl_p95_overflow and frame.max_ttft_p95 is None


def test_the_variance_of_throughput() -> None:
    assert variance((5.0, 5.0)) is None
    assert variance((0.0, 0.0, 0.0)) == 0.0
    assert variance((9.0, 10.0, 11.0)) == pytest.approx(0.1)
    assert variance((0.0, *[1000.0] * 9)) >= 1.0  # type: ignore[operator]  # the first busy frames after an idle one
    assert variance((500.0, *[10.0] * 10)) == 0.0  # ten frames and no more


@pytest.mark.shared
def test_a_frame_has_the_keys_of_the_published_ones(shared: pathlib.Path) -> None:
    path = shared / "data" / "genrm_gpu_runs" / "autoscaler_prereg_v2_20260926_final_r3" / "scale_history.json"
    published = json.loads(path.read_text())[0]["metrics_snapshot"]
    ours = empty_frame(("a",), 0, 0).snapshot()
    assert set(ours) == set(published) and set(ours["field_coverage"]) == set(published["field_coverage"])
