"""The ASGI application of one service: its routes, its errors, and the worker's life inside the application's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from moespeq import __version__
from moespeq.server.failures import add_error_handlers
from moespeq.server.page_routes import page_routes
from moespeq.server.routes import model_routes, state_routes
from moespeq.server.service import Service

__all__ = ["create_app"]


def create_app(service: Service) -> FastAPI:
    """Starting the application starts the load, and stopping it ends what runs and closes the engine."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        try:
            yield
        finally:
            await run_in_threadpool(service.worker.close)

    app = FastAPI(title="moespeq", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(state_routes(service))
    app.include_router(model_routes(service))
    app.include_router(page_routes(service))
    add_error_handlers(app)
    return app
