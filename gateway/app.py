"""The FastAPI application: routes, error handling, and services for as long as it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from gateway.api import (
    adapter_aliases,
    adapter_base,
    adapter_contents,
    adapter_grants,
    adapters,
    admin_audit,
    admin_keys,
    admin_tenants,
    admin_usage,
    batches,
    chat,
    completions,
    embeddings,
    files,
    health,
    messages,
    models,
    pulls,
    tokens,
    uploads,
    usage,
)
from gateway.auth import require
from gateway.batches.runner import running_batches
from gateway.bodies import BodyLimit
from gateway.direct import DirectRoutes
from gateway.errors import ErrorBoundary, install_error_handling
from gateway.inner_calls import InnerCalls
from gateway.openapi import DescribedApp
from gateway.services import Services, open_services
from gateway.settings import GatewaySettings

ServicesFactory = Callable[[GatewaySettings], AbstractAsyncContextManager[Services]]

_DIRECT = {
    "/v1/chat/completions": chat.create_chat_completion,
    "/v1/completions": completions.create_completion,
    "/v1/embeddings": embeddings.create_embeddings,
    "/v1/messages": messages.create_message,
}
# Their bodies may be large, and are read once the caller is known.
_READ_BY_HANDLERS = frozenset(
    {"/v1/adapters", "/v1/files", "/v1/messages/count_tokens", "/tokenize", "/detokenize", *_DIRECT}
)
_READ_BY_HANDLERS_BELOW = "/v1/adapter-uploads/"


def create_app(settings: GatewaySettings, *, open_services: ServicesFactory = open_services) -> DescribedApp:
    """Returns the gateway's ASGI application. Its services open when it starts and close when it stops."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            services = await stack.enter_async_context(open_services(settings))
            app.state.services, calls = services, InnerCalls(app, _DIRECT)
            await stack.enter_async_context(running_batches(services, calls))
            if settings.grpc_port is not None:
                from gateway.public_grpc.server import serving_grpc  # here, since few gateways need it

                serving = serving_grpc(app, calls, host=settings.host, port=settings.grpc_port)
                app.state.grpc_port = await stack.enter_async_context(serving)
            yield

    app = DescribedApp(
        title="Loraplex",
        version=version("loraplex"),
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,  # to wherever the request's Host says
        telemetry={"tracing": False, "metrics": False, "logs": False},  # looked for anew with each request
    )
    app.add_middleware(BodyLimit, exempt=_READ_BY_HANDLERS, exempt_below=_READ_BY_HANDLERS_BELOW)
    app.wrap(DirectRoutes, endpoints=_DIRECT, requirement=require("inference"))
    app.wrap(ErrorBoundary)
    install_error_handling(app)
    for module in (
        chat,
        completions,
        embeddings,
        messages,
        models,
        tokens,
        files,
        batches,
        adapters,
        uploads,
        pulls,
        adapter_aliases,
        adapter_contents,
        adapter_grants,
        adapter_base,
        usage,
        admin_tenants,
        admin_keys,
        admin_audit,
        admin_usage,
        health,
    ):
        app.include(module.router)
    return app
