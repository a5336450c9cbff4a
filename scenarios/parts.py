"""What every run asks of a part: a user's class in its place must have it. docs/bring_your_own.md has the rest."""

from __future__ import annotations

import inspect

ASKED: dict[str, tuple[str, ...]] = {
    "gateway": ("generate", "add_replica", "health_view"),
    "recovery": ("recover",),
    "exporter": ("export",),
    "trainer": ("shards",),
    "gate": ("request", "settle", "snapshot", "seal", "drain", "install_version", "reopen"),
    "entrypoint": ("generate",),
    "controller": ("prepare_pause", "targets", "resume_requests", "barrier", "retire_route_sessions"),
    "affinity": ("handle", "retire_sessions"),
    "publisher": ("publish",),
    "weight_sync": ("update",),
    "rank": ("take", "bind", "update"),
    "registrations": ("replace_registered_session_urls", "validate_registered_session_urls"),
    "judge": ("judge",),
    "scale_manager": (
        "begin", "execute", "progress", "confirm_drained", "abort", "capacity", "reconcile", "may_recover", "adopt",
        "owned",
    ),
    "scale_api": ("scale_out", "scale_in", "status"),
    "turn_hooks": ("on_request", "on_response", "on_end"),
    "trace_store": ("append", "search", "export_training_trace", "release_sessions"),
    "replay_buffer": ("put", "take", "take_batch", "refresh"),
    "producer": ("produce",),
    "train_worker": ("fit",),
}  # fmt: skip
"""Part to the methods that are asked for in every run that has it: those in bold on that page."""


def lacking(part: str, cls: type) -> list[str]:
    """Methods that a class must have to take the place of a part, and has not as ``async def``."""
    return [method for method in ASKED.get(part, ()) if not _is_remote(getattr(cls, method, None))]


def _is_remote(member: object) -> bool:
    return inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)
