"""What an engine is large enough for. Engines of one model need not be of one size: what one of them can run
is accepted, and goes to such a one.
"""

from __future__ import annotations

from collections.abc import Collection

from protos.engine_pb2 import ModelInfo, Submit


def is_large_enough(info: ModelInfo, submit: Submit) -> bool:
    """Whether an engine could run the request if it had nothing else to do."""
    length = len(submit.prompt_tokens) + max(1, submit.max_tokens)
    seats = info.max_num_seqs or len(submit.seeds)
    return (
        length <= info.max_model_len
        and len(submit.seeds) <= seats
        and (not submit.HasField("beams") or blocks_of_search(submit, info.block_size) <= info.num_blocks)
    )


def blocks_of_search(submit: Submit, block_size: int) -> int:
    """The most KV blocks that a beam search holds: its beams share the prompt's full ones, and each may have
    all others for itself.
    """
    prompt = len(submit.prompt_tokens)
    shared = prompt // block_size
    return shared + len(submit.seeds) * (-(-(prompt + submit.max_tokens) // block_size) - shared)


def differ(infos: Collection[ModelInfo]) -> bool:
    """Whether two engines of one model differ in what they are large enough for."""
    return len({(info.digest, _size(info)) for info in infos}) > len({info.digest for info in infos})


def info_for_all(infos: Collection[ModelInfo]) -> ModelInfo:
    """What requests and uploads are checked against, of engines of one model.

    It is the roomiest engine's, so that there is one for whatever is accepted; but an adapter must fit into
    each, since its requests may go to any.
    """
    info = ModelInfo()
    info.CopyFrom(max(infos, key=_size))
    info.max_lora_rank = min(each.max_lora_rank for each in infos)
    info.num_rank_pages = min(each.num_rank_pages for each in infos)
    return info


def _size(info: ModelInfo) -> tuple[int, int, int]:
    return info.max_model_len, info.num_blocks, info.max_num_seqs
