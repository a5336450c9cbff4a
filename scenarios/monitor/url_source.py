"""Boards of a real service: what its autoscaler, or its scale API, answers over HTTP (docs/api.md)."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from analysis.errors import BadInput
from protocol.scaling.policy import AutoscalerConfig
from scenarios.monitor.board import (
    IN_NAMES,
    OUT_NAMES,
    UNKNOWN,
    Board,
    ConditionRow,
    HistoryRow,
    latest,
    nothing_known,
    number,
    pair,
)
from scenarios.monitor.run_source import chosen, frame_texts, threshold_texts

_TIMEOUT_S = 5.0
_LONGEST = 4_000_000  # of one answer


class NoAnswer(Exception):
    """A route gave no JSON object. ``status``: 0 without any answer."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class Served:
    """A control API that is looked at again and again.

    Args:
        url: of the autoscaler (``.../autoscaler``) or of the scale API (``/engines`` below it).
        service: which one; None: the only one.
        token: what the server asks for; empty: nothing.

    Raises:
        BadInput: the URL is none, nobody answers there, or it is no control API.
    """

    def __init__(self, url: str, service: str | None, token: str = "") -> None:
        self._url = checked(url)
        self._token = token
        try:
            status = self.get("/status")
            names = list(status["services"]) if isinstance(status.get("services"), dict) else None
        except NoAnswer as error:
            if error.status == 0 or error.status in (401, 403):
                raise BadInput(f"{self._url}: {error}") from None
            names = None
        self.scaler = names is not None
        if not self.scaler:
            try:
                self.get("/engines")["current"]
            except (NoAnswer, KeyError):
                raise BadInput(
                    f"{self._url}: is neither an autoscaler (/status) nor a scale API (/engines); see docs/api.md"
                ) from None
            self.service = service or urllib.parse.urlsplit(self._url).path.strip("/") or "service"
        elif service is not None:
            self.service = service  # it may be added later; until then it is unknown
        else:
            self.service = chosen(names or [], None, self._url)

    def board(self) -> Board:
        """A look at it now. What is not answered is unknown."""
        when = time.strftime("%H:%M:%S")
        try:
            return self._of_scaler(when) if self.scaler else self._of_api(when)
        except NoAnswer as error:
            return nothing_known(self._url, self.service, when, f"no answer: {error}")

    # --- the autoscaler ---

    def _of_scaler(self, when: str) -> Board:
        status = self.get("/status")
        services = status.get("services")
        mine = services.get(self.service) if isinstance(services, dict) else None
        if not isinstance(mine, dict):
            known = ", ".join(services) if isinstance(services, dict) else ""
            note = f"{self.service!r} is not scaled there; known: {known or 'none'}"
            return nothing_known(self._url, self.service, when, note)
        query = urllib.parse.urlencode({"service": self.service})
        shown, config, past = (
            self._maybe(path) for path in (f"/conditions?{query}", "/config", f"/scale_history?{query}&limit=10")
        )
        notes = [str(mine.get("refusal") or "")]
        notes += [
            text for key, text in (("started", "not started"), ("enabled", "not enabled")) if status.get(key) is False
        ]
        return Board(
            self._url, self.service, when, _figures(mine, config, self.service),
            _rows(shown.get("scale_out"), OUT_NAMES), _rows(shown.get("scale_in"), IN_NAMES),
            latest([*_history(mine.get("pending_requests")), *_history(past.get("history"), "false")]),
            "; ".join(filter(None, notes)),
        )  # fmt: skip

    # --- the scale API ---

    def _of_api(self, when: str) -> Board:
        found = self.get("/engines")
        engines = found.get("engines")
        listed = [one for one in engines if isinstance(one, dict)] if isinstance(engines, list) else None
        figures = {
            "engines": number(found.get("current")),
            "ready": number(found.get("ready")),
            "in flight": None if listed is None else number(sum(_whole(one.get("inflight")) for one in listed)),
        }
        empty = nothing_known("", "", "", "")
        note = "a scale API knows no decisions; the autoscaler's URL shows them"
        pending = found.get("pending_cleanup")
        if isinstance(pending, int) and pending:
            note = f"{pending} not yet cleaned up; {note}"
        return Board(self._url, self.service, when, figures, empty.scale_out, empty.scale_in, (), note)

    # --- HTTP ---

    def get(self, path: str) -> dict[str, Any]:
        """GET a route. Raises NoAnswer."""
        request = urllib.request.Request(self._url + path)
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                found = json.loads(answer.read(_LONGEST))
        except urllib.error.HTTPError as error:
            asks = " (give --token-file)" if error.code == 401 else ""
            raise NoAnswer(f"{path} answered {error.code}{asks}", error.code) from None
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "reason", None) or error
            raise NoAnswer(f"{path}: {reason}") from None
        if not isinstance(found, dict):
            raise NoAnswer(f"{path} gave no JSON object", 200)
        return found

    def _maybe(self, path: str) -> dict[str, Any]:
        try:
            return self.get(path)
        except NoAnswer:
            return {}


def checked(url: str) -> str:
    """A URL without its last slash. Raises BadInput."""
    from real.options import is_url  # the command line loads no world before one is asked for

    if not is_url(url) or urllib.parse.urlsplit(url).username is not None:
        raise BadInput(f"{url}: no URL of a control API; as in http://127.0.0.1:8090/genrm/autoscaler")
    return url.rstrip("/")


def _whole(value: Any) -> int:
    return value if type(value) is int else 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _figures(mine: dict[str, Any], config: dict[str, Any], service: str) -> dict[str, str | None]:
    figures = frame_texts(mine.get("recent_metrics"))
    decision = mine.get("last_decision")
    action, at = _text(mine.get("last_scale_action")), mine.get("last_scale_time")
    figures |= {
        "engines": number(mine.get("current_engines")),
        "min / max": pair(mine.get("min_engines"), mine.get("max_engines")),
        "operations in all": number(mine.get("total_scale_operations")),
        "last action": f"{action} at {_clock(at)}" if action else "none yet" if "last_scale_action" in mine else None,
        "last decision": f"{decision.get('action')}: {decision.get('reason')}" if isinstance(decision, dict) else None,
        "evaluation interval": number(config.get("evaluation_interval_secs"), " s"),
        "cooldown out / in": pair(
            config.get("scale_out_cooldown_secs"), config.get("scale_in_cooldown_secs"), " s"
        ),
    }  # fmt: skip
    try:
        figures |= threshold_texts(AutoscalerConfig.model_validate(config).rules(service)) if config else {}
    except ValueError:  # another version's
        pass
    return figures


def _rows(found: Any, names: tuple[str, ...]) -> tuple[ConditionRow, ...]:
    given = found if isinstance(found, dict) else {}
    return tuple(_row(name, given.get(name)) for name in (*names, *(n for n in given if n not in names)))


def _row(name: str, found: Any) -> ConditionRow:
    if not isinstance(found, dict):
        return ConditionRow(name)
    value, met = _number(found.get("value")), found.get("met")
    known = met if isinstance(met, bool) and value is not None else None
    return ConditionRow(
        name, value, _number(found.get("threshold")), known,
        _number(found.get("held_secs")), _number(found.get("required_secs")),
    )  # fmt: skip


def _history(found: Any, cleanup: str = UNKNOWN) -> list[HistoryRow]:
    rows = []
    for item in found if isinstance(found, list) else ():
        if isinstance(item, dict):
            at = _number(item.get("triggered_at"))
            named = _text(item.get("request_id")) or (f"asked {_clock(at)}" if at is not None else UNKNOWN)
            rows.append(
                HistoryRow(
                    named, _text(item.get("action")) or UNKNOWN, _text(item.get("status")) or UNKNOWN, at,
                    UNKNOWN if at is None else _clock(at), _engines(item.get("from_engines")),
                    _engines(item.get("to_engines")), _text(item.get("cleanup")) or cleanup,
                    _text(item.get("error_message")) or _text(item.get("reason")),
                )
            )  # fmt: skip
    return rows


def _engines(value: Any) -> int | None:
    return value if type(value) is int else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _clock(at: Any) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(float(at)))
    except (TypeError, ValueError, OverflowError, OSError):
        return UNKNOWN


__all__ = ["NoAnswer", "Served", "checked"]
