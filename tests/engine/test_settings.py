"""The command line, the environment, and what they say when they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.settings import EngineSettings, parse_args


def test_a_flag_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_ENGINE_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("LORAPLEX_ENGINE_PORT", "1234")
    monkeypatch.setenv("LORAPLEX_REDIS_URL", "")
    settings = parse_args(["--model", "m.gguf", "--port", "0"])
    assert (settings.port, settings.max_num_seqs, settings.redis_url) == (0, 7, None)
    assert settings.host == "127.0.0.1" and settings.enable_prefix_caching


def test_switches_and_sizes() -> None:
    settings = parse_args(
        ["--model=m", "--no-enable-prefix-caching", "--enforce-eager", "--lora-memory-bytes=2GiB",
         "--kv-cache-memory-bytes", "1000000"]
    )  # fmt: skip
    assert not settings.enable_prefix_caching and settings.enforce_eager
    assert settings.lora_bytes("cpu") == settings.lora_bytes("cuda") == 2 << 30
    assert settings.kv_cache_memory_bytes == 1_000_000


def test_defaults_that_depend_on_the_device() -> None:
    settings = parse_args(["--model=m"])
    assert settings.step_tokens("cuda") == 8192 and settings.step_tokens("cpu") == 512
    assert settings.lora_bytes("cuda") > settings.lora_bytes("cpu")
    for device in ("cuda", "cpu"):
        assert settings.lora_host_bytes(device, 1 << 40) > settings.lora_bytes(device), (
            "or it would be useless"
        )
        assert settings.lora_host_bytes(device, 1 << 30) == 1 << 28
    assert parse_args(["--model=m", "--max-num-seqs=600"]).step_tokens("cpu") == 600


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (["--model", "/models/SmolLM2-135M.Q4_1.gguf"], "SmolLM2-135M.Q4_1"),
        (["--model", "org/name"], "org/name"),
        (["--model", "org/name", "--served-model-name", "mine"], "mine"),
    ],
)
def test_the_name_for_clients(given: list[str], name: str) -> None:
    assert parse_args(given).model_name == name


def test_a_folder_is_named_by_its_last_part(tmp_path: Path) -> None:
    (tmp_path / "Llama").mkdir()
    assert parse_args(["--model", f"{tmp_path}/Llama/"]).model_name == "Llama"


def test_the_address_for_gateways() -> None:
    assert parse_args(["--model=m"]).advertised(5) == "127.0.0.1:5"
    assert parse_args(["--model=m", "--host=0.0.0.0", "--advertise=e:1"]).advertised(5) == "e:1"
    assert not parse_args(["--model=m", "--host=0.0.0.0"]).advertised(5).startswith("0.0.0.0")


@pytest.mark.parametrize(
    ("given", "is_local_only"),
    [
        (["--redis-url=redis://10.0.0.2:6379/0"], True),
        (["--redis-url=redis://redis:6379/0", "--host=0.0.0.0", "--advertise=localhost:1"], True),
        (["--redis-url=redis://redis:6379/0", "--host=::1"], True),
        (["--redis-url=redis://10.0.0.2:6379/0", "--host=0.0.0.0"], False),
        (["--redis-url=redis://10.0.0.2:6379/0", "--advertise=10.0.0.7:50051"], False),
        (["--redis-url=redis://127.0.0.1:6380/0"], False),
        (["--redis-url=unix:///run/redis.sock"], False),
        ([], False),
    ],
)
def test_an_engine_that_others_cannot_reach_is_noticed(given: list[str], is_local_only: bool) -> None:
    assert parse_args(["--model=m", *given]).is_local_only == is_local_only


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "--model (or LORAPLEX_ENGINE_MODEL) is required"),
        (
            ["--model=m", "--port=70000"],
            "--port (or LORAPLEX_ENGINE_PORT): Input should be less than or equal",
        ),
        (["--model=m", "--port=tcp://10.0.0.3:80"], "set enableServiceLinks: false"),
        (["--model=m", "--dtype=float16"], "--dtype (or LORAPLEX_ENGINE_DTYPE)"),
        (["--model=m", "--block-size=32"], "--block-size"),
        (["--model=m", "--gpu-memory-utilization=1.5"], "--gpu-memory-utilization"),
        (["--model=m", "--lora-memory-bytes=much"], "--lora-memory-bytes"),
        (["--model=m", "--max-num-sequences=3"], "--max-num-sequences"),
    ],
)
def test_what_is_wrong_is_named(given: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(given)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_help_tells_of_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name, field in EngineSettings.model_fields.items():
        assert "--" + name.replace("_", "-") in text
        assert field.description and field.description.split()[0] in text


def test_settings_are_few_and_frozen() -> None:
    settings = parse_args(["--model=m"])
    assert len(EngineSettings.model_fields) <= 26
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1
