"""CSV for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "|", "%")


def to_csv(columns: Sequence[str], rows: Iterable[Sequence[str | int | None]]) -> str:
    """Returns the table as RFC 4180 has it, with a line of headings.

    A text that a spreadsheet would take for a formula gets an apostrophe in front, which spreadsheets do not
    show: names come from tenants, and whoever opens the file must not run what they wrote.
    """
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(columns)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return out.getvalue()


def _cell(value: str | int | None) -> str | int:
    if isinstance(value, str) and value.startswith(_FORMULA_STARTS):
        return "'" + value
    return "" if value is None else value
