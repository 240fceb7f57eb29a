"""Tokens beyond the base model's vocabulary: only for an adapter that has them."""

from __future__ import annotations

from builders import expected_output, make_engine, make_request

from engine.scheduler.scheduler import UNKNOWN_TOKEN


def test_only_an_adapter_that_has_a_token_gets_it() -> None:
    engine = make_engine(max_num_seqs=4)
    engine.store.add("wide", vocab_size=1010)
    engine.store.add("plain")
    prompt = [1, 1009, 2]
    fine = make_request(prompt, request_id=1, adapter="wide", vocab_size=1010)
    beyond = make_request([1, 1010], request_id=2, adapter="wide", vocab_size=1011, n=3)
    unknown = make_request(prompt, request_id=3, adapter="plain", vocab_size=1010)
    others = make_request(20, request_id=4, adapter="plain")
    for request in (fine, beyond, unknown, others):
        engine.scheduler.add(request)
    engine.run()
    for request in (fine, others):
        assert engine.tokens["link", request.request_id, 0] == expected_output(request)
    for key in (("link", 2, 0), ("link", 2, 1), ("link", 2, 2), ("link", 3, 0)):
        assert engine.finished[key] == ("ERROR", UNKNOWN_TOKEN)
        assert key not in engine.tokens
    engine.check_all_free()
    engine.close()
