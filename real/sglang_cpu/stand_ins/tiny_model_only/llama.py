"""SGLang's own Llama under the name that its registry looks for."""

from __future__ import annotations

from sglang.srt.models.llama import LlamaForCausalLM as EntryClass

__all__ = ["EntryClass"]
