"""Price lists: what tokens cost, read from a TOML or JSON file.

    currency = "EUR"

    [default]               # per million tokens
    input = 0.40
    cached_input = 0.04     # input tokens from the prefix cache; without it, as any other
    output = 1.20

    [[rules]]               # the first that fits counts, else the default
    tenant = "acme"         # a pattern as in shells; without it, every tenant
    adapter = "sql-*"       # a pattern of names; or `base = true`, for the base model; without either, both
    input = 0.60
    output = 2.00

All arithmetic is decimal and exact: a sum is the sum of what is shown.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Context, Decimal, Inexact, localcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

_MAX_PRICE = Decimal(10**9)
_MAX_DECIMALS = 9
_PER_TOKENS_EXPONENT = -6
_KINDS = ("input", "cached_input", "output")
# Wide enough for a product or sum of any prices and counts of 64 bits; what would not be exact is an error.
EXACT = Context(prec=100, traps=[Inexact])


class InvalidPrices(ValueError):
    """The price list cannot be used; the message names the file, the fault and the place."""


@dataclass(frozen=True, slots=True)
class Price:
    """What a million tokens of each kind cost."""

    input: Decimal
    cached_input: Decimal
    output: Decimal

    def cost(self, *, input_tokens: int, cached_tokens: int, output_tokens: int) -> Decimal:
        """Returns what these tokens cost, exactly. `cached_tokens` of the input came from the cache."""
        with localcontext(EXACT):
            millions = (
                (input_tokens - cached_tokens) * self.input
                + cached_tokens * self.cached_input
                + output_tokens * self.output
            )
            return millions.scaleb(_PER_TOKENS_EXPONENT)


@dataclass(frozen=True, slots=True)
class _Rule:
    price: Price
    tenant: str = "*"
    adapter: str | None = None
    """None: any adapter, and the base model."""
    base: bool = False
    """The base model only."""

    def fits(self, tenant: str, adapter: str) -> bool:
        if not fnmatchcase(tenant, self.tenant):
            return False
        if self.base:
            return not adapter
        return self.adapter is None or (bool(adapter) and fnmatchcase(adapter, self.adapter))


@dataclass(frozen=True, slots=True)
class PriceList:
    """Prices by tenant and adapter."""

    currency: str
    default: Price
    rules: tuple[_Rule, ...] = ()

    def price(self, tenant: str, adapter: str) -> Price:
        """Returns the price of a tenant's requests for an adapter; "" is the base model."""
        return next((rule.price for rule in self.rules if rule.fits(tenant, adapter)), self.default)


def load_prices(path: Path) -> PriceList:
    """Reads a price list. Raises InvalidPrices when the file cannot be read, or is not as it should be."""
    try:
        text = path.read_text(encoding="utf-8")
        values = (
            json.loads(text, parse_float=Decimal)
            if path.suffix == ".json"
            else tomllib.loads(text, parse_float=Decimal)
        )
    except OSError as error:
        raise InvalidPrices(f"The price list {path} cannot be read: {error.strerror}.") from None
    except ValueError as error:  # of both parsers, and of what is no UTF-8
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise InvalidPrices(f"The price list {path} is not {kind}: {error}.") from None
    try:
        return _price_list(values)
    except _Fault as fault:
        raise InvalidPrices(f"The price list {path} is wrong: {fault}") from None


class _Fault(Exception):
    """What is wrong with a list, and where in it."""


def _price_list(values: object) -> PriceList:
    top = _table(values, "the list", {"currency", "default", "rules"})
    currency = top.get("currency")
    if not isinstance(currency, str) or not currency.strip():
        raise _Fault('it needs a `currency`, such as currency = "EUR".')
    if "default" not in top:
        raise _Fault("it needs a table `default`, with the prices that no rule changes.")
    rules = top.get("rules", [])
    if not isinstance(rules, list):
        raise _Fault("`rules` is a list of tables, each headed [[rules]].")
    default = _table(top["default"], "`default`", set(_KINDS))
    return PriceList(
        currency,
        _price(default, "`default`"),
        tuple(_rule(rule, f"rule {number}") for number, rule in enumerate(rules, start=1)),
    )


def _rule(values: object, where: str) -> _Rule:
    table = _table(values, where, {"tenant", "adapter", "base", *_KINDS})
    tenant, adapter, base = table.get("tenant", "*"), table.get("adapter"), table.get("base", False)
    if not isinstance(tenant, str) or not isinstance(adapter, str | None):
        raise _Fault(f"in {where}, `tenant` and `adapter` are patterns in quotes.")
    if not isinstance(base, bool):
        raise _Fault(f"in {where}, `base` is true or false.")
    if base and adapter is not None:
        raise _Fault(f"{where} has both `base` and `adapter`; a request is for one or the other.")
    return _Rule(_price(table, where), tenant, adapter, base)


def _table(values: object, where: str, known: set[str]) -> Mapping[str, Any]:
    if not isinstance(values, dict):
        raise _Fault(f"{where} is no table of names and values.")
    unknown = sorted(values.keys() - known)
    if unknown:
        raise _Fault(f"{where} has an unknown entry `{unknown[0]}`. Known are {', '.join(sorted(known))}.")
    return values


def _price(table: Mapping[str, Any], where: str) -> Price:
    for name in ("input", "output"):
        if name not in table:
            raise _Fault(f"{where} needs a price `{name}`.")
    of_input = _amount(table["input"], where, "input")
    cached = table.get("cached_input", of_input)
    return Price(of_input, _amount(cached, where, "cached_input"), _amount(table["output"], where, "output"))


def _amount(value: object, where: str, name: str) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise _Fault(f"in {where}, `{name}` is a number, per million tokens.")
    amount = Decimal(value)
    if not amount.is_finite() or not 0 <= amount <= _MAX_PRICE:
        raise _Fault(f"in {where}, `{name}` is {value}; a price is from 0 to {_MAX_PRICE}.")
    exponent = amount.as_tuple().exponent
    assert isinstance(exponent, int)  # since it is finite
    if exponent < -_MAX_DECIMALS:
        raise _Fault(f"in {where}, `{name}` has more than {_MAX_DECIMALS} decimals.")
    return amount
