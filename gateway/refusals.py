"""What a client is told when no engine takes its request, or not in time."""

from __future__ import annotations

import math
from collections.abc import Collection

from gateway.errors import ApiError, unavailable
from protos.engine_pb2 import Finished, Refusal


def refused_by_all(refusals: Collection[Finished]) -> ApiError:
    """Returns the error for a request that every engine has refused.

    A tenant that has filled its own queue gets 429, since it can mend that; else it is 503.
    """
    own = [end for end in refusals if end.refusal == Refusal.REFUSAL_TENANT_QUEUE_FULL]
    retry_after_s = _retry_after_s(own or refusals)
    if own:
        return ApiError(
            429,
            "Too many of your requests are waiting already. Send fewer at once, or try again in "
            f"{retry_after_s} s.",
            type="requests",
            code="queue_full",
            headers={"Retry-After": str(retry_after_s)},
        )
    return unavailable(
        "All engines are busy or draining. Try again shortly.",
        retry_after_s=retry_after_s,
        code="engine_overloaded",
    )


def engine_lost() -> ApiError:
    """Returns the 503 for a request whose engine went, and which no other engine continued."""
    return unavailable("The engine that ran this request was lost, and no other came in time. Try again.")


def lost_too_often(times: int) -> ApiError:
    """Returns the 500 for a request with which engines were lost, one after the other."""
    return ApiError(
        500,
        f"{times} engines were lost while they computed this request, so it was not given to another. If "
        "that happens again with the same request, tell your operator.",
        type="server_error",
        code="engines_lost",
    )


def no_engine() -> ApiError:
    """Returns the 503 for a request that finds no engine at all."""
    return unavailable("No engine is ready. Try again shortly.")


def adapter_unreadable() -> ApiError:
    """Returns the 503 for a request whose adapter an engine cannot read just now."""
    return unavailable(
        "The adapter's files cannot be read at the moment. Try again later, or tell your operator.",
        retry_after_s=60,
        code="store_unavailable",
    )


def deadline_passed() -> ApiError:
    """Returns the 504 for a request that was not answered within its time."""
    return ApiError(
        504,
        "The request took longer than its deadline. Ask for fewer tokens, or give it more time: by the "
        "header X-Request-Timeout, in seconds; over gRPC by the call's deadline.",
        type="server_error",
        code="deadline_exceeded",
    )


def _retry_after_s(refusals: Collection[Finished]) -> int:
    """The soonest of the engines' estimates, in whole seconds, at least one."""
    return max(1, math.ceil(min((end.retry_after_ms for end in refusals), default=0) / 1000))
