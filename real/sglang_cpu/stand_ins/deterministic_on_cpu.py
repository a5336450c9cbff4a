"""An SGLang plugin: ``--enable-deterministic-inference`` starts on a CPU, for the seeded sampling that comes with it.

Batch invariance itself is Triton matmuls and has no CPU form: it stays off. SGLang finds this through the entry point
in the ``dist-info`` folder beside this file.
"""

from __future__ import annotations


def register() -> None:
    """Called by SGLang in each of its processes before it reads its arguments."""
    from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_deterministic_attention_backend_choices(["torch_native"])
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
        lambda self: None,
        HookType.REPLACE,
    )
