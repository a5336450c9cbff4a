"""What is read of the options of a command: addresses, URLs, tokens. Needs nothing but the standard library."""

from __future__ import annotations

import pathlib
import urllib.parse

from protocol.messages import EngineAddress


class Usage(Exception):
    """Bad usage; the text says what and how it can be put right."""


def engine_address(url: str, where: str = "--engine") -> EngineAddress:
    """The address in ``http://host:port``; ``where`` it stands begins the message. Raises Usage."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # half an IPv6 address, or a port that is none
        raise Usage(f"{where} {url}: give it as http://HOST:PORT") from None
    more = parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None
    more = more or " " in url or not url.isprintable()  # no name of a host has any
    if parts.scheme != "http" or not host or not port or more:
        raise Usage(f"{where} {url}: give it as http://HOST:PORT")
    return EngineAddress(f"{url_host(host)}:{port}", 0, host, port)


def url_host(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def is_url(url: str) -> bool:
    """Whether it is the URL of an HTTP server, or of something below one, to which paths can be added."""
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    # Nothing that is no printable character, and no space, goes into the line of a request.
    return good and not parts.query and not parts.fragment and url.isprintable() and " " not in url


def token_in(path: str | pathlib.Path | None, option: str = "--token-file") -> str:
    """The token in a file; empty where no file is named. Raises Usage."""
    if path is None:
        return ""
    try:
        token = pathlib.Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Usage(f"{option} {path}: {getattr(error, 'strerror', None) or error}") from None
    if not token:  # who names a file wants a token; served without one, everybody would be let in
        raise Usage(f"{option} {path}: is empty; write the token into it")
    if not token.isascii() or not token.isprintable():
        raise Usage(f"{option} {path}: holds no token; write printable ASCII characters into it")
    return token
