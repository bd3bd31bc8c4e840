"""The server of the page, on this machine alone: its own files, and answers as lines of JSON.

Every address begins with a token that is made when the server starts, so that no other page in the browser can ask. The
name under which it is asked must be the one that it was told, or an address that some site's name leads to would do.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from hmac import compare_digest

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from trilane.engines.accuracy.outputs import MOST_BYTES
from trilane.page.document import document, icon, script, style, token_drawing
from trilane.page.views import VIEWS
from trilane.page.workers import PageAnswers

_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
}
_ASSETS = {
    "page.js": (script, "text/javascript"), "page.css": (style, "text/css"), "icon.svg": (icon, "image/svg+xml"),
    "token.svg": (token_drawing, "image/svg+xml"),
}
_SECONDS_TO_END = 1


def application(token: str, hosts: frozenset[str] | None) -> Starlette:
    """The page under ``/token/``. ``hosts``: names under which it answers; None: all."""

    async def page(request: Request) -> Response:
        return Response(document(), media_type="text/html; charset=utf-8", headers=_HEADERS)

    async def asset(request: Request) -> Response:
        made, kind = _ASSETS[request.path_params["name"]]
        return Response(made(), media_type=f"{kind}; charset=utf-8", headers=_HEADERS)

    async def answer(request: Request) -> Response:
        answers: PageAnswers = request.app.state.answers
        lines = answers.lines(request.path_params["name"], dict(request.query_params))
        return StreamingResponse(lines, media_type="application/x-ndjson", headers=_HEADERS)

    async def share(request: Request) -> Response:
        text = b""
        async for piece in request.stream():
            text += piece
            if len(text) > MOST_BYTES:
                return PlainTextResponse(f"expected at most {MOST_BYTES:,} bytes", 413, _HEADERS)
        answers: PageAnswers = request.app.state.answers
        record = await answers.shared(text.decode("utf-8", "replace"), dict(request.query_params))
        return Response(record, media_type="application/json", headers=_HEADERS)

    def guarded(
        endpoint: Callable[[Request], Awaitable[Response]], names: Collection[str] = ()
    ) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            if hosts is not None and (request.url.hostname or "") not in hosts:
                return PlainTextResponse("expected the address that trilane explore printed", 421, _HEADERS)
            known = compare_digest(request.path_params["token"].encode(), token.encode())
            if not known or request.path_params.get("name", "") not in {"", *names}:
                return PlainTextResponse("nothing here; trilane explore printed the address of its page", 404, _HEADERS)
            return await endpoint(request)

        return checked

    return Starlette(lifespan=_lifespan, routes=[
        Route("/{token}/", guarded(page)),
        Route("/{token}/answers/{name}", guarded(answer, VIEWS)),
        Route("/{token}/share", guarded(share), methods=["POST"]),
        Route("/{token}/{name}", guarded(asset, _ASSETS)),
    ])


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    with PageAnswers() as answers:
        app.state.answers = answers
        yield


def listening(host: str, port: int) -> socket.socket:
    """A socket at ``port``, or any free one for 0. Raises OSError with the address."""
    try:
        return socket.create_server((host, port), backlog=128)
    except OSError as error:
        error.filename = f"{host}:{port}"
        raise


def serve(app: Starlette, at: socket.socket) -> None:
    """Answer until Ctrl-C."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, ws="none", lifespan="on", http="h11", loop="asyncio",
        timeout_graceful_shutdown=_SECONDS_TO_END, server_header=False, date_header=False,
    )
    uvicorn.Server(config).run(sockets=[at])
