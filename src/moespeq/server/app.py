"""The ASGI application of one service: its routes, its errors, and the worker's life inside the application's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.concurrency import run_in_threadpool

from moespeq import __version__
from moespeq.server.body_limit import BodyLimit
from moespeq.server.ending import CutOff
from moespeq.server.failures import add_error_handlers
from moespeq.server.page_routes import page_routes
from moespeq.server.routes import model_routes, state_routes
from moespeq.server.service import Service

__all__ = ["create_app"]


def create_app(service: Service, *, cors_origins: Sequence[str] = ()) -> FastAPI:
    """Starting the application starts the load, and stopping it ends what runs and closes the engine.

    cors_origins: of other pages that a browser may let ask here; "*" is all.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        try:
            yield
        finally:
            await run_in_threadpool(service.worker.close)

    app = FastAPI(title="moespeq", version=__version__, lifespan=lifespan, openapi_url=None)
    app.include_router(state_routes(service))
    app.include_router(model_routes(service))
    app.include_router(page_routes(service))
    add_error_handlers(app)
    app.add_middleware(BodyLimit)
    if cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=cors_origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(CutOff)
    return app
