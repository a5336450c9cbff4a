"""SGLang's HTTP routes in front of one simulated engine that runs in real time.

Source: ../shared/spec/engines.md, section 3. What the model decides (times, refusals, pauses, versions) is the
simulator's own code; here are only the shapes of bodies and the moments at which clients are answered.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from real.emulated import generation
from real.emulated.generation import BadRequest, Job
from real.emulated.pacer import Pacer
from sim import engine_openai as openai
from sim.engine import SimEngine
from sim.engine_metrics import get as render_page
from sim.engine_openai import BadBody, OpenAIRequest
from sim.engine_pages import loads
from sim.engine_tokens import prefix_blocks
from sim.engine_types import AdminDone, AdminResult, EngineResult

PAGES = (
    "/ready", "/metrics", "/server_info", "/get_server_info", "/model_info", "/get_model_info", "/v1/models",
)  # fmt: skip
_MAX_BODY = 256 * 1024 * 1024  # a prompt of token ids is long in JSON


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
                web.post("/generate", self._generate),
                *(web.post(route, self._openai) for route in openai.ROUTES),
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
        body = await _body(request)
        stream = bool(body.get("stream", False))
        try:
            jobs, many = generation.parse(body)
            if stream and many:
                raise BadRequest("an emulated engine streams one answer at a time")
            for job in jobs:
                self._submit(job, stream)
        except BadRequest as error:
            return await self._stream_error(request, str(error)) if stream else _error(str(error))
        if stream:
            return await self._stream(request, jobs[0])
        results = [await self._finished(job) for job in jobs]
        refused = next((result for result in results if result.status != 200), None)
        if refused is not None:
            return _error(refused.error, refused.status)
        answers = [generation.answer(job) for job in jobs]
        return web.json_response(answers if many else answers[0])

    def _submit(self, job: Job, stream: bool) -> None:
        engine = self._engine

        def submit() -> None:
            engine.submit(
                job.rid,
                len(job.prompt),
                job.max_new,
                prefix_blocks(job.prompt, engine.profile.prefix_block_tokens),
                done=job.end,
                ignore_eos=job.ignore_eos,
                eos_after=job.output.natural_length,
                on_token=(lambda _, count: job.grow(count, engine.weight_hash)) if stream else None,
            )

        self._pacer.tell(submit)

    async def _finished(self, job: Job, *, stream: bool = False) -> EngineResult:
        """Wait for the end of a job; the engine hears of it when the client goes away first."""
        try:
            while job.result is None:
                job.news.clear()
                await job.news.wait()
            return job.result
        except asyncio.CancelledError:
            self._gone(job, stream)
            raise

    def _gone(self, job: Job, stream: bool) -> None:
        self._pacer.tell(lambda: self._engine.client_gone(job.rid, streaming=stream))

    async def _stream(self, request: web.Request, job: Job) -> web.StreamResponse:
        response = await _event_stream(request)
        try:
            while job.result is None:
                await job.news.wait()
                job.news.clear()
                if job.result is None:
                    await response.write(_event(generation.event(job, self._engine.version)))
            if job.result.status != 200:
                await response.write(_stream_refusal(job.result.error))
            else:
                await response.write(_event(generation.answer(job)))
            await response.write(openai.DONE.encode())
        except (asyncio.CancelledError, ConnectionError):
            self._gone(job, True)
            raise
        return response

    async def _stream_error(self, request: web.Request, message: str) -> web.StreamResponse:
        response = await _event_stream(request)
        await response.write(_stream_refusal(message) + openai.DONE.encode())
        return response

    # --- OpenAI -------------------------------------------------------------------------------------------------------

    async def _openai(self, request: web.Request) -> web.StreamResponse:
        engine = self._engine
        try:
            asked = openai.parse(
                request.path,
                await _body(request),
                new_id=uuid.uuid4().hex,
                model=engine.model_path,
                context_length=engine.profile.context_length,
            )
        except (BadBody, BadRequest) as error:
            return web.json_response(openai.error_body(str(error)), status=400)
        job = Job(asked.rid, asked.prompt, asked.max_new, asked.ignore_eos, asked.output)
        self._submit(job, asked.stream)
        if asked.stream:
            return await self._openai_stream(request, asked, job)
        result = await self._finished(job)
        if result.status != 200:
            return web.json_response(openai.error_body(result.error, result.status), status=result.status)
        return web.json_response(openai.response(asked, result, int(job.received)))

    async def _openai_stream(self, request: web.Request, asked: OpenAIRequest, job: Job) -> web.StreamResponse:
        try:
            await job.news.wait()  # SGLang waits for the first token before it answers 200
        except asyncio.CancelledError:
            self._gone(job, True)
            raise
        if job.result is not None and job.result.status != 200:
            body = openai.error_body(job.result.error, job.result.status)
            return web.json_response(body, status=job.result.status)
        events = openai.Stream(asked, int(job.received))
        response = await _event_stream(request)
        try:
            await response.write(events.begin().encode())
            while job.result is None:
                await job.news.wait()
                job.news.clear()
                if job.result is None:
                    await response.write(events.more().encode())
            await response.write(events.end(job.result).encode())
        except (asyncio.CancelledError, ConnectionError):
            self._gone(job, True)
            raise
        return response

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
            return _error("model_path: the folder of the weights is needed")
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
            return _error("new_version: the new label is needed")
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
    """The JSON object of a request; an empty body is an empty one. Raises BadRequest."""
    raw = await request.read()
    try:
        body = json.loads(raw) if raw else {}
    except (ValueError, RecursionError):
        raise BadRequest("the body is not JSON") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


async def _event_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


def _event(document: Any) -> bytes:
    return openai.sse(document).encode()


def _stream_refusal(message: str) -> bytes:
    refusal = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
    return _event({"error": refusal})


def _error(message: str, status: int = 400) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def _status(result: AdminResult) -> web.Response:
    if result.status != 200:
        return _error(result.message, result.status)
    return web.json_response({"message": result.message, "status": "ok"})


@web.middleware
async def _as_fastapi(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refusals of the router and of bodies in the shapes that FastAPI gives them."""
    try:
        return await handler(request)
    except BadRequest as error:
        return _error(str(error))
    except web.HTTPNotFound:
        return web.json_response({"detail": "Not Found"}, status=404)
    except web.HTTPMethodNotAllowed:
        return web.json_response({"detail": "Method Not Allowed"}, status=405)
