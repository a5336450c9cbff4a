"""Calibration: what is shipped is what the data give, the errors are stated, and the engine model obeys the fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from analysis.calibrate import FILES, CalibrationError, calibrate, run_calibrate
from analysis.calibrate_output import profile_text
from sim.profiles import load_profile
from tests.conftest import shared_folder
from tests.sim.engine_world import S, World

SHIPPED = Path(__file__).parents[2] / "sim/profiles/qwen3-0.6b-rtx4090.yaml"


def runs() -> Path:
    folder = shared_folder()
    assert folder is not None
    return folder / "data/genrm_gpu_runs"


def copied(tmp_path: Path) -> Path:
    for name in FILES:
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((runs() / name).read_bytes())
    return tmp_path


@pytest.mark.shared
def test_the_shipped_profile_is_what_the_data_give() -> None:
    assert profile_text(calibrate(runs()), "--data DIR") == SHIPPED.read_text(encoding="utf-8")


def test_every_fitted_figure_states_its_error_and_none_is_off_by_more_than_8_percent() -> None:
    document = yaml.safe_load(SHIPPED.read_text(encoding="utf-8"))
    fitted = [row for row in document["fit"] if row["role"] == "fitted"]
    assert len(fitted) == 8
    for row in fitted:
        assert row["error_percent"] == pytest.approx((row["modelled"] / row["observed"] - 1) * 100, abs=0.06)
        assert abs(row["error_percent"]) < 8.0, row
    assert all(len(source["sha256"]) == 64 for source in document["sources"])
    assumed = {key for key, entry in document["parameters"].items() if entry["origin"] == "assumed"}
    assert {"prefill_step_base", "weight_bandwidth", "request_intake"} <= assumed


def test_the_start_up_is_of_one_run_and_those_of_the_others_test_it() -> None:
    """docs/published.md says so; the median of all of them, as it once was, leaves none to test it on."""
    document = yaml.safe_load(SHIPPED.read_text(encoding="utf-8"))
    rows = [row for row in document["fit"] if row["figure"].startswith("start-up")]
    fitted = [row for row in rows if row["role"] == "fitted"]
    assert [row["source"] for row in fitted] == ["e2e_run_20260924/events.json"]
    assert document["parameters"]["startup"]["value"] == fitted[0]["observed"]
    tested = [row for row in rows if row["role"] == "check"]
    assert len(tested) == 4 and len({row["source"] for row in tested}) == 2
    assert all(abs(row["error_percent"]) < 8.0 for row in tested)


def _alone(new: int) -> float:
    world = World(load_profile("qwen3-0.6b-rtx4090").replace(startup_ns=1))
    world.submit("r", 20, new)
    world.run()
    return world.results["r"].e2e_ns / S


@pytest.mark.parametrize(("new", "observed_s"), [(4000, 8.927), (8000, 19.413)])
def test_the_engine_model_gives_the_long_generations_within_6_percent(new: int, observed_s: float) -> None:
    assert _alone(new) == pytest.approx(observed_s, rel=0.06)


def test_48_closed_loop_workers_with_long_prompts_look_like_phase_high() -> None:
    """Run of 2026-09-25: 47 running, 2,556 tokens/s, usage .697 some 20 s into the phase, TTFT p95 just below 1 s."""
    world = World(load_profile("qwen3-0.6b-rtx4090").replace(startup_ns=1))
    serial = [0]

    def again(result: object) -> None:
        serial[0] += 1
        world.engine.submit(f"r{serial[0]:05}", 1800, 512, done=again)

    for _ in range(48):
        again(None)
    usage, running, rate = [], [], []
    for _ in range(20):
        world.run_for(1 * S)
        figures = world.engine.load_figures()
        usage.append(figures["num_used_tokens"] / world.engine.profile.kv_capacity_tokens)
        running.append(figures["num_running_reqs"])
    rate.append(world.engine.scheduler.generated_tokens / 20)
    assert max(running) == 48
    assert 0.62 < max(usage) < 0.85
    assert rate[0] == pytest.approx(2556, rel=0.15)
    assert world.engine.metrics.ttft_sum / S / sum(world.engine.metrics.ttft) < 1.0


def test_without_data_it_says_where_to_get_them_and_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_calibrate(None, None) == 2
    assert run_calibrate(tmp_path / "nowhere", None) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("python -m analysis calibrate --data DIR") == 2


def test_an_incomplete_folder_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.yaml"
    assert run_calibrate(tmp_path, out) == 2
    assert not out.exists() and "failure_injection_20260925_r2/events.json: not there" in capsys.readouterr().err


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (FILES[0], "[", "not JSON"),
        (FILES[0], "[]", "no event 's1_done'"),
        (FILES[1], "[]", "no event 'baseline_ray_free_gpus'"),
        (FILES[3], "[]", "no scale_out with a metrics_snapshot"),
        (FILES[2], "null", "no list of events"),
        (FILES[2], "[1]", "no list of events"),
        (FILES[2], "[" * 100_000, "not JSON"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, name: str, content: str, message: str) -> None:
    data = copied(tmp_path)
    (data / name).write_text(content, encoding="utf-8")
    with pytest.raises(CalibrationError, match=message):
        calibrate(data)


@pytest.mark.shared
@pytest.mark.parametrize("latency", [None, "x", float("nan"), [], 0])
def test_a_value_that_is_no_number_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], latency: object
) -> None:
    data = copied(tmp_path)
    events = json.loads((data / FILES[0]).read_text(encoding="utf-8"))
    for event in events:
        if event["event"] == "s1_done":
            event["requests"][0]["latency"] = latency
    (data / FILES[0]).write_text(json.dumps(events), encoding="utf-8")
    assert run_calibrate(data, tmp_path / "out.yaml") == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("calibrate: ") and said.err.count("\n") == 1
    assert not (tmp_path / "out.yaml").exists()


@pytest.mark.shared
def test_runs_that_contradict_the_model_are_refused(tmp_path: Path) -> None:
    data = copied(tmp_path)
    events = json.loads((data / FILES[0]).read_text(encoding="utf-8"))
    for event in events:
        if event["event"] == "s2_requests":
            for request in event["requests"]:
                request["latency"] = 2.0  # twice the tokens in a quarter of the time
    (data / FILES[0]).write_text(json.dumps(events), encoding="utf-8")
    with pytest.raises(CalibrationError, match="not positive"):
        calibrate(data)


@pytest.mark.shared
def test_the_cli_function_writes_the_profile_and_prints_the_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.yaml"
    assert run_calibrate(runs(), out) == 0
    assert out.read_text(encoding="utf-8") == SHIPPED.read_text(encoding="utf-8")
    printed = capsys.readouterr().err
    assert "S1 4,000 tokens alone" in printed and "assumed, not fitted: " in printed
