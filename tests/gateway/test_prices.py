"""Price lists: what is read, what is refused, and that arithmetic is exact."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from pydantic import ValidationError

from gateway.prices import InvalidPrices, load_prices
from gateway.settings import GatewaySettings

LIST = """
currency = "EUR"
[default]
input = 0.40
cached_input = 0.04
output = 1.20
[[rules]]
tenant = "acme"
adapter = "sql-*"
input = 3
output = 5
[[rules]]
base = true
input = 0.1
output = 0.3
[[rules]]
adapter = "owner/*"
input = 7
output = 7
"""


def written(folder: Path, text: str, name: str = "prices.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("tenant", "adapter", "output"),
    [
        ("acme", "sql-fast", "5"),  # the first rule
        ("globex", "sql-fast", "1.20"),  # not its tenant
        ("acme", "sql", "1.20"),  # not its adapter
        ("acme", "", "0.3"),  # the base model, which no pattern of adapters means
        ("globex", "owner/sql-fast", "7"),
    ],
)
def test_the_first_rule_that_fits_counts_and_else_the_default(
    tmp_path: Path, tenant: str, adapter: str, output: str
) -> None:
    prices = load_prices(written(tmp_path, LIST))
    assert prices.price(tenant, adapter).output == Decimal(output)


def test_no_pattern_of_adapters_means_the_base_model(tmp_path: Path) -> None:
    rule = '[[rules]]\nadapter = "*"\ninput = 9\noutput = 9\n'
    text = 'currency = "EUR"\n[default]\ninput = 1\noutput = 1\n' + rule
    prices = load_prices(written(tmp_path, text))
    assert (prices.price("acme", "").input, prices.price("acme", "sql").input) == (1, 9)


def test_cached_input_has_its_own_price_or_that_of_input(tmp_path: Path) -> None:
    prices = load_prices(written(tmp_path, LIST))
    cost = prices.price("globex", "x").cost(input_tokens=1_000_001, cached_tokens=400_000, output_tokens=3)
    assert cost == Decimal("0.2560040")  # 600,001 × 0.40 + 400,000 × 0.04 + 3 × 1.20, in millionths
    cost = prices.price("acme", "sql-x").cost(input_tokens=10, cached_tokens=10, output_tokens=0)
    assert cost == Decimal("0.00003")


def test_a_huge_bill_is_exact(tmp_path: Path) -> None:
    text = '{"currency": "USD", "default": {"input": 999999999.999999999, "output": 0.000000001}}'
    price = load_prices(written(tmp_path, text, "prices.json")).price("acme", "")
    cost = price.cost(input_tokens=2**63, cached_tokens=0, output_tokens=1)
    assert Fraction(cost) == Fraction(2**63 * 999999999999999999 + 1, 10**15)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("currency = ", "is not TOML"),
        ('currency = "EUR"', "needs a table `default`"),
        ("[default]\ninput = 1\noutput = 1", "needs a `currency`"),
        ('currency = ""\n[default]\ninput = 1\noutput = 1', "needs a `currency`"),
        ('currency = "EUR"\n[default]\ninput = 1', "`default` needs a price `output`"),
        ('currency = "EUR"\n[default]\ninput = -1\noutput = 1', "`input` is -1; a price is from 0"),
        ('currency = "EUR"\n[default]\ninput = nan\noutput = 1', "`input` is NaN; a price is from 0"),
        ('currency = "EUR"\n[default]\ninput = "1"\noutput = 1', "`input` is a number"),
        ('currency = "EUR"\n[default]\ninput = true\noutput = 1', "`input` is a number"),
        ('currency = "EUR"\n[default]\ninput = 1e-10\noutput = 1', "more than 9 decimals"),
        ('currency = "EUR"\n[default]\ninput = 1\noutputs = 1', "unknown entry `outputs`"),
        ('currency = "EUR"\nrules = 1\n[default]\ninput = 1\noutput = 1', "`rules` is a list"),
        (LIST + "\n[[rules]]\nbase = true\nadapter = 'a'\ninput = 1\noutput = 1", "rule 4 has both"),
        (LIST + "\n[[rules]]\ntenant = 3\ninput = 1\noutput = 1", "in rule 4, `tenant` and `adapter`"),
        (LIST + "\n[[rules]]\nbase = 'yes'\ninput = 1\noutput = 1", "in rule 4, `base` is true or false"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, complaint: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InvalidPrices) as raised:
        load_prices(path)
    assert complaint in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_file_that_is_no_text_or_not_there_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "prices.json"
    binary.write_bytes(b"\xff\x00")
    for path, complaint in ((binary, "is not JSON"), (tmp_path / "none", "cannot be read: No such file")):
        with pytest.raises(InvalidPrices, match=complaint):
            load_prices(path)


def test_a_gateway_does_not_start_with_a_wrong_list(tmp_path: Path) -> None:
    assert GatewaySettings(prices=written(tmp_path, LIST)).prices is not None
    with pytest.raises(ValidationError, match="needs a table `default`"):
        GatewaySettings(prices=written(tmp_path, 'currency = "EUR"'))
