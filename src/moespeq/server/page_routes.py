"""The live page: its files, which hold nothing, and the state that they show.

The files are read once and are all there is to ask for. They may be had by everybody; the state needs the API key where
there is one, because who routed where, round by round, says something of what others asked.
"""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter, Depends, HTTPException
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from moespeq.server.live_state import LiveState
from moespeq.server.service import Service

__all__ = ["page_routes", "read_files"]

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes(service: Service) -> APIRouter:
    """`/`, the files under `/page/`, and `/live`."""
    routes, files, live = APIRouter(), read_files(), LiveState(service)

    @routes.get("/")
    async def page() -> Response:
        return _file(files, "index.html")

    @routes.get("/page/{name}")
    async def file(name: str) -> Response:
        return _file(files, name)

    @routes.get("/live", dependencies=[Depends(service.authorize)])
    async def state(since: int = 0, experts_since: int = 0) -> JSONResponse:
        content = await run_in_threadpool(live.to_json, since=since, experts_since=experts_since)
        return JSONResponse(content, headers={"Cache-Control": "no-store"})

    return routes


def read_files() -> dict[str, bytes]:
    """The page's files by name, as installed."""
    folder = resources.files("moespeq.server") / "page"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _TYPES}


def _file(files: dict[str, bytes], name: str) -> Response:
    if name not in files:
        raise HTTPException(404, "Not Found")
    return Response(files[name], media_type=_TYPES[name.rpartition(".")[2]], headers=_HEADERS)
