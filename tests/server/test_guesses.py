"""The metrics of guesses, read from a server whose engine makes some."""

from __future__ import annotations

from minisgl_backend.server.process import TritonServer
from tests.server.client import Metrics, generate, wait_for
from tests.server.conftest import running

NUM_PLACES = 3
PER_PLACE = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


def by_place(server: TritonServer) -> list[float]:
    page = Metrics(server)
    return [page.labelled(PER_PLACE, "position", str(place)) for place in range(NUM_PLACES)]


def test_right_guesses_are_told_by_place_over_all_replicas() -> None:
    options = {"speculative_tokens": str(NUM_PLACES), "data_parallel_size": "2"}
    with running(options={**options, "num_pages": "512"}) as server:
        page = Metrics(server)
        assert page.text.count(f"\n{PER_PLACE}{{") == NUM_PLACES and not any(by_place(server))
        for seed in range(4):
            said = {"text_input": "1, 2, 3, 1, 2, 3, 1, 2, 3, ", "seed": seed}
            generate(server, **said, temperature=0.0, max_tokens=100, ignore_eos=True)

        def are_told() -> bool:
            page, counts = Metrics(server), by_place(server)
            drafts = page["vllm:spec_decode_num_drafts_total"]
            accepted = page["vllm:spec_decode_num_accepted_tokens_total"]
            return drafts >= counts[0] >= counts[1] >= counts[2] > 0 and sum(counts) == accepted

        wait_for(are_told, "right guesses at all places")
