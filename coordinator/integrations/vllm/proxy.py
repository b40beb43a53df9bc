"""A small proxy in front of a prefill and a decode engine: the contract of ``docs/vllm.md``, and no more.

    python -m coordinator.integrations.vllm.proxy --prefill http://HOST:8100 --decode http://HOST:8200

It balances nothing and tries nothing twice. Of several engines of a kind it takes one after the other.
"""

from __future__ import annotations

import argparse
import itertools
import uuid
from typing import TYPE_CHECKING, Any, Final

from aiohttp import ClientError, ClientSession, ClientTimeout, web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

PATHS: Final = ("/v1/completions", "/v1/chat/completions")
#: What prefill is asked for instead of what the client wants: one token, at once.
_ONE_TOKEN: Final = {"max_tokens": 1, "stream": False, "n": 1}
_PIECE_BYTES: Final = 1 << 14


def for_prefill(body: dict[str, Any], transfer_id: str) -> dict[str, Any]:
    """Return what prefill is asked for."""
    asked = {key: value for key, value in body.items() if key not in {"stream_options", "min_tokens"}}
    if "max_completion_tokens" in asked:
        asked["max_completion_tokens"] = 1
    wanted = {"do_remote_decode": True, "transfer_id": transfer_id}
    return asked | _ONE_TOKEN | {"kv_transfer_params": wanted}


def for_decode(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Return what decode is asked for; prefill's answer says what of it comes from there, if anything."""
    asked = {key: value for key, value in body.items() if key != "kv_transfer_params"}
    given = answer.get("kv_transfer_params")
    return asked | ({"kv_transfer_params": given} if given else {})


class Proxy:
    """The proxy's handler."""

    def __init__(self, prefill: list[str], decode: list[str]) -> None:
        """Stand in front of the engines at these URLs."""
        self._prefill: Iterator[str] = itertools.cycle(prefill)
        self._decode: Iterator[str] = itertools.cycle(decode)
        self._session: ClientSession

    async def live(self, _: web.Application) -> AsyncIterator[None]:
        """Have connections as long as the application runs."""
        async with ClientSession(timeout=ClientTimeout(total=None)) as self._session:
            yield

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one request: first prefill, then decode."""
        try:
            body = await request.json()
        except (ValueError, LookupError) as error:
            return web.json_response({"error": f"the body is no JSON: {error}"}, status=400)
        if not isinstance(body, dict):
            return web.json_response({"error": "the body is no JSON object"}, status=400)
        response = web.StreamResponse()
        try:
            return await self._serve(request, body, response)
        except ClientError as error:
            if not response.prepared:
                return web.json_response({"error": f"an engine does not answer: {error}"}, status=502)
        # The client has heard a part of an answer, and must not take it for all.
        if request.transport is not None:
            request.transport.close()
        return response

    async def _serve(
        self, request: web.Request, body: dict[str, Any], response: web.StreamResponse
    ) -> web.StreamResponse:
        """Have both engines answer; what decode says is passed on as it comes."""
        transfer_id = uuid.uuid4().hex
        prefill = next(self._prefill) + request.path
        async with self._session.post(prefill, json=for_prefill(body, transfer_id)) as answer:
            if answer.status != web.HTTPOk.status_code:
                return web.Response(status=answer.status, body=await answer.read())
            given = await answer.json()
        decode = next(self._decode) + request.path
        async with self._session.post(decode, json=for_decode(body, given)) as answer:
            response.set_status(answer.status)
            response.content_type = answer.content_type
            response.headers["X-Transfer-Id"] = transfer_id
            await response.prepare(request)
            async for piece in answer.content.iter_chunked(_PIECE_BYTES):
                await response.write(piece)
            await response.write_eof()
        return response


def application(prefill: list[str], decode: list[str]) -> web.Application:
    """Return the proxy as an application of aiohttp."""
    proxy = Proxy(prefill, decode)
    app = web.Application(client_max_size=1 << 26)
    app.cleanup_ctx.append(proxy.live)
    app.add_routes([web.post(path, proxy.handle) for path in PATHS])
    return app


def main() -> None:
    """Serve until the process is told to end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", action="append", required=True, metavar="URL")
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    given = parser.parse_args()
    web.run_app(application(given.prefill, given.decode), host=given.host, port=given.port, print=None)


if __name__ == "__main__":
    main()
