"""What a gateway tells of its base model, and that it judges an upload as `adapters check` does by it."""

from __future__ import annotations

from pathlib import Path

from adapters.model_shape import shape_of_object
from gateway.base_shape import shape_of
from tests.gateway.control_plane import adapter_files, control_plane, model_info


async def test_the_shape_is_told_to_those_who_may_upload(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        answer = await plane.client.get("/v1/adapter-base", headers=acme)
        assert answer.status_code == 200 and answer.json()["model"] == "base"
        assert shape_of_object(answer.json()) == shape_of(model_info())
        assert (await plane.client.get("/v1/adapter-base")).status_code == 401
        only_inference = await plane.tenant("acme", "inference")
        assert (await plane.client.get("/v1/adapter-base", headers=only_inference)).status_code == 403
        plane.engines.info = None
        assert (await plane.client.get("/v1/adapter-base", headers=acme)).status_code == 503


async def test_tied_embeddings_and_the_vocabulary_come_from_the_engine(
    valkey_url: str, tmp_path: Path
) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        info = model_info()
        info.vocab_size, info.tied_embeddings = 64, True
        plane.engines.info = info
        told = shape_of_object((await plane.client.get("/v1/adapter-base", headers=acme)).json())
        assert (told.vocab_size, told.tied_embeddings) == (64, True)
        assert (await plane.upload(acme, adapter_files(seed=1))).status_code == 201
