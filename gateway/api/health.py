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


@router.get("/health")
@described(Health)
async def show_health() -> dict[str, str]:
    """Says that the process lives."""
    return {"status": "ok"}


@router.get("/ready")
@described(Readiness, also={503: Readiness})
async def show_readiness(request: Request) -> Response:
    """Says whether requests can be served: 200, or 503 when no engine is ready; and what is missing.

    Without Redis, known keys and adapters go on. A load balancer that took all gateways out would end that.
    """
    services: Services = request.app.state.services
    missing = []
    if not await services.redis_health.answers():
        missing.append("Redis does not answer: known keys and adapters go on for a while")
    engines = services.engines.ready_engines()
    if not engines:
        missing.append("no engine is ready")
    status = "not ready" if not engines else "degraded" if missing else "ready"
    body: dict[str, Any] = {"status": status, "engines": engines, "missing": missing}
    return Response(orjson.dumps(body), 200 if engines else 503, media_type="application/json")


@router.get("/metrics")
@described(media={METRICS_MEDIA: None})
async def show_metrics(request: Request) -> Response:
    """Shows the process's metrics in Prometheus' text format."""
    services: Services = request.app.state.services
    services.metrics.engines_ready.set(services.engines.ready_engines())
    return Response(services.metrics.render(), media_type=METRICS_MEDIA)
