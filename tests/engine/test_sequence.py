"""What two sequences may share: their block hashes against a brute-force model of what the blocks contain."""

from __future__ import annotations

from builders import make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_pool import BLOCK_SIZE, BlockPool
from engine.scheduler.block_tables import BlockTables
from engine.sequence import Request, Sequence

REQUESTS = st.fixed_dictionaries(
    {
        # Few tokens and adapters, so that equal prefixes are common.
        "prompt": st.lists(st.integers(0, 1), min_size=4, max_size=4).map(
            lambda parts: [token for part in parts for token in [part] * BLOCK_SIZE]
        ),
        "cut": st.integers(1, 4 * BLOCK_SIZE),
        "adapter": st.sampled_from(["", "one", "other"]),
        "start": st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 48, 63]),
        "scope": st.sampled_from(["mine", "yours"]),
        "known": st.integers(0, 2 * BLOCK_SIZE),
    }
)


def request_of(wish: dict) -> Request:
    prompt = wish["prompt"][: wish["cut"]]
    start = min(wish["start"], len(prompt) - 1) if wish["adapter"] else 0
    return make_request(
        prompt,
        adapter=wish["adapter"],
        adapter_start=start,
        scope=wish["scope"],
        output=[1] * wish["known"],
        max_tokens=100,
    )


def contents(request: Request, scope: str) -> list[tuple]:
    """By full block, all that its keys and values depend on: each token up to its end, and under what."""
    tokens = [*request.prompt, *request.output]
    under = [
        request.adapter_digest if position >= request.adapter_start else b""
        for position in range(len(tokens))
    ]
    computed = list(zip(tokens, under, strict=True))
    ends = range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
    return [(scope, *computed[:end]) for end in ends]


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(one=REQUESTS, other=REQUESTS)
def test_blocks_share_a_hash_exactly_if_they_have_the_same_content(one: dict, other: dict) -> None:
    first, second = request_of(one), request_of(other)
    of_first, of_second = contents(first, one["scope"]), contents(second, other["scope"])
    assert len(first.prompt_hashes) == len(of_first) and len(second.prompt_hashes) == len(of_second)
    for a, content_a in zip(first.prompt_hashes, of_first, strict=True):
        for b, content_b in zip(second.prompt_hashes, of_second, strict=True):
            assert (a == b) == (content_a == content_b)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(wish=REQUESTS)
def test_a_sequence_continued_elsewhere_has_the_hashes_that_it_would_have_had(wish: dict) -> None:
    """Output that came with the request, and output that was generated here, make the same blocks."""
    whole = request_of(wish)
    seq = Sequence(request_of({**wish, "known": 0}), 0, 1)
    seq.tokens += whole.output
    pool = BlockPool(8)
    blocks = pool.allocate(len(seq.tokens) // BLOCK_SIZE)
    assert blocks is not None
    seq.block_ids, seq.num_computed = blocks, len(seq.tokens)
    BlockTables(pool).publish(seq, len(seq.tokens))
    assert pool.lookup(whole.prompt_hashes) == blocks
