"""Pages that lie beside an imported run, held against what they speak of (M39c to M42, M46; scaling_acceptance.md 9).

Read are Markdown pages and OpenAPI documents. What a page states and what is so go into the evidence side by side; the
criterion ``documents_agree`` compares them.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

from analysis.foreign.builder import Builder
from analysis.foreign.files import REANALYSIS, Files, text

_PIN = re.compile(r"`?([\w.\-]+\.json)`?[^0-9a-f\n]{0,40}\b([0-9a-f]{16,64})\b")
_FULL = re.compile(r"/(?:commit|tree|blob)/([0-9a-f]{40})\b")
_SHORT = re.compile(r"(?<![0-9a-f/])\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,12}\b")
_NAMED = re.compile(r"\bcommits?\b[\s`|:]{1,5}([0-9a-f]{7,12})\b", re.IGNORECASE)
_HEAD = re.compile(r"(?:final|newest|current|branch) head\b[^0-9a-f\n]{0,40}\b([0-9a-f]{7,40})\b", re.IGNORECASE)
_WITHDRAWN = (re.compile(r"zero errors|no errors", re.IGNORECASE), re.compile(r"no (?:train\w* )?stall", re.IGNORECASE))
_KEPT = re.compile(r"\bcache\b.{0,80}\b(?:survives|stays|is kept)\b|\b(?:keeps?|retains?)\b.{0,60}\bcache\b", re.I)
_NOT_KEPT = re.compile(r"\b(?:off|not|no|never|without|loses?|lost|only)\b", re.I)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n\s*\n|\n(?=\s*\|)")
_ROUTE = re.compile(r"\b(GET|POST|PATCH|PUT|DELETE)\b[\s`|]+(/[\w/{}.\-]*)")
_LARGEST = 4 << 20

WITHOUT_CACHE = {"blackwell": "flashinfer"}
"""GPUs on which deterministic mode has no prefix cache, and the backend that is chosen there (scaling.md 8)."""
KEEP_IT = ("fa3", "fa4", "triton")
"""Backends that keep it."""


def check(files: Files, builder: Builder) -> None:
    """Add what the pages beside the run state, and what is so."""
    routes: dict[str, dict[str, Any]] | None = None
    pages: list[tuple[str, str]] = []
    for path in files.documents:
        content = _content(path, files)
        if path.suffix == ".json":
            found = _openapi(content)
            if found is None:
                files.read[path.name].notes.append("no OpenAPI document")
            else:
                routes = {**(routes or {}), **found}
        elif content is not None:
            pages.append((path.name, content))
    for name, content in pages:
        for subject, stated, found_, about in [
            *_pins(files, content), *_commits(content), *_claims(files, content), *limits(content)
        ]:  # fmt: skip
            builder.add(
                0.0, "foreign.document", name=text(name, 120), about=about, subject=subject, stated=stated, found=found_
            )
    if routes is not None:
        _routes(routes, pages, builder)


def _pins(files: Files, content: str) -> list[tuple[str, str, str, str]]:
    rows = []
    for name, digest in _PIN.findall(content):
        read = files.read.get(name)
        whole = "" if read is None else read.sha256
        rows.append((name, digest, whole[: len(digest)], "pin"))
    return rows


def _commits(content: str) -> list[tuple[str, str, str, str]]:
    rows = []
    full, short = set(_FULL.findall(content)), {*_SHORT.findall(content), *_NAMED.findall(content)}
    for sha in sorted(full) if short else ():
        # A long id that no short one begins is of no commit that the page itself names.
        known = next((one for one in sorted(short) if sha.startswith(one)), "")
        rows.append((sha, sha[: len(known) or 12], known, "commit"))
    heads = list(dict.fromkeys(_HEAD.findall(content)))
    rows += [
        ("newest commit", one, heads[0][: len(one)] if one.startswith(heads[0][: len(one)]) else heads[0], "commit")
        for one in heads[1:]
    ]
    return rows


def _claims(files: Files, content: str) -> list[tuple[str, str, str, str]]:
    if files.read[REANALYSIS].state != "read":
        return []
    errors = files.mapping(REANALYSIS).get("non_benign_error_lines")
    rows = []
    for line in content.splitlines():
        if any(claim.search(line) for claim in _WITHDRAWN) and "withdrawn" not in line.lower():
            found = f"withdrawn by {REANALYSIS} ({text(errors, 20)} error lines that are not benign)"
            rows.append((text(line.strip(), 120), "as it stands", found, "claim"))
    return rows


def limits(content: str) -> list[tuple[str, str, str, str]]:
    """What a page says of the prefix cache on GPUs on which deterministic mode has none, with the backend chosen there.

    Such a claim reads well, and with long prompts of one prefix it wedges a scheduler (M39, M39c). A sentence that
    names another backend, which does keep it, is none.
    """
    rows = []
    for sentence in _SENTENCE.split(content):
        plain = " ".join(sentence.split())
        if not _KEPT.search(plain) or _NOT_KEPT.search(plain):
            continue
        if any(re.search(rf"\b{one}\b", plain, re.I) for one in KEEP_IT):
            continue
        for gpu, chosen in WITHOUT_CACHE.items():
            if re.search(rf"\b{gpu}\b", plain, re.I):
                rows.append((text(plain, 120), "the cache is kept", f"with {chosen} it is off", "limit"))
    return rows


def _openapi(content: str | None) -> dict[str, dict[str, Any]] | None:
    try:
        document = json.loads(content or "")
    except (ValueError, RecursionError):
        return None
    paths = document.get("paths") if isinstance(document, dict) else None
    if not isinstance(paths, dict):
        return None
    found: dict[str, dict[str, Any]] = {}
    for path, methods in paths.items():
        for method, operation in methods.items() if isinstance(methods, dict) else ():
            if method.lower() in ("get", "post", "patch", "put", "delete") and isinstance(operation, dict):
                found[f"{method.upper()} {path}"] = {"document": document, "operation": operation}
    return found


def _routes(routes: dict[str, dict[str, Any]], pages: list[tuple[str, str]], builder: Builder) -> None:
    told = {f"{method} {path}" for _, content in pages for method, path in _ROUTE.findall(content)}
    name = ", ".join(page for page, _ in pages) or "no page"
    for route in sorted(set(routes) | told):
        there = route if route in told else ""
        builder.add(0.0, "foreign.document", name=text(name, 120), about="route", subject=route, stated=there,
                    found=route if route in routes else "")  # fmt: skip
    for route, one in sorted(routes.items()):
        if route.startswith("GET ") and re.search(r"/scale_(out|in)/\{", route):
            # Without the field a client reads UNKNOWN for ever (M16, M41).
            said = "cleanup_required" if "cleanup_required" in json.dumps(_schemas(one)) else ""
            builder.add(0.0, "foreign.document", name="openapi", about="field", subject=f"{route} cleanup_required",
                        stated=said, found="cleanup_required")  # fmt: skip


def _schemas(one: dict[str, Any]) -> Any:
    """What an operation's answers look like, with the schemas that they name."""
    answers = one["operation"].get("responses", {})
    components = one["document"].get("components")
    schemas = components.get("schemas") if isinstance(components, dict) else None
    named = re.findall(r"#/components/schemas/([\w.\-]+)", json.dumps(answers, default=str))
    return [answers, *((schemas or {}).get(name) for name in named)]


def _content(path: pathlib.Path, files: Files) -> str | None:
    try:
        if path.stat().st_size > _LARGEST:
            raise OSError(0, "too large")
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        files.read[path.name].notes.append(f"could not be read ({text(str(error), 80)})")
        return None
    files.read[path.name].state = "read"
    return content
