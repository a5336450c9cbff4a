"""POSTs to an engine that work on text and generate nothing: /tokenize and /v1/messages/count_tokens.

Source: SGLang 0.5.23, entrypoints/openai/serving_tokenize.py and entrypoints/anthropic/serving.py.
"""

from __future__ import annotations

from typing import Any

from sim.engine import SimEngine
from sim.engine_anthropic import COUNT, anthropic_refusal, prompt_of
from sim.engine_json import BadBody
from sim.engine_openai import conversation, openai_refusal
from sim.engine_tokens import encode

TOKENIZE = ("/tokenize", "/v1/tokenize")
ROUTES = (*TOKENIZE, COUNT)


def answer_text(route: str, body: dict[str, Any], engine: SimEngine) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer."""
    try:
        if route == COUNT:
            return 200, {"input_tokens": len(prompt_of(body))}
        tokens = _tokens(body)
    except BadBody as error:
        return 400, anthropic_refusal(str(error)) if route == COUNT else openai_refusal(str(error))
    count = [len(one) for one in tokens] if tokens and isinstance(tokens[0], list) else len(tokens)
    return 200, {"tokens": tokens, "count": count, "max_model_len": engine.profile.context_length}


def _tokens(body: dict[str, Any]) -> list[Any]:
    if body.get("messages") is not None:
        return conversation({"messages": body["messages"]})
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return encode(prompt)
    if isinstance(prompt, list) and all(isinstance(text, str) for text in prompt):
        return [encode(text) for text in prompt]
    raise BadBody(f"Invalid prompt type: {type(prompt)}. Expected str or List[str].")
