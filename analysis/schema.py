"""docs/evidence.md, generated from the table of protocol/evidence.py."""

from __future__ import annotations

from collections.abc import Iterator

from protocol.evidence import SCHEMA_VERSION, EventKind, schema


def schema_page() -> str:
    """The page: the envelope of an event, then every kind with observer, worlds and fields."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    kinds = list(schema())
    world = sum(kind.observer == "world" for kind in kinds)
    yield f"# Evidence, schema version {SCHEMA_VERSION}"
    yield ""
    yield "Generated from `protocol/evidence.py` by `python -m analysis schema`; edit that file, not this page."
    yield ""
    yield (
        f"`events.jsonl` holds one event a line, as JSON. There are {len(kinds)} kinds. The {world} *world* kinds are "
        "seen at the boundary of a process, an engine, the storage, the injector or the client; invariants are made "
        f"of them. The {len(kinds) - world} *component* kinds are claims of protocol code; they explain, and decide "
        "nothing but what docs/verdicts.md names. A last line without a newline was cut by a crash; it is ignored, and "
        "reported."
    )
    yield ""
    yield "| key | meaning |"
    yield "| --- | --- |"
    yield "| `seq` | place in this file, rising |"
    yield "| `t_ns` | time, nanoseconds since the start of the run |"
    yield "| `kind` | one of the kinds below |"
    yield "| `actor`, `inc` | the process that it happened to: name and incarnation |"
    yield "| `n` | counts the events of this process |"
    yield "| `lc` | Lamport clock: if a happened before b, then a.lc < b.lc |"
    yield "| `cause` | `actor/inc/n` of the event on another process that this one follows from, or null |"
    yield "| `data` | the fields below |"
    group = ""
    for kind in kinds:
        subject = kind.name.partition(".")[0]
        if subject != group:
            group = subject
            yield ""
            yield f"## {group}"
        yield ""
        yield from _kind(kind)


def _kind(kind: EventKind) -> Iterator[str]:
    yield f"### `{kind.name}`"
    yield ""
    yield f"{kind.doc} Observer: {kind.observer}. Worlds: {', '.join(kind.worlds)}."
    if not kind.fields:
        return
    yield ""
    yield "| field | type | meaning |"
    yield "| --- | --- | --- |"
    for name, (type_, meaning) in kind.fields.items():
        optional = f"{type_[:-1]} or null" if type_.endswith("?") else type_
        yield f"| `{name}` | {optional} | {meaning.replace('|', chr(92) + '|')} |"
