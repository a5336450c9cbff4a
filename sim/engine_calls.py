"""Which JSON call a route is: the one entry to /generate, the OpenAI routes and /v1/messages."""

from __future__ import annotations

from typing import Any

from sim import engine_anthropic, engine_generate, engine_openai
from sim.engine import SimEngine
from sim.engine_anthropic import AnthropicCall, anthropic_refusal
from sim.engine_generate import GenerateCall, UnknownField, generate_refusal, stream_refusal
from sim.engine_json import BadBody, JsonCall
from sim.engine_openai import OpenAICall, openai_refusal

ROUTES = (engine_generate.ROUTE, *engine_openai.ROUTES, engine_anthropic.ROUTE)


def read_call(route: str, body: dict[str, Any], engine: SimEngine, *, new_id: str, now_s: float) -> JsonCall:
    """The call that ``body`` asks of ``route``, which is one of ROUTES.

    Args:
        new_id: the request's id where the body has no ``rid``. No other id may begin with it: abort goes by prefixes.
        now_s: seconds since the epoch by the engine's clock.

    Raises:
        BadBody: answer it with ``bad_body``.
    """
    if route == engine_generate.ROUTE:
        return GenerateCall.read(body, engine.sampler, new_id=new_id, now_s=now_s)
    if route == engine_anthropic.ROUTE:
        return AnthropicCall.read(body, new_id=new_id, now_s=now_s)
    return OpenAICall.read(
        route,
        body,
        new_id=new_id,
        now_s=now_s,
        context_length=engine.profile.context_length,
    )


def bad_body(route: str, error: BadBody, *, stream: bool) -> tuple[int, Any]:
    """Status and body of the answer to a body that cannot be read; of a stream, the only event and status 200."""
    message = str(error)
    if route == engine_anthropic.ROUTE:
        return 400, anthropic_refusal(message)
    if route != engine_generate.ROUTE:
        return 400, openai_refusal(message)
    if isinstance(error, UnknownField):
        return 400, {"error": message}
    return (200, stream_refusal(message)) if stream else (400, generate_refusal(message))
