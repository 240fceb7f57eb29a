"""The official npm client, where Node.js is there and its package can be had."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clients.conftest import CALLING, PLAIN, Account, approximately
from tests.e2e.tiny import TINY

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node.js and npm"),
]
SCRIPT = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def found(account: Account, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script saw. Skips where the package cannot be fetched."""
    folder = tmp_path_factory.mktemp("node") / "client"
    shutil.copytree(SCRIPT, folder, ignore=shutil.ignore_patterns("node_modules"))
    installed = subprocess.run(
        ["npm", "ci", "--ignore-scripts"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if installed.returncode:
        pytest.skip(f"npm could not install the client: {installed.stderr.strip()[-300:]}")
    done = subprocess.run(
        ["node", "openai.mjs", account.base_url, account.key, TINY, PLAIN, CALLING],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_models_are_listed(found: dict[str, Any]) -> None:
    assert {TINY, PLAIN, CALLING} <= set(found["models"])


def test_a_streamed_chat_is_the_whole_one(found: dict[str, Any]) -> None:
    for answer in (*found["plain"], found["calls"]):
        assert answer["streamed"] == approximately(answer["whole"])
        whole, streamed = answer["usages"]
        for kind in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert whole[kind] == streamed[kind] > 0
    assert [len(answer["whole"]) for answer in found["plain"]] == [2, 2]
    ((name, arguments),) = found["calls"]["whole"][0]["calls"]
    assert name == "weather" and json.loads(arguments)["day"] in ("→", "日本", "🙂")


def test_a_streamed_text_is_the_whole_one(found: dict[str, Any]) -> None:
    whole, streamed = found["texts"]
    assert whole and whole == streamed


def test_refusals_are_the_client_s_own_errors(found: dict[str, Any]) -> None:
    assert found["missing"] == {
        "name": "NotFoundError",
        "status": 404,
        "code": "model_not_found",
        "param": "model",
    }
    assert (found["wrong"]["name"], found["wrong"]["param"]) == ("BadRequestError", "top_p")
    assert (found["unknown"]["name"], found["unknown"]["code"]) == ("AuthenticationError", "invalid_api_key")
