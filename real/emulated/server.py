"""SGLang's HTTP routes in front of one simulated engine that runs in real time.

Source: ../shared/spec/engines.md, section 3. What the model decides (times, refusals, pauses, versions) is the
simulator's own code; here are only the shapes of bodies and the moments at which clients are answered.
"""

from __future__ import annotations

import asyncio
import datetime
import hmac
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from real.emulated.pacer import Pacer
from sim.engine import SimEngine
from sim.engine_calls import ROUTES, bad_body, read_call
from sim.engine_json import DONE, BadBody, JsonCall, event_text, json_object
from sim.engine_metrics import get as render_page
from sim.engine_pages import loads
from sim.engine_text import ROUTES as TEXT_ROUTES
from sim.engine_text import answer_text
from sim.engine_types import AdminDone, AdminResult

PAGES = (
    "/ready", "/metrics", "/server_info", "/get_server_info", "/model_info", "/get_model_info", "/v1/models",
)  # fmt: skip
_MAX_BODY = 256 << 20  # a prompt of token ids is long in JSON


class Server:
    """The routes of one engine. ``app`` is what aiohttp serves."""

    def __init__(self, engine: SimEngine, pacer: Pacer) -> None:
        self._engine = engine
        self._pacer = pacer
        self.app = web.Application(client_max_size=_MAX_BODY, middlewares=[_as_fastapi])
        self.app.add_routes(
            [
                *(web.get(page, self._page) for page in PAGES),
                web.get("/v1/loads", self._loads),
                web.get("/health", self._health),
                web.get("/health_generate", self._health),
                *(web.post(route, self._generate) for route in ROUTES),
                *(web.post(route, self._text) for route in TEXT_ROUTES),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/abort_request", self._abort),
                web.get("/flush_cache", self._flush),
                web.post("/flush_cache", self._flush),
                web.post("/update_weights_from_disk", self._update_weights),
                web.post("/update_weight_version", self._update_version),
            ]
        )

    # --- generation ---------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """A JSON call of any of the routes that generate."""
        engine, body = self._engine, await _body(request)
        try:
            call = read_call(request.path, body, engine, new_id=uuid.uuid4().hex, now_s=time.time())
        except BadBody as error:
            status, document = bad_body(request.path, error, stream=bool(body.get("stream", False)))
            if status != 200:
                return web.json_response(document, status=status)
            response = await _event_stream(request)
            await _write(response, [json.dumps(document), DONE])
            return response
        news = asyncio.Event()
        for job in call.jobs:
            job.news = news.set
        self._pacer.tell(lambda: call.submit(engine))
        try:
            return await (self._stream if call.stream else self._whole)(request, call, news)
        except (asyncio.CancelledError, ConnectionError):
            for job in call.jobs:
                self._client_gone(job.rid, call.stream)
            raise

    def _client_gone(self, rid: str, stream: bool) -> None:
        self._pacer.tell(lambda: self._engine.client_gone(rid, streaming=stream))

    async def _whole(self, _: web.Request, call: JsonCall, news: asyncio.Event) -> web.StreamResponse:
        while any(job.result is None for job in call.jobs):
            await news.wait()
            news.clear()
        refusal = _refused(call)
        return web.json_response(call.whole()) if refusal is None else refusal

    async def _stream(self, request: web.Request, call: JsonCall, news: asyncio.Event) -> web.StreamResponse:
        job = call.jobs[0]
        if not call.refused_in_stream:
            await news.wait()  # its status is not known before the first token
            if job.result is not None and (refusal := _refused(call)) is not None:
                return refusal
        response = await _event_stream(request)
        named = call.named_events
        await _write(response, call.begin(), named=named)
        while job.result is None:
            await news.wait()
            news.clear()
            if job.result is None:
                await _write(response, call.more(self._engine.version), named=named)
        await _write(response, call.end(), named=named)
        return response

    async def _text(self, request: web.Request) -> web.Response:
        """What works on text and generates nothing."""
        body = await _body(request)
        status, document = self._pacer.tell(lambda: answer_text(request.path, body, self._engine))
        return web.json_response(document, status=status)

    # --- administration -----------------------------------------------------------------------------------------------

    async def _admin(self, call: Callable[[AdminDone], None]) -> AdminResult:
        return await self._pacer.ask(call)

    async def _pause(self, request: web.Request) -> web.Response:
        body = await _body(request)
        mode = str(body.get("mode", "abort"))
        return _status(await self._admin(lambda done: self._engine.pause(mode, done=done)))

    async def _continue(self, request: web.Request) -> web.Response:
        await _body(request)
        return _status(await self._admin(lambda done: self._engine.resume(done=done)))

    async def _abort(self, request: web.Request) -> web.Response:
        body = await _body(request)
        rid, everything = str(body.get("rid") or ""), bool(body.get("abort_all", False))
        await self._admin(lambda done: self._engine.abort(rid, abort_all=everything, done=done))
        return web.Response()

    async def _flush(self, _: web.Request) -> web.Response:
        result = await self._admin(lambda done: self._engine.flush_cache(done=done))
        return web.Response(text=result.message + "\n", status=result.status)

    async def _update_weights(self, request: web.Request) -> web.Response:
        from real.emulated.weights import read_weights  # protocol.training brings pydantic; most engines never load

        body = await _body(request)
        path = body.get("model_path")
        if not isinstance(path, str) or not path:
            return _invalid("model_path: the folder of the weights is needed")
        version = body.get("weight_version")
        found = await asyncio.to_thread(read_weights, path)
        result = await self._admin(
            lambda done: self._engine.load_weights(
                None if version is None else str(version),
                found.size_bytes,
                found.weight_hash,
                flush_cache=bool(body.get("flush_cache", True)),
                abort_all_requests=bool(body.get("abort_all_requests", False)),
                model_path=path,
                failure=found.failure,
                done=done,
            )
        )
        answer = {
            "success": result.success,
            "message": result.message,
            "num_paused_requests": result.num_paused_requests,
        }
        return web.json_response(answer, status=result.status)

    async def _update_version(self, request: web.Request) -> web.Response:
        body = await _body(request)
        if "new_version" not in body:
            return _invalid("new_version: the new label is needed")
        version = str(body["new_version"])
        result = await self._admin(
            lambda done: self._engine.update_weight_version(
                version, abort_all_requests=bool(body.get("abort_all_requests", True)), done=done
            )
        )
        return web.json_response({"success": True, "message": result.message, "new_version": version})

    # --- pages --------------------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        check = self._engine.health if request.path == "/health" else self._engine.health_generate
        return web.Response(status=await self._pacer.ask(check))

    async def _page(self, request: web.Request) -> web.Response:
        status, text = self._pacer.tell(lambda: render_page(self._engine, request.path))
        kind = "text/plain" if request.path == "/metrics" or not text else "application/json"
        return web.Response(status=status, text=text, content_type=kind)

    async def _loads(self, _: web.Request) -> web.Response:
        page = self._pacer.tell(lambda: loads(self._engine))
        page["timestamp"] = datetime.datetime.now(datetime.UTC).isoformat()
        return web.json_response(page)


async def _body(request: web.Request) -> dict[str, Any]:
    """Raises BadBody."""
    return json_object(await request.read())


async def _event_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


async def _write(response: web.StreamResponse, events: list[str], *, named: bool = False) -> None:
    if events:
        await response.write("".join(event_text(event, named=named) for event in events).encode())


def _refused(call: JsonCall) -> web.Response | None:
    refused = call.refused
    if refused is None:
        return None
    return web.json_response(call.refusal(refused.error, refused.status), status=refused.status)


def _invalid(message: str) -> web.Response:
    """What FastAPI's check of an admin body says."""
    body = {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}
    return web.json_response(body, status=400)


def _status(result: AdminResult) -> web.Response:
    if result.status != 200:
        return _invalid(result.message)
    return web.json_response({"message": result.message, "status": "ok"})


def token_asked(token: str) -> Any:
    """A middleware: every route is for those who bring a token, as with SGLang's ``--api-key``."""
    wanted = f"Bearer {token}".encode()

    @web.middleware
    async def asked(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, wanted):
            return web.json_response({"error": "Unauthorized"}, status=401, headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return asked


@web.middleware
async def _as_fastapi(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refusals of the router and of bodies in the shapes that FastAPI gives them."""
    try:
        return await handler(request)
    except BadBody as error:
        return _invalid(str(error))
    except web.HTTPNotFound:
        return web.json_response({"detail": "Not Found"}, status=404)
    except web.HTTPMethodNotAllowed:
        return web.json_response({"detail": "Method Not Allowed"}, status=405)
