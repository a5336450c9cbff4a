"""What crosses actors: requests, results, versions, addresses. Frozen types, compared by value.

A class decorated with :func:`message` is *declared* deeply immutable: its fields hold only numbers, strings, bytes,
None, enums, tuples of such, and other messages. Only such values may skip the copy that every call makes
(DESIGN.md, "Everything that crosses is copied"); the declaration is checked when the class is made.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
import urllib.parse
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")

_ATOMS: tuple[Any, ...] = (int, float, str, bytes, bool, type(None))


def _immutable_annotation(annotation: Any) -> bool:
    if annotation in _ATOMS or annotation is Ellipsis:
        return True
    origin = typing.get_origin(annotation)
    if origin is tuple or origin is typing.Union or origin is types.UnionType:
        return all(_immutable_annotation(part) for part in typing.get_args(annotation))
    if origin is typing.Literal:
        return True
    return isinstance(annotation, type) and (
        issubclass(annotation, enum.Enum) or annotation.__dict__.get("__seatrial_message__") is True
    )


@dataclass_transform(frozen_default=True)
def message(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen, slotted dataclass that is declared deeply immutable.

    Raises:
        TypeError: a field's annotation admits something mutable; the text names the field.
    """
    made = dataclasses.dataclass(frozen=True, slots=True)(cls)
    hints = typing.get_type_hints(made)
    for field in dataclasses.fields(made):  # type: ignore[arg-type]  # any class is one, for dataclasses
        if not _immutable_annotation(hints[field.name]):
            raise TypeError(
                f"{cls.__qualname__}.{field.name}: {hints[field.name]!r} is not deeply immutable; "
                "use int, float, str, bytes, bool, None, Enum, Literal, tuple[...] or another @message"
            )
    made.__seatrial_message__ = True  # type: ignore[attr-defined]  # a mark, looked for by name
    _make_quickly(made)
    return made


def _make_quickly(cls: Any) -> None:
    """Give a message an ``__init__`` of the same parameters that costs a quarter.

    That of a frozen dataclass sets every field by ``object.__setattr__``, and messages are made for every call. Here
    the slots of an unfrozen twin are filled, which then becomes one of the class, before anybody has it.
    """
    fields = dataclasses.fields(cls)
    if cls.__bases__ != (object,) or hasattr(cls, "__post_init__"):
        return
    if any(f.default_factory is not dataclasses.MISSING or not f.init for f in fields):
        return
    twin = type(cls.__name__, (), {"__slots__": cls.__slots__})
    space: dict[str, Any] = {"_set": object.__setattr__, "_twin": twin, "_cls": cls}
    parameters = ["self"]
    for field in fields:
        if field.default is dataclasses.MISSING:
            parameters.append(field.name)
        else:
            space[f"_default_{field.name}"] = field.default
            parameters.append(f"{field.name}=_default_{field.name}")
    lines = [f"def __init__({', '.join(parameters)}):", "    _set(self, '__class__', _twin)"]
    lines += [f"    self.{field.name} = {field.name}" for field in fields]
    lines += ["    self.__class__ = _cls"]
    exec("\n".join(lines), space)
    made, old = space["__init__"], cls.__init__
    made.__qualname__, made.__module__, made.__annotations__ = old.__qualname__, cls.__module__, old.__annotations__
    cls.__init__ = made


@message
class GenerateRequest:
    """One generation call.

    ``prompt_tokens`` and ``max_new_tokens`` are counts; ``prefix_blocks`` are ids of the prompt's leading blocks of
    ``block_tokens`` tokens each (Mooncake traces carry them), which is all a prefix cache needs to know of a text.
    """

    request_id: str
    prompt_tokens: int
    max_new_tokens: int
    ignore_eos: bool = True
    prefix_blocks: tuple[int, ...] = ()
    session_id: str = ""
    idempotent: bool = True
    """Whether sending it twice is harmless. A gateway may replay a call of unknown outcome only if it is."""


@message
class VersionSpan:
    """Output tokens from ``start`` to ``end`` (not included) were computed by weights ``version``/``weight_hash``."""

    version: str
    start: int
    end: int
    weight_hash: str = ""


@message
class GenerateResult:
    """An engine's answer to a generation call; times in seconds as SGLang's ``meta_info`` gives them."""

    request_id: str
    finish_reason: str
    """``length``, ``stop`` or ``abort``."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    weight_version: str = ""
    spans: tuple[VersionSpan, ...] = ()
    num_retractions: int = 0
    queue_time_s: float = 0.0
    ttft_s: float = 0.0
    e2e_latency_s: float = 0.0
    engine: str = ""
    engine_incarnation: int = 0
    attempts: int = 1
    """Filled in by the gateway: how many times the request was sent to a replica."""


@message
class ForwardRequest:
    """A client's JSON call that a gateway forwards as it is. ``body``: the text of a JSON object."""

    request_id: str
    route: str
    body: str
    idempotent: bool = True
    """Whether sending it twice is harmless, as in GenerateRequest."""
    route_key: str = ""
    """Calls with the same key go to the same replica while that one is routable; empty: to the least loaded."""


@message
class ForwardReply:
    """The text of a replica's answer, and which incarnation gave it after how many sends, and where that is reached."""

    body: str
    engine: str
    engine_incarnation: int
    attempts: int
    host: str = ""
    port: int = 0


@message
class RawRequest:
    """An HTTP request, byte for byte. ``target``: path and query as they came; names of headers as they came."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    @property
    def path(self) -> str:
        """``target`` without its query."""
        return self.target.partition("?")[0]

    @property
    def route(self) -> str:
        """The path as servers read it: %-escapes decoded, no slash at the end (they redirect to the one without)."""
        return urllib.parse.unquote(self.path).rstrip("/")

    def header(self, name: str, default: str = "") -> str:
        """The first value of a header, named in lower case."""
        return next((value for found, value in self.headers if found.lower() == name), default)


@message
class HttpHead:
    """Status and headers of an HTTP answer, before any of its body."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()

    def header(self, name: str, default: str = "") -> str:
        """The first value of a header, named in lower case."""
        return next((value for found, value in self.headers if found.lower() == name), default)


@message
class EngineAddress:
    """Where a replica is reached. ``incarnation`` tells two engines on one reused address apart (hazard H5)."""

    name: str
    incarnation: int
    host: str
    port: int


def replica_name(service: str, rank: int) -> str:
    """What a replica is called: ``SERVICE-RANK``."""
    return f"{service}-{rank}"


def replica_of(name: str) -> tuple[str, int] | None:
    """The service and the rank in a replica's name; None where it is the name of something else.

    A service may have dashes in its name, and may be called as another one with something behind it.
    """
    service, _, rank = name.rpartition("-")
    return (service, int(rank)) if service and rank.isascii() and rank.isdigit() else None


def service_of(name: str) -> str:
    """The service that a replica is of, by its name; empty where it is the name of something else."""
    found = replica_of(name)
    return "" if found is None else found[0]


@message
class WeightUpdate:
    """``POST /update_weights_from_disk``. ``path`` names an export in storage."""

    path: str
    version: str
    flush_cache: bool = True
    abort_all_requests: bool = False


@message
class AdminReply:
    """Status and text of an admin POST (pause, continue, flush, update weights)."""

    status: int
    body: str = ""
    success: bool = True


@message
class ObjectRef:
    """Names a value in the object store. It crosses as data: having one holds nothing (`ports.Objects.borrow`)."""

    object_id: str


@message
class ExportManifest:
    """What an export must contain to be whole: shard names, byte sizes and SHA-256, and the version it carries."""

    version: str
    weight_hash: str
    shards: tuple[tuple[str, int, str], ...]
