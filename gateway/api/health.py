"""`/health`, `/ready` and `/metrics`: for orchestrators and Prometheus; they need no key."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from gateway.described import described
from gateway.schemas.answers import Health, Readiness
from gateway.services import Services

router = APIRouter(tags=["health"])

METRICS_MEDIA = "text/plain; version=0.0.4; charset=utf-8"
_WITHOUT_REDIS = "Redis does not answer: known keys and adapters go on for a while"
_WITHOUT_REDIS_FOR_LONG = "Redis has not answered for longer than keys are believed: requests get 503"


@router.get("/health")
@described(Health)
async def show_health() -> dict[str, str]:
    """Says that the process lives."""
    return {"status": "ok"}


@router.get("/ready")
@described(Readiness, also={503: Readiness})
async def show_readiness(request: Request) -> Response:
    """Says whether requests can be served: 200 or 503; and what is missing.

    Without Redis, known keys and adapters go on for `LORAPLEX_AUTH_GRACE_S`, and without the store, adapters
    that are in the engines. A load balancer that took all gateways out would end that.
    """
    services: Services = request.app.state.services
    missing, serves = [], True
    if not await services.redis_health.answers():
        serves = services.redis_health.silent_s < services.settings.auth_grace_s
        missing.append(_WITHOUT_REDIS if serves else _WITHOUT_REDIS_FOR_LONG)
    if services.store_health.fault is not None:
        missing.append(f"the store: {services.store_health.fault}")
    engines = services.engines.ready_engines()
    if not engines:
        missing.append("no engine is ready")
    serves = serves and engines > 0
    status = "not ready" if not serves else "degraded" if missing else "ready"
    body: dict[str, Any] = {"status": status, "engines": engines, "missing": missing}
    return Response(orjson.dumps(body), 200 if serves else 503, media_type="application/json")


@router.get("/metrics")
@described(media={METRICS_MEDIA: None})
async def show_metrics(request: Request) -> Response:
    """Shows the process's metrics in Prometheus' text format."""
    services: Services = request.app.state.services
    services.metrics.engines_ready.set(services.engines.ready_engines())
    services.metrics.redis_up.set(await services.redis_health.answers())
    services.metrics.store_up.set(services.store_health.fault is None)
    return Response(services.metrics.render(), media_type=METRICS_MEDIA)
