"""Who is here, and when they must be gone."""

from __future__ import annotations

from engine.scheduler.roster import Roster
from tests.engine.builders import make_request

DAY_S = 86_400.0


def test_deadlines_of_requests_that_have_ended_are_forgotten_and_no_others() -> None:
    roster = Roster()
    stays = [
        roster.enlist(make_request(4, request_id=number, deadline=DAY_S - number)) for number in range(100)
    ]
    for number in range(100, 3000):
        [seq] = roster.enlist(make_request(4, request_id=number, deadline=DAY_S + number))
        roster.strike(seq)
        assert len(roster._deadlines) <= 2 * 101 + 65
    assert roster.next_deadline == DAY_S - 99
    assert roster.take_overdue(DAY_S - 50) == [seq for [seq] in reversed(stays[50:])]
    assert roster.take_overdue(2 * DAY_S) == [seq for [seq] in reversed(stays[:50])]
    assert roster.next_deadline is None


def test_the_deadline_of_a_request_that_has_ended_is_not_that_of_the_next_with_its_id() -> None:
    roster = Roster()
    [ended] = roster.enlist(make_request(4, request_id=1, deadline=10.0))
    roster.strike(ended)
    [seq] = roster.enlist(make_request(4, request_id=1, deadline=100.0))
    assert roster.take_overdue(50.0) == []
    assert roster.take_overdue(100.0) == [seq]
