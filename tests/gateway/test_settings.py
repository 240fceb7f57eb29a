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
    monkeypatch.setenv("LORAPLEX_OPERATOR_KEY", "a secret")
    settings = GatewaySettings()
    assert "a secret" not in f"{settings} {settings!r} {settings.model_dump_json()}"


def test_each_setting_is_used() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "gateway").rglob("*.py"))
    for name in GatewaySettings.model_fields:
        assert re.search(rf"\bsettings\.{name}\b", source), name
