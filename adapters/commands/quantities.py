"""Numbers that options take."""

from __future__ import annotations

import typer

_MOST = 2.0**53
"""Beyond it, numbers lie more than one apart."""


def quantity(value: float | None) -> float | None:
    """An option's callback: `value`, unless it is NaN, infinite or larger than anything that is counted.

    Raises typer.BadParameter.
    """
    if value is not None and not abs(value) <= _MOST:
        raise typer.BadParameter(f"{value:g} is no quantity; write a number, as in 2 or 0.5.")
    return value
