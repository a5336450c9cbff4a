"""Fit an engine profile to recorded GPU runs, and say how well it fits.

Input: the folder of runs described in ../shared/spec/scaling_acceptance.md (section 8). Only numbers and the SHA-256
of the files go into a profile, never the files. What the runs can tell of an engine is little, so each parameter says
whether it is *fitted*, *read* in SGLang's source, *observed* elsewhere or *assumed*, and each figure that was used or
checked is printed with its error.

The model of a decode step is ``base + per_request * batch + batched * (batch > 1) + per_context_token * context``; it
is fitted by least squares of relative errors over whole durations (a request of 4,000 tokens is a sum of 3,999 steps).
"""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

from analysis.calibrate_input import (
    WHERE_TO_GET,
    CalibrationError,
    event_of,
    least_squares,
    operation,
    read,
    sha256,
)
from analysis.calibrate_output import profile_text
from analysis.errors import BadInput
from analysis.rundir import write_atomic

_FAILURE_RUN = "failure_injection_20260925_r2/events.json"
_MANUAL_RUN = "e2e_run_20260924/events.json"
_CONSISTENCY_RUN = "reward_consistency_20260927_final_r6/events.json"
_AUTOSCALER_RUN = "autoscaler_prereg_v2_20260925_r5/scale_history_round_b.json"
_DETERMINISTIC_RUN = "autoscaler_prereg_v2_20260926_final_r3/scale_history.json"
FILES = (_FAILURE_RUN, _MANUAL_RUN, _CONSISTENCY_RUN, _AUTOSCALER_RUN, _DETERMINISTIC_RUN)

# What the runs do not record. Each is named in the profile's notes.
_SHORT_PROMPT_TOKENS = 20  # the long generations answer a one-line question
_JUDGE_PROMPT_TOKENS = 1800  # "~1.8 k-token prompt" of phase HIGH
_HIGH_NEW_TOKENS = 512
_STEADY_NEW_TOKENS = 256
_PREFILL_BASE_MS = 6.0
_PREFILL_PAIR_NS = 2.0
_CHUNK_TOKENS = 4096
_WARM_CALLS = 8  # prompts of phase0_scores, one after the other, 8 tokens each
_WARM_TOKENS = 8


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured figure beside what the fitted model gives. ``role``: ``fitted`` (used in the fit) or ``check``."""

    name: str
    observed: float
    modelled: float
    unit: str
    role: str
    source: str

    @property
    def error_percent(self) -> float:
        return (self.modelled / self.observed - 1.0) * 100.0


@dataclasses.dataclass(frozen=True)
class _Span:
    """A measured duration as a sum of decode steps: counts of steps, of requests and of context tokens over them."""

    name: str
    source: str
    seconds: float
    overhead_s: float
    steps: float
    requests: float
    context: float
    batched: float
    """Of the steps, those of more than one request."""

    def terms(self) -> tuple[float, float, float, float]:
        """What the costs of a step are multiplied by."""
        return self.steps, self.requests, self.context, self.batched

    def modelled_s(self, cost: tuple[float, ...]) -> float:
        return self.overhead_s + sum(term * one for term, one in zip(self.terms(), cost, strict=True))


def calibrate(data_dir: Path) -> dict[str, Any]:
    """The profile ``qwen3-0.6b-rtx4090`` fitted to the runs under ``data_dir``, as the mapping that its YAML holds.

    Raises:
        CalibrationError: a file or a key is missing; the text says which and what to do.
    """
    runs = {name: read(data_dir, name) for name in FILES}
    overhead_s = _request_overhead_s(runs[_MANUAL_RUN])
    capacity, capacity_note = _kv_capacity(runs[_AUTOSCALER_RUN], runs[_DETERMINISTIC_RUN])
    spans = [
        *_long_generations(runs[_FAILURE_RUN], overhead_s),
        *_loaded_steps(runs[_AUTOSCALER_RUN], capacity),
    ]
    cost = _least_squares(spans)
    per_token_us, ttft = _prefill_per_token_us(runs[_AUTOSCALER_RUN])
    (_, startup_s, _), *_ = startups = _startups(runs)
    figures = [
        Figure(span.name, round(span.seconds, 6), round(span.modelled_s(cost), 6), "s", "fitted", span.source)
        for span in spans
    ]
    # One run gives the start-up, so that those of the other runs test it.
    figures += [
        Figure(name, round(value, 3), startup_s, "s", "check" if number else "fitted", source)
        for number, (name, value, source) in enumerate(startups)
    ]
    figures += _deterministic_checks(runs[_DETERMINISTIC_RUN], cost, capacity)
    parameters = {
        "decode_step_base": _entry(_significant(cost[0] * 1e6), "us", "fitted"),
        "decode_step_per_request": _entry(_significant(cost[1] * 1e6), "us", "fitted"),
        "decode_step_batched": _entry(
            _significant(cost[3] * 1e6),
            "us",
            "fitted",
            "a step of several requests runs other kernels than a step of one",
        ),
        "decode_step_per_context_token": _entry(
            _significant(cost[2] * 1e9),
            "ns",
            "fitted",
            ("reading 114,688 bytes of KV at 1,008 GB/s takes 114 ns; the linear model gives part of it to the batch"),
        ),
        "prefill_step_base": _entry(
            _PREFILL_BASE_MS,
            "ms",
            "assumed",
            ("the runs bound base + queueing at about 15 ms; single short requests cannot tell it from the gateway"),
        ),
        "prefill_step_per_request": _entry(0, "us", "assumed"),
        "prefill_step_per_token": _entry(
            _significant(per_token_us),
            "us",
            "fitted",
            (f"TTFT p95 of {ttft:.3f} s taken as the last of 47 prompts of ~1,800 tokens that came together"),
        ),
        "prefill_step_per_token_pair": _entry(
            _PREFILL_PAIR_NS,
            "ns",
            "assumed",
            ("229,376 FLOP per pair (28 layers, 16 heads of 128) at about 110 TFLOP/s"),
        ),
        "context_length": _entry(40960, "tokens", "assumed", "max_position_embeddings as the model's card gives it"),
        "kv_capacity": _entry(capacity, "tokens", "fitted", capacity_note),
        "max_running_requests": _entry(2048, "requests", "read", "least default of SGLang 0.5.23; no run reached it"),
        "chunked_prefill_size": _entry(
            _CHUNK_TOKENS,
            "tokens",
            "read",
            "default of SGLang 0.5.23 for GPUs below 35 GB; the runs do not record theirs",
        ),
        "max_prefill_tokens": _entry(16384, "tokens", "read"),
        "prefix_block": _entry(512, "tokens", "assumed", "block size of Mooncake traces; SGLang's own page is 1 token"),
        "new_token_ratio_init": _entry(0.7, "1", "read"),
        "new_token_ratio_min": _entry(0.098, "1", "read"),
        "new_token_ratio_decay_steps": _entry(600, "steps", "read"),
        "request_intake": _entry(300, "us", "assumed"),
        "refusal": _entry(1, "ms", "assumed"),
        "admin_reply": _entry(2.5, "ms", "observed", "SGLang 0.5.23 on 2 cores: pause replies took 2 to 3 ms"),
        "startup": _entry(
            round(startup_s, 3),
            "s",
            "fitted",
            (
                "that of e2e_run alone, CREATING to HEALTH_CHECKING, placement group included: an upper bound of the "
                "engine's own; the start-ups of the other runs test it"
            ),
        ),
        "weight_load_base": _entry(200, "ms", "assumed"),
        "weight_bytes": _entry(1_503_000_000, "bytes", "assumed", "about 0.75 G parameters of 2 bytes"),
        "weight_bandwidth": _entry(2_000_000_000, "bytes/s", "assumed"),
        "missing_weights": _entry(1.3, "s", "observed"),
        "health_poll": _entry(1, "s", "observed"),
        "health_timeout": _entry(20, "s", "observed"),
        "first_report": _entry(
            25,
            "s",
            "observed",
            "an idle replica added by hand is scaled in 71 and 75 s after ACTIVE, 45 s of which its conditions held; "
            "SGLang reports an idle scheduler every 30 s",
        ),
        "abort_poll": _entry(1, "s", "observed"),
        "sigterm_poll": _entry(5, "s", "observed"),
        "sigterm_exit": _entry(0.7, "s", "observed"),
        "coredump_wait": _entry(60, "s", "observed"),
        "health_generates": _entry(True, "flag", "observed"),
    }
    return {
        "name": "qwen3-0.6b-rtx4090",
        "summary": "SGLang with Qwen3-0.6B in bfloat16 on one RTX 4090, not deterministic.",
        "model_path": "Qwen/Qwen3-0.6B",
        "weights_version": "default",
        "sources": [{"file": name, "sha256": sha256(data_dir / name)} for name in FILES],
        "parameters": parameters,
        "fit": [
            {
                "figure": f.name,
                "observed": f.observed,
                "modelled": f.modelled,
                "unit": f.unit,
                "error_percent": round(f.error_percent, 1),
                "role": f.role,
                "source": f.source,
            }
            for f in figures
        ],
    }


def run_calibrate(data: Path | None, out: Path | None) -> int:
    """``python -m analysis calibrate``: fit, print every figure with its error, and write the profile.

    Args:
        data: folder of the runs; None or absent prints where to get them.
        out: YAML file to write; None writes it to standard output.

    Returns:
        0, or 2 when the input is missing or unusable (nothing is written then).
    """
    if data is None or not data.is_dir():
        what = "neither run directories nor --data given" if data is None else f"{data}: no such folder"
        print(f"calibrate: {what}. {WHERE_TO_GET}", file=sys.stderr)
        return 2
    try:
        profile = calibrate(data)
    except CalibrationError as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 2
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        # The runs are of one recording, whose files hold what is asked of them; others need not.
        what = f"a value is missing or is no number ({type(error).__name__}: {error}) in one of {', '.join(FILES)}"
        print(f"calibrate: {data}: {what}; are these the runs, unchanged?", file=sys.stderr)
        return 2
    text = profile_text(profile, "--data DIR")
    if out is None:
        print(text, end="")
    else:
        try:
            write_atomic(out, text)
        except BadInput as error:
            print(f"calibrate: --out {error}", file=sys.stderr)
            return 2
    print("figure                                              observed    modelled   error  role", file=sys.stderr)
    for row in profile["fit"]:
        print(
            f"{row['figure']:<48.48} {row['observed']:>9.4f} {row['unit']:<2} {row['modelled']:>9.4f} "
            f"{row['error_percent']:>+6.1f}%"
            f"  {row['role']}",
            file=sys.stderr,
        )
    assumed = ", ".join(key for key, entry in profile["parameters"].items() if entry["origin"] == "assumed")
    print(f"assumed, not fitted: {assumed}", file=sys.stderr)
    return 0


# --- what the runs say ------------------------------------------------------------------------------------------------


def _request_overhead_s(events: Any) -> float:
    """Client, gateway and prefill of one request on an idle service: 8 calls of 8 tokens one after the other.

    The 7 decode steps of a call are taken at 2 ms, which the long generations bear out; an error of 10% there moves the
    overhead by 1.4 ms.
    """
    began = event_of(events, "baseline_ray_free_gpus", _MANUAL_RUN)["t"]
    ended = event_of(events, "phase0_scores", _MANUAL_RUN)["t"]
    return float((ended - began) / _WARM_CALLS - (_WARM_TOKENS - 1) * 0.002)


def _long_generations(events: Any, overhead_s: float) -> list[_Span]:
    """S1 (4,000 tokens), S2 (8,000) alone on an engine; S3 (8,000), joined by the killed engine's request."""
    spans: list[_Span] = []
    source = _FAILURE_RUN
    for name, event, new in (
        ("S1 4,000 tokens alone", "s1_done", 4000),
        ("S2 8,000 tokens alone", "s2_requests", 8000),
    ):
        for index, request in enumerate(event_of(events, event, source)["requests"]):
            steps = new - 1
            spans.append(
                _Span(
                    f"{name}, call {index + 1}",
                    source,
                    float(request["latency"]),
                    overhead_s,
                    steps,
                    steps,
                    _context_sum(1, new),
                    0,
                )
            )
    survivor, retried = sorted(float(r["latency"]) for r in event_of(events, "s3_done", source)["requests"])
    # After the survivor's end the other is alone for the tokens that the survivor had before it came.
    lead = round((retried - survivor) / _late_step_s(spans, overhead_s))
    steps = 8000 - 1
    together = steps - lead
    spans.append(
        _Span(
            "S3 8,000 tokens, mostly two at a time",
            source,
            survivor,
            overhead_s,
            steps,
            lead + 2 * together,
            _context_sum(1, 8000) + _context_sum(1, 8000 - lead),
            together,
        )
    )
    return spans


def _late_step_s(alone: list[_Span], overhead_s: float) -> float:
    """A step near token 8,000 of a lone request, from the mean steps of S1 and S2 (a line through two points)."""
    short = sum(s.seconds - overhead_s for s in alone[:2]) / sum(s.steps for s in alone[:2])
    long = sum(s.seconds - overhead_s for s in alone[2:]) / sum(s.steps for s in alone[2:])
    return long + (long - short) / 2000 * 3750  # the means lie at tokens 2,000 and 4,000; the wanted one near 7,750


def _context_sum(first: int, new: int) -> float:
    """Context tokens summed over the decode steps that make output tokens first + 1 .. new of a short prompt."""
    return sum(_SHORT_PROMPT_TOKENS + token for token in range(first, new))


def _loaded_steps(history: Any, capacity: int) -> list[_Span]:
    """Mean step under load from throughput over running requests: phase HIGH (one engine) and STEADY (two)."""
    out, steady = operation(history, "scale_out", _AUTOSCALER_RUN), operation(history, "scale_in", _AUTOSCALER_RUN)
    running, throughput = float(out["total_running_reqs"]), float(out["total_throughput"])
    context = running * (_JUDGE_PROMPT_TOKENS + _HIGH_NEW_TOKENS / 2)
    spans = [
        _Span(
            "HIGH: step at 47 running, ~97k context", _AUTOSCALER_RUN, running / throughput, 0.0, 1, running, context, 1
        )
    ]
    each = float(steady["total_running_reqs"]) / 2
    step = each / (float(steady["total_throughput"]) / 2)
    prefill = (
        _PREFILL_BASE_MS / 1e3 * each / _STEADY_NEW_TOKENS
    )  # one short prompt per finished request stalls the rest
    spans.append(
        _Span(
            "STEADY: step at 23.5 running, short context",
            _AUTOSCALER_RUN,
            step,
            prefill,
            1,
            each,
            float(steady["avg_token_usage"]) * capacity,
            1,
        )
    )
    return spans


def _kv_capacity(history: Any, deterministic: Any) -> tuple[int, str]:
    """Tokens of KV memory from the reported token usage, with outputs taken to be half done."""
    values = []
    for run, source in ((history, _AUTOSCALER_RUN), (deterministic, _DETERMINISTIC_RUN)):
        frame = operation(run, "scale_out", source)
        values.append(
            float(frame["total_running_reqs"])
            * (_JUDGE_PROMPT_TOKENS + _HIGH_NEW_TOKENS / 2)
            / float(frame["avg_token_usage"])
        )
    mean = sum(values) / len(values)
    return round(mean / 1000) * 1000, (
        f"from token usage .697 and .662 with outputs taken half done ({values[0]:.0f} and {values[1]:.0f}); +-12%, as "
        "the wave's phase is not recorded"
    )


def _prefill_per_token_us(history: Any) -> tuple[float, float]:
    frame = operation(history, "scale_out", _AUTOSCALER_RUN)
    tokens = float(frame["total_running_reqs"]) * _JUDGE_PROMPT_TOKENS
    ttft = float(frame["max_ttft_p95"])
    fixed = tokens / _CHUNK_TOKENS * _PREFILL_BASE_MS / 1e3 + tokens * _JUDGE_PROMPT_TOKENS / 2 * _PREFILL_PAIR_NS / 1e9
    return (ttft - fixed) / tokens * 1e6, ttft


def _startups(runs: dict[str, Any]) -> list[tuple[str, float, str]]:
    """Start-ups, the manual run's first: CREATING to HEALTH_CHECKING, else submit to ACTIVE less 1.1 s of health."""
    found: list[tuple[str, float, str]] = []
    for source in (_MANUAL_RUN, _CONSISTENCY_RUN):
        at = {e.get("status"): float(e["t"]) for e in runs[source] if e.get("event") == "scale_out_status"}
        if "CREATING" not in at or "HEALTH_CHECKING" not in at:
            raise CalibrationError(
                f"{source}: no scale_out_status with CREATING and HEALTH_CHECKING; is this the right run?"
            )
        found.append((f"start-up ({source.split('_2')[0]})", at["HEALTH_CHECKING"] - at["CREATING"], source))
    submitted = 0.0
    for event in runs[_FAILURE_RUN]:
        if event.get("event") == "scale_out_submitted":
            submitted = float(event["t"])
        elif event.get("event") == "scale_out_final":
            found.append(("start-up (failure_injection)", float(event["t"]) - submitted - 1.1, _FAILURE_RUN))
    return found


def _deterministic_checks(history: Any, cost: tuple[float, ...], capacity: int) -> list[Figure]:
    """The same load with deterministic inference on: not what this profile models. Shown so that nobody is misled."""
    frame = operation(history, "scale_out", _DETERMINISTIC_RUN)
    running = float(frame["total_running_reqs"])
    observed = running / float(frame["total_throughput"])
    modelled = cost[0] + running * cost[1] + float(frame["avg_token_usage"]) * capacity * cost[2] + cost[3]
    return [
        Figure(
            "HIGH with deterministic inference (not modelled)",
            round(observed, 6),
            round(modelled, 6),
            "s",
            "check",
            _DETERMINISTIC_RUN,
        )
    ]


# --- arithmetic and reading -------------------------------------------------------------------------------------------


def _least_squares(spans: list[_Span]) -> tuple[float, ...]:
    """Coefficients (seconds) that minimise the squared relative errors of the spans' own durations."""
    rows = []
    for span in spans:
        own = span.seconds - span.overhead_s
        rows.append([term / own for term in span.terms()])
    solution = least_squares(rows, [1.0] * len(rows))
    if not all(0 < cost < math.inf for cost in solution):
        raise CalibrationError(f"the fit gives a cost that is not positive ({solution}); the runs contradict the model")
    return tuple(solution)


def _significant(value: float) -> float:
    return float(f"{value:.4g}")


def _entry(value: Any, unit: str, origin: str, note: str = "") -> dict[str, Any]:
    entry = {"value": value, "unit": unit, "origin": origin}
    return {**entry, "note": note} if note else entry
