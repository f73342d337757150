"""The metrics by which routers choose a server, read from a running one as routers read them.

The endpoint picker of the Gateway API Inference Extension finds a metric by its name, the type
``gauge`` and the labels that its configuration names: those of a Triton server with TensorRT-LLM
are ``TRTLLM``, vLLM's are ``VLLM``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from minisgl_backend.server.process import TritonServer
from tests.server.client import Call, Metrics, wait_for

TRTLLM: Final = {
    "queued": "nv_trt_llm_request_metrics{request_type=waiting}",
    "running": "nv_trt_llm_request_metrics{request_type=scheduled}",
    "usage": "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}",
    "block_size": "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=tokens_per}",
    "num_blocks": "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=max}",
}
VLLM: Final = {
    "queued": "vllm:num_requests_waiting",
    "running": "vllm:num_requests_running",
    "usage": "vllm:kv_cache_usage_perc",
}
CACHE_INFO: Final = "vllm:cache_config_info"


class Page:
    """One reading of a server's metrics."""

    def __init__(self, server: TritonServer) -> None:
        families = text_string_to_metric_families(Metrics(server).text)
        self._families = {family.name: family for family in families}

    def sample(self, spec: str) -> Any:
        """The only sample of a gauge that matches a router's ``name{label=value}``."""
        name, _, rest = spec.partition("{")
        label, _, value = rest.rstrip("}").partition("=")
        family = self._families[name]
        assert family.type == "gauge"
        (found,) = (one for one in family.samples if not label or one.labels[label] == value)
        return found

    def read(self, specs: dict[str, str]) -> dict[str, float]:
        return {what: self.sample(spec).value for what, spec in specs.items()}


def test_load_as_routers_read_it(paced_server: TritonServer) -> None:
    """Two requests run and one waits, which is all there is room for; then there are none."""
    busy = {"queued": 1, "running": 2}
    idle = {"queued": 0, "running": 0, "usage": 0}

    def says(expected: Mapping[str, float]) -> bool:
        page = Page(paced_server)
        return all(expected.items() <= page.read(names).items() for names in (TRTLLM, VLLM))

    def tells_pages() -> bool:
        page = Page(paced_server)
        return all(0 < page.read(names)["usage"] < 1 for names in (TRTLLM, VLLM))

    wait_for(lambda: says(idle), "an idle server")
    with ExitStack() as stack:
        for _ in range(3):
            values: dict[str, Any] = {"text_input": "a b c", "max_tokens": 8000, "stream": True}
            stack.enter_context(Call(paced_server, **values))
        wait_for(lambda: says(busy), "two running requests and a waiting one")
        wait_for(tells_pages, "the pages of these")  # each gauge is reported by itself
    wait_for(lambda: says(idle), "an idle server")


def test_pages_as_routers_read_them(server: TritonServer) -> None:
    page = Page(server)
    info = page.sample(CACHE_INFO)
    read = page.read(TRTLLM)
    assert info.value == 1
    assert int(info.labels["block_size"]) == read["block_size"] == 16
    assert int(info.labels["num_gpu_blocks"]) == read["num_blocks"] > 0
    assert int(info.labels["kv_cache_size_tokens"]) == 16 * read["num_blocks"]
    assert info.labels["cache_dtype"] == "auto"
    assert info.labels["enable_prefix_caching"] == "True"
    assert float(info.labels["gpu_memory_utilization"]) == 0.9
