"""A small HTTP server with the routes of an engine, for tests of what stands in front of one. No model, no Ray.

``python stub_engine.py --port N [--silent-s S] [--load-s S] [--fail] ...``; other arguments are accepted and ignored.
A request of n tokens takes n milliseconds; one that is not streamed ends with a load of weights at the latest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

from aiohttp import web


class Stub:
    def __init__(self, version: str) -> None:
        self.version = version
        self.ready = False
        self.running: dict[str, asyncio.Event] = {}
        self.loaded: dict[str, asyncio.Event] = {}
        self.seen: list[list[Any]] = []

    async def generate(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        rid, sampling = asked["rid"], asked["sampling_params"]
        if len(asked["input_ids"]) > 5000:
            return web.json_response({"error": {"message": "longer than the context"}}, status=400)
        tokens, aborted = sampling["max_new_tokens"], asyncio.Event()
        before = self.version
        self.running[rid] = aborted
        try:
            if asked.get("stream"):
                return await self._stream(request, rid, tokens, aborted)
            loaded = self.loaded[rid] = asyncio.Event()
            ends = [asyncio.ensure_future(event.wait()) for event in (aborted, loaded)]
            await asyncio.wait(ends, timeout=tokens / 1000, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            reason, tokens = ("abort", tokens // 2) if aborted.is_set() else ("length", tokens)
            return web.json_response(self._document(rid, len(asked["input_ids"]), tokens, reason, before))
        finally:
            del self.running[rid]
            self.loaded.pop(rid, None)

    async def _stream(self, request: web.Request, rid: str, tokens: int, aborted: asyncio.Event) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        done = 0
        while done < tokens and not aborted.is_set():
            await asyncio.sleep(0.001)
            done += 1
            reason = None if done < tokens and not aborted.is_set() else "abort" if aborted.is_set() else "length"
            document = self._document(rid, 10, done, reason, self.version)
            await response.write(b"data: " + json.dumps(document).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _document(self, rid: str, prompt: int, tokens: int, reason: str | None, before: str) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": rid, "prompt_tokens": prompt, "completion_tokens": tokens, "cached_tokens": 0,
            "weight_version": self.version, "num_retractions": 0, "e2e_latency": tokens / 1000,
            "finish_reason": None if reason is None else {"type": reason, "length": tokens},
        }  # fmt: skip
        if reason is not None:
            half = tokens // 2
            meta["weight_versions"] = (
                [{"version": self.version, "start": 0, "end": tokens}]
                if before == self.version
                else [
                    {"version": before, "start": 0, "end": half},
                    {"version": self.version, "start": half, "end": tokens},
                ]
            )
        return {"text": "", "output_ids": list(range(tokens)), "meta_info": meta}

    async def abort(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.seen.append(["/abort_request", asked.get("rid", "")])
        for rid, aborted in list(self.running.items()):
            if asked.get("abort_all") or (asked.get("rid") and rid.startswith(asked["rid"])):
                aborted.set()
        return web.Response()

    async def update(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.seen.append(["/update_weights_from_disk", asked["model_path"]])
        if asked["model_path"].endswith("missing"):
            return web.json_response({"success": False, "message": "no such path"}, status=400)
        self.version = asked.get("weight_version", self.version)
        for loaded in self.loaded.values():
            loaded.set()
        await asyncio.sleep(0.05)  # requests that end now have the new version, and the caller has no answer yet
        if asked["model_path"].endswith("unflushed"):
            text = "Weights were updated, but the cache was not flushed because requests are running."
            return web.json_response({"success": False, "message": text}, status=400)
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def get_ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.ready else 503)

    async def get_seen(self, request: web.Request) -> web.Response:
        return web.json_response({"posts": self.seen, "running": [*self.running]})

    async def post(self, request: web.Request) -> web.Response:
        self.seen.append([request.path, await request.text()])
        return web.json_response({"message": "done", "status": "ok"})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--weight-version", "--weights-version", default="default")
    parser.add_argument("--silent-s", type=float, default=0.0)
    parser.add_argument("--load-s", type=float, default=0.2)
    parser.add_argument("--fail", action="store_true")
    options, _ = parser.parse_known_args()
    if options.fail:
        sys.exit("stub: the model is not there")
    time.sleep(options.silent_s)
    stub = Stub(options.weight_version)
    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/generate", stub.generate)
    app.router.add_post("/abort_request", stub.abort)
    app.router.add_post("/update_weights_from_disk", stub.update)
    app.router.add_get("/ready", stub.get_ready)
    app.router.add_get("/seen", stub.get_seen)
    for route in ("/pause_generation", "/continue_generation", "/flush_cache"):
        app.router.add_post(route, stub.post)

    async def load(_: web.Application) -> None:
        def loaded() -> None:
            stub.ready = True

        asyncio.get_running_loop().call_later(options.load_s, loaded)

    app.on_startup.append(load)
    web.run_app(app, host="127.0.0.1", port=options.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
