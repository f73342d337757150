"""`minisgl bench`: its commands by name, each in a module that is imported when it is called."""

from __future__ import annotations

from minisgl_backend.cli.main import LazyGroup

bench = LazyGroup(
    "bench",
    {
        "planner": "minisgl_bench.planner:planner",
        "router": "minisgl_bench.router:router",
        "plan-broadcast": "minisgl_bench.plan_broadcast:plan_broadcast",
        "response-path": "minisgl_bench.response_path:response_path",
        "cancel": "minisgl_bench.cancel:cancel",
        "gateway": "minisgl_bench.gateway:gateway",
        "serve": "minisgl_bench.serve.command:serve",
        "perf-analyzer": "minisgl_bench.perf_analyzer:perf_analyzer",
        "offline": "minisgl_bench.offline:offline",
        "prefixes": "minisgl_bench.prefixes:prefixes",
        "conversations": "minisgl_bench.conversations:conversations",
        "invariance": "minisgl_bench.invariance:invariance",
        "structured": "minisgl_bench.structured:structured",
        "server-share": "minisgl_bench.server_share:server_share",
        "scaling": "minisgl_bench.scaling:scaling",
        "decode": "minisgl_bench.decode:decode",
        "adapters": "minisgl_bench.adapters:adapters",
        "prefill": "minisgl_bench.prefill:prefill",
        "speculation": "minisgl_bench.speculation:speculation",
        "guesses": "minisgl_bench.guesses:guesses",
        "kernels": "minisgl_bench.kernels:kernels",
        "fp8-pages": "minisgl_bench.fp8_pages:fp8_pages",
        "quantized-weights": "minisgl_bench.quantized_weights:quantized_weights",
        "state-dtypes": "minisgl_bench.state_dtypes:state_dtypes",
        "dummy-model": "minisgl_bench.dummy_model:dummy_model",
        "trace-table": "minisgl_bench.trace_table:trace_table",
    },
    help="Benchmarks of a server, the engine and its parts. Every command but dummy-model prints a "
    "table and takes --json FILE.",
)
