"""The ledger against clients and engines that count for themselves, with real processes that die."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ledger_soak import Chaos, run_outage, run_soak

pytestmark = pytest.mark.e2e

CHAOS = Chaos(gateway_every_s=1.5, redis_every_s=2.5, redis_away_s=1.0)


def test_the_ledger_has_what_clients_and_engines_counted(tmp_path: Path) -> None:
    """Clients leave, gateways and Redis are killed; nothing is there twice, and nothing recorded is lost."""
    evidence = run_soak(tmp_path, 300, CHAOS, tenants=20)
    assert not evidence.faults()
    outcomes = {entry.outcome for entry in evidence.entries}
    assert {"completed", "disconnected"} <= outcomes
    assert any(answer.gateway.killed_at for answer in evidence.answers)


def test_while_redis_is_away_known_keys_go_on_and_their_requests_are_booked(tmp_path: Path) -> None:
    evidence, strangers = run_outage(tmp_path, 2.0)
    assert {answer.status for answer in evidence.answers} == {200}
    assert all(answer.complete for answer in evidence.answers)
    assert len(evidence.entries) == len(evidence.answers) and not evidence.faults()
    assert strangers and set(strangers) == {503}
