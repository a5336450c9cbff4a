"""How each world does each fault, for ``docs/faults.md``: (simulated, real). A test compares names with the code."""

from __future__ import annotations

_FATE = "the caller's process, or for HTTP the engine's front (a proxy on its public port)"

WAYS: dict[str, tuple[str, str]] = {
    "sigkill": (
        "every port of the incarnation is dead from that instant",
        "SIGKILL of the actor's process; of an engine: of its main, scheduler or detokenizer process",
    ),
    "sigterm": (
        "the engine model ends as SGLang does: at a poll, every 5 s, that finds nothing in flight",
        "SIGTERM of the engine's main process",
    ),
    "restart_empty": (
        "dead and started anew in one instant",
        "SIGKILL, and a start as soon as the name and the GPUs are free",
    ),
    "sigstop": (
        "the event loop or the engine model is frozen",
        "SIGSTOP and SIGCONT; an engine with all its processes",
    ),
    "slow": (
        "costs and iterations are multiplied",
        "SIGSTOP and SIGCONT five times a second, so that it runs for 100/`percent` of the time; `percent` above 100",
    ),
    "wedge": ("the scheduler's iterations stand still", "SIGSTOP of the scheduler process"),
    "partition": (
        "messages wait in the link; a node that the head does not hear for the health time-out is declared dead",
        "messages of actors and of HTTP wait where they are: requests at the caller (an HTTP call has no connection "
        "then), answers at the front or at the caller. What waits in a process is lost if it dies. Ray's own "
        "connections are not cut, so no node is declared dead",
    ),
    "latency": ("is added to the link", "is added to every message, where a partition would hold it"),
    "request_lost": ("the message is dropped", f"dropped by {_FATE}"),
    "reply_lost": ("the message is dropped", f"dropped by {_FATE}"),
    "delayed_delivery": (
        "the message arrives late; an HTTP handshake with it, so that a short connect time-out ends it",
        f"kept by {_FATE}; an HTTP connection is there at once. With `error_now` the connection is reset",
    ),
    "duplicate": ("the message arrives twice", f"sent twice by {_FATE}; a number of an ordered view is taken once"),
    "connect_timeout": ("the handshake is dropped", "the caller connects to a port that drops every SYN"),
    "read_timeout": ("the answer is dropped", "the front keeps the answer and leaves the connection open"),
    "bad_answer": (
        "the caller's process, of exchanges byte for byte",
        "the caller's process, of exchanges byte for byte; the whole answer is read first",
    ),
    "slow_export": (
        "the transfer takes `percent` of its time in the storage's one pipe",
        "written and read at `percent` of the time that the operation takes or that its nominal bytes would take at "
        "the storage's bandwidth, whichever is longer; of a read, the bytes that are really there",
    ),
    "torn_export": ("a part of the bytes is stored", "a part of the bytes is written"),
    "disk_full": (
        "a budget of nominal bytes",
        "a budget of nominal bytes that all processes share; no real disk is filled",
    ),
    "clock_skew": (
        "the node's wall clock",
        "`backend.wall_time()` on the node; not the clock of the engines' own processes",
    ),
    "metrics_missing": ("the page as the client gets it", "the page as it leaves the front"),
    "metrics_stale": ("the page as the client gets it", "the page as it leaves the front"),
    "metrics_nan": ("the page as the client gets it", "the page as it leaves the front"),
    "placement_stuck": (
        "the placement service does not get to the group",
        "Ray is asked for a resource that no node has, and at healing once more without it; the group keeps its id",
    ),
    "removal_fails": (
        "the placement service does not get to the removal",
        "Ray is not asked; with `late_s` the driver asks that much later",
    ),
    "removal_refused": ("the call is answered with an error", "the port raises, and Ray is not asked"),
    "node_loss": (
        "its processes end, and others notice after the health time-out; with `zombie` they act on until it is healed, "
        "which ends them and breaks their connections",
        "its raylet and everything below it is SIGKILLed, which others notice within a second or so; at healing a "
        "raylet of the same name starts. Not the head (node-0), not `zombie`, not on a cluster given by `--ray`",
    ),
}
