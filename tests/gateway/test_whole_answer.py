"""Answers that go out in one piece look as all others do, whatever the connection."""

from __future__ import annotations

import json
import socket
from http.client import parse_headers

import httpx
import pytest

from gateway.limits import RateLimits, TenantLimits
from tests.gateway.local_stack import LocalStack

BODY = json.dumps({"model": "tiny", "prompt": "one", "max_tokens": 4, "seed": 7, "ignore_eos": True}).encode()


@pytest.fixture
def key(local_stack: LocalStack) -> str:
    limits = TenantLimits(RateLimits(requests_per_minute=1000, input_tokens_per_minute=10**6))
    return local_stack.add_tenant("acme", limits=limits)


def request(key: str, *, version: str = "1.1", headers: str = "") -> bytes:
    head = (
        f"POST /v1/completions HTTP/{version}\r\nhost: gateway\r\nauthorization: Bearer {key}\r\n"
        f"content-length: {len(BODY)}\r\n{headers}\r\n"
    )
    return head.encode() + BODY


def answers(stack: LocalStack, *requests: bytes) -> list[tuple[dict[str, str], str]]:
    """Sends requests at once on one connection. Returns the headers and the text of each answer, in order."""
    found: list[tuple[dict[str, str], str]] = []
    with socket.create_connection(_address(stack), timeout=30) as connection:
        connection.sendall(b"".join(requests))
        with connection.makefile("rb") as file:
            for _ in requests:
                status = file.readline()
                headers = {name.lower(): value for name, value in parse_headers(file).items()}
                body = file.read(int(headers["content-length"]))
                assert status == b"HTTP/1.1 200 OK\r\n", body
                found.append((headers, json.loads(body)["choices"][0]["text"]))
    return found


def test_an_answer_has_the_headers_that_asgis_messages_give_it(local_stack: LocalStack, key: str) -> None:
    [(whole, text)] = answers(local_stack, request(key))
    [(closed, other)] = answers(local_stack, request(key, headers="connection: close\r\n"))
    assert text == other
    assert list(whole) == [name for name in closed if name != "connection"]
    assert whole["content-type"] == "application/json"
    assert whole["x-request-id"].startswith("req_") and whole["x-request-id"] != closed["x-request-id"]
    assert (whole["x-ratelimit-remaining-requests"], closed["x-ratelimit-remaining-requests"]) == (
        "999",
        "998",
    )


def test_requests_on_one_connection_are_answered_in_turn(local_stack: LocalStack, key: str) -> None:
    one_at_a_time = answers(local_stack, request(key))
    at_once = answers(local_stack, *[request(key)] * 5, request(key, headers="connection: close\r\n"))
    assert [text for _, text in at_once] == [one_at_a_time[0][1]] * 6
    left = [headers["x-ratelimit-remaining-requests"] for headers, _ in at_once]
    assert left == ["998", "997", "996", "995", "994", "993"]


def test_a_client_of_http_1_0_sees_the_end(local_stack: LocalStack, key: str) -> None:
    with socket.create_connection(_address(local_stack), timeout=30) as connection:
        connection.sendall(request(key, version="1.0"))
        with connection.makefile("rb") as file:
            head, _, body = file.read().partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower() and json.loads(body)["choices"]


def _address(stack: LocalStack) -> tuple[str, int]:
    url = httpx.URL(stack.url)
    assert url.port is not None
    return url.host, url.port
