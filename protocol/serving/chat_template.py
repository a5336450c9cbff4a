"""How a conversation becomes the text that a model reads: ChatML, as the models of the Qwen family have it.

A model with another template needs a class of its own with the three members of this one.
"""

from __future__ import annotations

import json
from typing import Any

from protocol.errors import SeatrialError
from protocol.serving.native import Answer, text_of


class BadConversation(SeatrialError):
    """Messages that this template cannot render; nothing was sent."""


class ChatTemplate:
    """ChatML: ``<|im_start|>ROLE``, a line break, the content, ``<|im_end|>``, a line break."""

    stop = "<|im_end|>"
    """The text of the token that ends an answer."""

    def prompt(self, form: str, body: dict[str, Any]) -> str:
        """The text up to where the answer begins. Raises BadConversation."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadConversation("messages must be a non-empty list")
        blocks = []
        if form == "anthropic" and body.get("system"):
            blocks.append(_block("system", text_of(body["system"])))
        blocks += [self._message(message) for message in messages]
        return "".join(blocks) + "<|im_start|>assistant\n"

    def continued(self, form: str, body: dict[str, Any], answer: Answer) -> str:
        """The text of the conversation once the answer is part of it."""
        said = {"role": "assistant", "content": answer.text, "tool_calls": answer.tool_calls}
        return self.prompt(form, {**body, "messages": [*body["messages"], said]})

    def said(self, answer: Answer) -> str:
        """The text of an answer, as the conversation will have it, without its end."""
        return answer.text + _calls(answer.tool_calls)

    def _message(self, message: Any) -> str:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadConversation("every message needs a role")
        content = message.get("content")
        if isinstance(content, list):
            kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in content]
            if any(kind != "text" for kind in kinds):
                raise BadConversation(f"this template renders text parts alone, not {', '.join(map(str, kinds))}")
        elif content is not None and not isinstance(content, str):
            raise BadConversation(f"content must be text or a list of text parts, not {type(content).__name__}")
        return _block(message["role"], text_of(content) + _calls(message.get("tool_calls")))


def _block(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def _calls(calls: Any) -> str:
    return json.dumps(calls, sort_keys=True) if calls else ""
