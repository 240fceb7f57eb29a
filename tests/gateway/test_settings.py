"""The gateway's settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from gateway.settings import GatewaySettings

ROOT = Path(__file__).parents[2]


def test_the_environment_sets_them_and_an_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_PORT", "9000")
    monkeypatch.setenv("LORAPLEX_HOST", "0.0.0.0")
    settings = GatewaySettings(port=9001)
    assert (settings.host, settings.port) == ("0.0.0.0", 9001)
    with pytest.raises(ValidationError):
        settings.port = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_an_empty_variable_is_none_as_compose_passes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_OPERATOR_KEY", "")
    assert GatewaySettings().operator_key is None


@pytest.mark.parametrize("name", ["LORAPLEX_PORT", "LORAPLEX_GRPC_PORT"])
def test_what_kubernetes_sets_for_a_service_of_our_name_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "tcp://10.0.0.3:80")
    with pytest.raises(ValidationError, match="Kubernetes sets for a Service of this name"):
        GatewaySettings()


def test_the_operators_key_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_OPERATOR_KEY", "a-secret-of-the-operator")
    settings = GatewaySettings()
    assert "a-secret" not in f"{settings} {settings!r} {settings.model_dump_json()}"


def test_the_operators_key_is_taken_without_the_end_of_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_OPERATOR_KEY", " 0123456789abcdef\r\n")
    key = GatewaySettings().operator_key
    assert key is not None and key.get_secret_value() == "0123456789abcdef"


@pytest.mark.parametrize(
    ("key", "fault"),
    [
        ("0123456789abcde", "fewer than 16 characters"),
        ("0123456789abcde\n", "fewer than 16 characters"),
        ("\n", "fewer than 16 characters"),
        ("two words of a secret", "only printable ASCII without spaces"),
        ("a-secret-of-two\nlines-of-a-file", "only printable ASCII without spaces"),
        ("a-secret-with-an-umlaut-\u00fc", "only printable ASCII without spaces"),
    ],
)
def test_an_operators_key_that_is_weak_or_that_no_header_holds_is_refused(
    monkeypatch: pytest.MonkeyPatch, key: str, fault: str
) -> None:
    monkeypatch.setenv("LORAPLEX_OPERATOR_KEY", key)
    with pytest.raises(ValidationError, match=fault) as refused:
        GatewaySettings()
    assert "secret" not in str(refused.value) and "0123" not in str(refused.value)


def test_each_setting_is_used() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "gateway").rglob("*.py"))
    for name in GatewaySettings.model_fields:
        assert re.search(rf"\bsettings\.{name}\b", source), name
