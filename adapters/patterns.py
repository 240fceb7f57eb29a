"""Regular expressions from an adapter's config, matched in bounded time.

PEFT hands `target_modules`, `exclude_modules` and the keys of `rank_pattern` and `alpha_pattern` to `re`,
which backtracks: `(a+)+$` on a 40-character module name runs for hours. Here Python's own parser reads the
expression, so that it means the same, but the match follows all alternatives at once: from a set of start
positions, a node gives the set of positions where it can end. That is polynomial, and a budget of steps for
all of an adapter's patterns ends the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

MAX_PATTERN_CHARS = 4096
MAX_STEPS = 2_000_000
"""For one adapter: several times what long expressions take over 80 layers, and seconds of one core."""

_PLAIN = (op.LITERAL, op.NOT_LITERAL, op.ANY)

_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    op.CATEGORY_DIGIT: str.isdecimal,
    op.CATEGORY_SPACE: str.isspace,
    op.CATEGORY_WORD: lambda char: char.isalnum() or char == "_",
    op.CATEGORY_NOT_DIGIT: lambda char: not char.isdecimal(),
    op.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
    op.CATEGORY_NOT_WORD: lambda char: not (char.isalnum() or char == "_"),
}


class UnsafePattern(ValueError):
    """What cannot be matched exactly and in bounded time. The message completes 'it …'."""


@dataclass(slots=True)
class Budget:
    """Steps that matching may still take, shared by all patterns of one adapter."""

    steps: int = MAX_STEPS

    def spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise UnsafePattern("is too costly to match; write it more simply")


class Pattern:
    """A parsed expression over module names (one line, no newline in them)."""

    def __init__(self, text: str, budget: Budget) -> None:
        """Raises `UnsafePattern`."""
        if len(text) > MAX_PATTERN_CHARS:
            raise UnsafePattern(f"is longer than {MAX_PATTERN_CHARS} characters")
        try:
            self._tree = _parser.parse(text)
        # Warning: where Python's warnings are errors, an ambiguous set such as `[[a]` raises one.
        except (re.error, OverflowError, RecursionError, Warning) as error:
            raise UnsafePattern(f"is not a regular expression ({error})") from None
        if self._tree.state.flags & ~re.UNICODE.value:
            raise UnsafePattern("sets inline flags, which are not supported")
        self._budget = budget
        # Without repeats and branches `re` has nothing to try twice, and a config may name every module so.
        # Sets are left out, which `re` takes long to compile.
        plain = all(node in _PLAIN for node, _ in self._tree)
        self._plain = re.compile(rf"(?:.*\.)?(?:{text})") if plain else None

    def matches_whole(self, name: str) -> bool:
        """As ``re.fullmatch(text, name)``. Raises `UnsafePattern` when that would cost too much."""
        return self._reaches_end(name, frozenset({0}))

    def matches_suffix(self, name: str) -> bool:
        """As ``(.*[.])?(text)$`` from the start: PEFT's rule for `rank_pattern` and `alpha_pattern`."""
        if self._plain is not None:
            self._budget.spend(1)
            return self._plain.fullmatch(name) is not None
        return self._reaches_end(name, frozenset({0} | {i + 1 for i, char in enumerate(name) if char == "."}))

    def _reaches_end(self, name: str, starts: frozenset[int]) -> bool:
        return len(name) in _Walk(name, self._budget).ends(self._tree, starts)


class _Walk:
    """One match of one name."""

    def __init__(self, name: str, budget: Budget) -> None:
        self._name = name
        self._budget = budget

    def ends(self, nodes: Any, starts: frozenset[int]) -> frozenset[int]:
        """Where a sequence of nodes can end, from any of `starts`."""
        try:
            for node, argument in nodes:
                if not starts:
                    break
                starts = self._node_ends(node, argument, starts)
        except RecursionError:
            raise UnsafePattern("is nested too deeply") from None
        return starts

    def _node_ends(self, node: Any, argument: Any, starts: frozenset[int]) -> frozenset[int]:
        self._budget.spend(1 + len(starts) * _choices(node, argument))
        if node is op.AT:
            return frozenset(start for start in starts if self._holds(argument, start))
        if node is op.BRANCH:
            return frozenset().union(*(self.ends(branch, starts) for branch in argument[1]))
        if node is op.SUBPATTERN:
            _, add_flags, del_flags, nodes = argument
            if add_flags or del_flags:
                raise UnsafePattern("sets inline flags, which are not supported")
            return self.ends(nodes, starts)
        if node in (op.MAX_REPEAT, op.MIN_REPEAT):
            return self._repeat_ends(argument, starts)
        if node in (op.ASSERT, op.ASSERT_NOT) and argument[0] == 1:
            wanted = node is op.ASSERT
            return frozenset(s for s in starts if bool(self.ends(argument[1], frozenset({s}))) is wanted)
        return frozenset(
            start + 1
            for start in starts
            if start < len(self._name) and _accepts(node, argument, self._name[start])
        )

    def _repeat_ends(self, argument: Any, starts: frozenset[int]) -> frozenset[int]:
        low, high, nodes = argument
        current, reached = starts, starts if low == 0 else frozenset()
        # From `name length` repetitions on, further ones can only be of the empty string: nothing new is
        # reached.
        for count in range(1, min(int(high), max(low, 1) + len(self._name)) + 1):
            self._budget.spend(1)
            following = self.ends(nodes, current)
            if count >= low:
                if following <= reached:
                    break
                reached |= following
            elif not following:
                break
            current = following
        return reached

    def _holds(self, position: Any, start: int) -> bool:
        if position in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
            return start == 0
        if position in (op.AT_END, op.AT_END_STRING):
            return start == len(self._name)
        word = _CATEGORIES[op.CATEGORY_WORD]
        before = start > 0 and word(self._name[start - 1])
        after = start < len(self._name) and word(self._name[start])
        if position is op.AT_BOUNDARY:
            return before != after
        if position is op.AT_NON_BOUNDARY:
            return before == after
        raise UnsafePattern(f"uses {str(position).lower()}, which is not supported")


def _choices(node: Any, argument: Any) -> int:
    """How many things a node may try at one position, one after the other."""
    if node is op.IN:
        return len(argument)
    return len(argument[1]) if node is op.BRANCH else 1


def _accepts(node: Any, argument: Any, char: str) -> bool:
    """Whether a node that stands for one character takes this one."""
    if node is op.LITERAL:
        return ord(char) == argument
    if node is op.NOT_LITERAL:
        return ord(char) != argument
    if node is op.ANY:
        return char != "\n"
    if node is op.IN:
        negated = argument[0][0] is op.NEGATE
        return negated != any(_accepts(kind, value, char) for kind, value in argument[negated:])
    if node is op.RANGE:
        return argument[0] <= ord(char) <= argument[1]
    if node is op.CATEGORY:
        return _CATEGORIES[argument](char)
    raise UnsafePattern(f"uses {str(node).lower()}, which is not supported")
