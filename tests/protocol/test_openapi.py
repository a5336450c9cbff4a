"""Every route, field and error of the code is in docs/openapi.json and in docs/api.md, and nothing else is."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import pytest

from protocol.openapi import ROUTES, as_text, default_document, document, errors_of, fields_of
from protocol.rollout import elastic
from protocol.rollout.elastic import RolloutScaling
from protocol.rollout.elastic_http import ROLLOUT_ROUTES
from protocol.scaling import api, autoscaler_api, judge, registry
from protocol.scaling.api import ScaleApi
from protocol.scaling.autoscaler_api import AutoscalerApi
from protocol.scaling.bodies import ApiReply
from protocol.scaling.http_tables import AUTOSCALER_ROUTES, SCALE_ROUTES
from protocol.serving import http, http_routes
from protocol.serving.gateway_api import GatewayApi
from protocol.serving.gateway_bodies import GATEWAY_ERRORS
from protocol.serving.http_routes import SERVER_ERRORS

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
REMAKE = "python -m scenarios openapi --out docs/openapi.json; python -m tests.docs"
PREFIX = {"gateway": "", "scale": "/genrm", "rollout": "/rollout", "autoscaler": "/genrm/autoscaler"}


def page() -> str:
    return (DOCS / "api.md").read_text(encoding="utf-8")


def section(name: str) -> str:
    found = re.search(rf"<!-- made: {name} -->\n(.*?)<!-- end -->", page(), re.DOTALL)
    assert found is not None, name
    return found[1]


def test_the_kept_document_is_what_the_code_serves() -> None:
    assert (DOCS / "openapi.json").read_text(encoding="utf-8") == as_text(default_document()), REMAKE


def test_every_route_is_in_both() -> None:
    kept = json.loads((DOCS / "openapi.json").read_text(encoding="utf-8"))
    for name, routes in ROUTES.items():
        table = section(f"api_{name}")
        assert len(routes) >= 8
        assert [f"`{route.method} {route.path}`" in table for route in routes].count(False) == 0, REMAKE
        paths = {(route.method.lower(), PREFIX[name] + route.path) for route in routes}
        below = {path for path in kept["paths"] if path.startswith(PREFIX[name])}
        described = {(method, path) for path in below for method in kept["paths"][path]}
        assert paths <= described, REMAKE
    assert sum(map(len, kept["paths"].values())) == sum(map(len, ROUTES.values()))


def test_every_field_is_in_both() -> None:
    kept = json.loads((DOCS / "openapi.json").read_text(encoding="utf-8"))
    bodies = section("api_bodies")
    fields = fields_of(default_document())
    assert len(fields) > 35 and fields == fields_of(kept), REMAKE
    for name, names in fields.items():
        line = next((line for line in bodies.splitlines() if line.startswith(f"- **{name}**")), "")
        missing = [field for field in names if f"`{field}`" not in line]
        assert not missing, f"{name}: {missing} are not on the page: {REMAKE}"


def test_every_error_is_in_both() -> None:
    kept = json.dumps(json.loads((DOCS / "openapi.json").read_text(encoding="utf-8")))
    table = section("api_errors")
    for routes in (SCALE_ROUTES, ROLLOUT_ROUTES, AUTOSCALER_ROUTES):
        for status, codes in errors_of(routes).items():
            for code in codes:
                assert f"| {status} | `{code}` |" in table, (status, code, REMAKE)
                if status not in (404, 405) or code not in SERVER_ERRORS[status]:  # of no route, so of no operation
                    assert f'"{code}"' in kept, (code, REMAKE)


@pytest.mark.parametrize(
    ("cls", "routes", "by_handle"),
    [
        (ScaleApi, SCALE_ROUTES, set()),
        (RolloutScaling, ROLLOUT_ROUTES, {"update_weights"}),  # for the trainer of the deployment (docs/api.md)
        (AutoscalerApi, AUTOSCALER_ROUTES, set()),
    ],
)
def test_every_handler_has_a_route_and_every_route_a_handler(cls: type, routes: Any, by_handle: set[str]) -> None:
    handlers = {
        name
        for name, method in inspect.getmembers(cls, inspect.iscoroutinefunction)
        if not name.startswith("_") and inspect.signature(method).return_annotation in ("ApiReply", ApiReply)
    }
    assert handlers - by_handle == {route.handler for route in routes} and by_handle <= handlers


def test_the_gateway_serves_what_its_table_says() -> None:
    for route in ROUTES["gateway"]:
        assert inspect.iscoroutinefunction(getattr(GatewayApi, f"_{route.handler}"))


def _codes(module: Any, name: str, position: int) -> Iterator[Any]:
    """The constants that a function is called with at a position, anywhere in a module."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name:
            argument = node.args[position]
            if isinstance(argument, ast.Constant):
                yield argument.value


def test_every_code_that_a_handler_answers_is_declared() -> None:
    """A new ``_error(409, "NEW", ...)`` in a handler fails here until its route says so."""
    scale = {code for codes in errors_of(SCALE_ROUTES).values() for code in codes}
    scaler = {code for codes in errors_of(AUTOSCALER_ROUTES).values() for code in codes}
    answered = {*_codes(api, "_error", 1), *_codes(judge, "_error", 1), *_codes(judge, "_lost", 1)}
    answered |= {code for code in registry.STATUS_OF if code}
    assert len(answered) > 12 and answered <= scale
    of_rollouts = {code for codes in errors_of(ROLLOUT_ROUTES).values() for code in codes}
    answered = {*_codes(elastic, "_error", 1), *_codes(elastic, "RejectedBody", 0)}
    assert len(answered) > 6 and answered - {"DRAINING", "WEIGHTS_UNKNOWN"} <= of_rollouts  # those two by handle alone
    told = set(_codes(autoscaler_api, "_error", 1)) | {"INVALID_CONFIG"}
    assert {"UNKNOWN_SERVICE", "TARGET_BUSY"} <= told <= scaler
    refused = {
        *_codes(http, "Refusal", 2),
        *_codes(http_routes, "Refusal", 2),
        "authentication_error",
        "request_timeout",
    }
    of_servers = {code for codes in SERVER_ERRORS.values() for code in codes}
    assert {kind.upper() for kind in refused} <= of_servers
    assert refused <= {kind for kinds in GATEWAY_ERRORS.values() for kind in kinds}


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            else:
                yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def test_the_document_is_sound() -> None:
    found = default_document()
    ids = [one["operationId"] for path in found["paths"].values() for one in path.values()]
    assert len(ids) == len(set(ids))
    for reference in _references(found):
        at: Any = found
        for part in reference.removeprefix("#/").split("/"):
            at = at[part]
    for schema in found["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for path, operations in found["paths"].items():
        for operation in operations.values():
            declared = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
            assert declared == set(re.findall(r"{(\w+)}", path))


def test_a_route_or_a_field_that_is_added_changes_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above compare with is made from the code each time."""
    import protocol.openapi as made

    more = (*SCALE_ROUTES, dataclasses.replace(SCALE_ROUTES[0], path="/scale_sideways"))
    monkeypatch.setattr(made, "ROUTES", {**ROUTES, "scale": more})
    assert "/genrm/scale_sideways" in made.default_document()["paths"]
    answer = dataclasses.make_dataclass("StartedBody", [("started", bool), ("services", list[str]), ("new", int)])
    start = next(route for route in AUTOSCALER_ROUTES if route.path == "/start")
    monkeypatch.setattr(made, "ROUTES", {**ROUTES, "autoscaler": (dataclasses.replace(start, ok=answer),)})
    assert "new" in fields_of(made.default_document())["StartedBody"]


def test_two_types_of_one_name_are_refused() -> None:
    import protocol.openapi as made

    other = dataclasses.make_dataclass("StatusBody", [("odd", int)])
    schemas: dict[str, Any] = {}
    made._schema(other, "serialization", schemas)
    with pytest.raises(ValueError, match="StatusBody"):
        made._schema(SCALE_ROUTES[1].ok, "serialization", schemas)


def test_a_server_describes_what_it_has() -> None:
    only = document({"/chat": "scale"})
    assert all(path.startswith("/chat/") for path in only["paths"])
    assert {tag["name"] for tag in only["tags"]} == {"scale"}
