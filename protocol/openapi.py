"""The OpenAPI 3.1 document of what is served over HTTP, made of the tables of routes and the types of their bodies.

Nothing in it is written by hand: a route or a field that the code has is in it, and nothing else is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from pydantic import TypeAdapter

from protocol.rollout.elastic_http import ROLLOUT_ROUTES
from protocol.scaling.bodies import ErrorBody
from protocol.scaling.http_tables import AUTOSCALER_ROUTES, SCALE_ROUTES
from protocol.scaling.policy import AutoscalerConfig
from protocol.serving.gateway_bodies import GATEWAY_ERRORS, GATEWAY_ROUTES, GatewayErrorBody
from protocol.serving.http_routes import SERVER_ERRORS, HttpErrorBody, Route

ApiName = Literal["gateway", "scale", "rollout", "autoscaler"]
ROUTES: Final[Mapping[ApiName, tuple[Route, ...]]] = {
    "gateway": GATEWAY_ROUTES,
    "scale": SCALE_ROUTES,
    "rollout": ROLLOUT_ROUTES,
    "autoscaler": AUTOSCALER_ROUTES,
}
_SAYS: Final[Mapping[ApiName, str]] = {
    "gateway": "The gateway: the one entry of generation calls, and its counters.",
    "scale": "The control API of a scaled service.",
    "rollout": "The control API of elastic rollout replicas.",
    "autoscaler": "The autoscaler of a scaled service.",
}
_EVERYWHERE = (400, 401, 500, 501, 502, 503, 504)
_WITH_BODY = (408, 413)
_WHEN = {
    200: "Done, or admitted.",
    400: "The request is malformed, or names what there is not.",
    401: "A token is set, and the request does not bring it.",
    404: "There is no such thing.",
    408: "The body took too long.",
    409: "Not now: something else is at work.",
    413: "The body is too long.",
    422: "A field has a wrong type or value.",
    500: "An error that nobody foresaw; the outcome is unknown.",
    501: "A component of the user's own lacks the method.",
    502: "The outcome is unknown: the connection broke, or a replica answered 5xx.",
    503: "Nothing was done; ask again.",
    504: "No answer in time; the outcome is unknown.",
}
_REF = "#/components/schemas/{model}"


def document(mounts: Mapping[str, ApiName], *, version: str = "1") -> dict[str, Any]:
    """The document of one server.

    Args:
        mounts: prefix of the paths (``""`` or ``/name``) to what is served below it.
        version: of the API.
    """
    schemas: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for prefix, api in mounts.items():
        for route in ROUTES[api]:
            paths.setdefault(prefix + route.path, {})[route.method.lower()] = _operation(route, api, schemas, shared)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Seatrial", "version": version, "description": "Gateway, scaling and autoscaler over HTTP."},
        "tags": [{"name": api, "description": _SAYS[api]} for api in dict.fromkeys(mounts.values())],
        "paths": paths,
        "components": {
            "responses": dict(sorted(shared.items())),
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def default_document() -> dict[str, Any]:
    """The document that is kept in docs/openapi.json: gateway at the root, the services ``genrm`` and ``rollout``."""
    return document({"": "gateway", "/genrm": "scale", "/genrm/autoscaler": "autoscaler", "/rollout": "rollout"})


def as_text(found: Mapping[str, Any]) -> str:
    """The document as it is written to a file."""
    return json.dumps(found, indent=1) + "\n"


def _operation(route: Route, api: ApiName, schemas: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", route.path)
    ]
    if route.query is not None:
        shape = route.query.model_json_schema()
        parameters += [
            {"name": name, "in": "query", "required": name in shape.get("required", ()), "schema": _plain_query(schema)}
            for name, schema in shape["properties"].items()
        ]
    made: dict[str, Any] = {
        "operationId": f"{api}_{route.method}_{route.path.strip('/')}".replace("/", "_").replace("{id}", "id"),
        "tags": [api],
        "summary": route.summary,
    }
    if parameters:
        made["parameters"] = parameters
    if route.body is not None:
        made["requestBody"] = {
            "required": not route.body_optional,
            "content": {"application/json": {"schema": _asked(route, schemas)}},
        }
    made["responses"] = _responses(route, api, schemas, shared)
    return made


def _plain_query(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a parameter: one that is absent is not null."""
    options = [one for one in schema.get("anyOf", ()) if one.get("type") != "null"]
    return dict(options[0]) if len(options) == 1 else {k: v for k, v in schema.items() if k != "title"}


def _responses(route: Route, api: ApiName, schemas: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}}
    if route.ok is not str:
        content = {"application/json": {"schema": _schema(route.ok, "serialization", schemas)}}
    if api == "gateway" and route.handler == "forward":
        content["text/event-stream"] = {"schema": {"type": "string"}}
    found: dict[str, Any] = {"200": {"description": _WHEN[200], "content": content}}
    for status in sorted({*route.errors, *_EVERYWHERE, *(_WITH_BODY if route.body is not None else ())}):
        answer = {
            "description": _WHEN[status],
            "content": {"application/json": {"schema": _error(route, api, status, schemas)}},
        }
        own = status in route.errors or route.handler == "forward"
        found[str(status)] = answer if own else _shared(f"{_shape(api)}{status}", answer, shared)
    if route.handler in ("forward", "generate"):
        passed = {"type": "object"} if api == "gateway" else _schema(ErrorBody, "serialization", schemas)
        found["4XX"] = {"description": "What the replica refused.", "content": {"application/json": {"schema": passed}}}
    return found


def _shape(api: ApiName) -> str:
    return "Gateway" if api == "gateway" else "Control"


def _shared(name: str, answer: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """A reference to an answer that many routes have."""
    if shared.setdefault(name, answer) != answer:
        raise ValueError(f"two different answers are named {name}")
    return {"$ref": f"#/components/responses/{name}"}


def _error(route: Route, api: ApiName, status: int, schemas: dict[str, Any]) -> dict[str, Any]:
    if api == "gateway":
        known = GATEWAY_ERRORS[status]
        named = f" error.type is {' or '.join(known)}." if known else ""
        one = _schema(GatewayErrorBody, "serialization", schemas)
        if route.handler == "forward" and status in (400, 408, 413):
            return {"anyOf": [one, {"type": "object"}], "description": f"Ours, or a replica's own.{named}"}
        return {"allOf": [one], "description": named.strip()} if named else one
    options = []
    usual = HttpErrorBody if route.handler == "generate" and status >= 500 else ErrorBody
    ours = route.error_types.get(status, usual)
    for body, codes in ((ours, route.errors.get(status)), (HttpErrorBody, SERVER_ERRORS.get(status))):
        if codes:
            of = {"type": "object", "properties": {"error": {"enum": list(codes)}}}
            options.append({"allOf": [_schema(body, "serialization", schemas), of]})
    return options[0] if len(options) == 1 else {"anyOf": options}


def _asked(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    if route.method != "PATCH":
        return _schema(route.body, "validation", schemas)
    shape = TypeAdapter(AutoscalerConfig).json_schema(mode="validation", ref_template=_REF)
    shape.pop("$defs", None)
    patch = {
        name: {"anyOf": [{"type": "object"} if "$ref" in json.dumps(one) else _bare(one), {"type": "null"}]}
        for name, one in shape["properties"].items()
    }
    schemas["AutoscalerConfigPatch"] = {
        "title": "AutoscalerConfigPatch",
        "description": "A JSON merge patch of AutoscalerConfig: the keys that change; null takes a key out.",
        "type": "object",
        "properties": patch,
        "additionalProperties": False,
    }
    return {"$ref": _REF.format(model="AutoscalerConfigPatch")}


def _bare(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name not in ("default", "title")}


def _schema(of: Any, mode: Literal["validation", "serialization"], schemas: dict[str, Any]) -> dict[str, Any]:
    """A reference to the schema of a type, or the schema itself where it has no name; its parts go to ``schemas``."""
    shape = TypeAdapter(of).json_schema(mode=mode, ref_template=_REF)
    for name, part in shape.pop("$defs", {}).items():
        _keep(name, part, schemas)
    if not isinstance(of, type) or "properties" not in shape:
        return shape
    _keep(of.__name__, shape, schemas)
    return {"$ref": _REF.format(model=of.__name__)}


def _keep(name: str, shape: dict[str, Any], schemas: dict[str, Any]) -> None:
    """What is answered has the declared fields and no others; what is asked says so of itself."""
    if "properties" in shape:
        shape.setdefault("additionalProperties", False)
    known = schemas.setdefault(name, shape)
    if known != shape:
        raise ValueError(f"two different types are named {name}")


def fields_of(found: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Schema to its fields: what a page that documents the API must name."""
    return {
        name: tuple(shape["properties"])
        for name, shape in found["components"]["schemas"].items()
        if "properties" in shape
    }


def errors_of(routes: Sequence[Route]) -> dict[int, set[str]]:
    """Status to the codes that a control API may answer with, the server's own among them."""
    found: dict[int, set[str]] = {status: set(codes) for status, codes in SERVER_ERRORS.items()}
    for route in routes:
        for status, codes in route.errors.items():
            found.setdefault(status, set()).update(codes)
    return found


__all__ = ["ROUTES", "ApiName", "as_text", "default_document", "document", "errors_of", "fields_of"]
