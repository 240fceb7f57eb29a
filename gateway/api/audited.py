"""Notes in the audit what the adapter API changed: the one place where that is done.

A router made here takes the state of the path's name before the endpoint runs, and appends an entry once the
change is made, before the client learns of it. The change and its entry are two steps, unlike those of
tenants and keys: where Redis goes away between them, the log says what was done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute
from redis.exceptions import RedisError

from adapters.identity import InvalidName
from adapters.model_ref import parse_own_ref
from adapters.registry import AdapterName
from gateway.api.admin_access import actor_of
from gateway.api.counted import count_management
from gateway.audit import Change
from gateway.auth import Principal, require
from gateway.services import Services

logger = logging.getLogger(__name__)

ACTIONS = {
    "upload_adapter": "adapter.upload",
    "begin_upload": "adapter.upload",
    "complete_upload": "adapter.upload",
    "pull_adapter": "adapter.pull",
    "promote_adapter": "adapter.promote",
    "roll_back_adapter": "adapter.rollback",
    "begin_canary": "adapter.canary",
    "end_canary": "adapter.canary_off",
    "pin_adapter": "adapter.pin",
    "unpin_adapter": "adapter.unpin",
    "rename_adapter": "adapter.rename",
    "grant_adapter": "adapter.grant",
    "revoke_grant": "adapter.revoke",
    "remove_adapter": "adapter.delete",
}
"""What the audit calls what an endpoint does. Those that are not here change no adapter."""


class AuditedRoute(APIRoute):
    """A route whose success is noted."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns FastAPI's handler, followed by the note."""
        handle = super().get_route_handler()
        action = ACTIONS.get(self.name)
        if action is None:
            return handle

        async def handle_and_note(request: Request) -> Response:
            response = await handle(request)
            await _note(request, action, orjson.loads(response.body))
            return response

        return handle_and_note


def audited_router(prefix: str = "") -> APIRouter:
    """Returns a router of the adapter API whose changes are noted."""
    dependencies = [Depends(require("adapters")), Depends(count_management), Depends(_take_state)]
    return APIRouter(prefix=prefix, tags=["adapters"], route_class=AuditedRoute, dependencies=dependencies)


async def _take_state(request: Request, caller: Annotated[Principal, Depends(require("adapters"))]) -> None:
    """Keeps what the path's name means before the endpoint changes it."""
    if request.method != "GET" and "name" in request.path_params:
        request.state.before = await _state_of(request, caller, request.path_params["name"])


async def _note(request: Request, action: str, answer: dict[str, Any]) -> None:
    """Appends an entry for what the endpoint has done."""
    caller: Principal = request.state.caller
    services: Services = request.app.state.services
    actor = actor_of(request, caller)
    try:
        change = await _change(request, caller, action, answer)
        if change is not None:
            await services.audit.append(change, actor)
    except (RedisError, OSError) as error:
        logger.error(
            "not in the audit, since Redis is away (%s): %s by %s, answered with %s",
            error,
            action,
            actor,
            answer,
        )


async def _change(request: Request, caller: Principal, action: str, answer: dict[str, Any]) -> Change | None:
    """What the endpoint has done; None: an upload has begun, and there is nothing yet."""
    if "name" in request.path_params:
        name = _name_of(request.path_params["name"])
        after = await _state_of(request, caller, answer.get("name", name))
        return Change(action, caller.tenant_id, name, request.state.before, after)
    version = answer.get("adapter") if answer["object"] == "adapter.upload" else answer
    if version is None:
        return None
    after = {key: version[key] for key in ("version", "digest", "bytes")}
    return Change(action, caller.tenant_id, version["name"], {}, after)


async def _state_of(request: Request, caller: Principal, ref: str) -> dict[str, Any]:
    """What the audit says of a name; nothing when there is none."""
    services: Services = request.app.state.services
    name = _name_of(ref)
    found = await services.registry.show(caller.tenant_id, name) if name else None
    return _describe(found) if found else {}


def _describe(name: AdapterName) -> dict[str, Any]:
    return {
        "name": name.name,
        "versions": [version.version for version in name.versions],
        "live": name.live.version if name.live else None,
        "canary": f"{name.canary_version}: {name.canary_percent:g} %" if name.canary_version else None,
        "pinned": name.pinned,
        "grants": list(name.grants),
    }


def _name_of(ref: str) -> str:
    """The name in a path's `sql` or `sql@3`; empty for what can be none, which the endpoint refuses."""
    try:
        return parse_own_ref(ref)[0]
    except InvalidName:
        return ""
