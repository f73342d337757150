"""A gateway in front of two real servers: where requests go, and what happens to them when a server
drains or is killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from minisgl_client.errors import error_from
from minisgl_gateway.engine_errors import _LOST
from minisgl_gateway.servers import Servers, beginning

from minisgl_backend.server.process import TritonServer
from minisgl_kit.repositories import repository_with
from tests.gateway.conftest import COMMAND, Gateway, gateway_of
from tests.server.client import PATIENCE_S, Metrics, wait_for
from tests.server.conftest import running

_PACED = """\
from minisgl_bench.paced import paced_model

TritonPythonModel = paced_model(step_s=0.01, text="again and again ")
"""


@pytest.fixture(scope="module")
def running_pair(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[], list[TritonServer]]]:
    """Returns two running servers: those of the previous test, except for any that it has ended."""
    repository = repository_with({"llm_engine": _PACED}, tmp_path_factory.mktemp("pair"))
    found: dict[int, TritonServer] = {}
    with ExitStack() as first, ExitStack() as second:

        def both() -> list[TritonServer]:
            for index, stack in enumerate((first, second)):
                if index not in found or found[index].poll() is not None:
                    stack.close()
                    options = {"drain_timeout_s": "60"}
                    found[index] = stack.enter_context(
                        running(repository, options=options, exit_code=None)
                    )
            return [found[0], found[1]]

        yield both


@pytest.fixture
def pair(
    running_pair: Callable[[], list[TritonServer]], tmp_path: Path
) -> Iterator[tuple[list[TritonServer], Gateway]]:
    servers = running_pair()
    addresses = [f"127.0.0.1:{server.grpc_port}" for server in servers]
    with gateway_of(addresses, tmp_path / "log") as gateway:
        yield servers, gateway


def num_asked(server: TritonServer) -> float:
    return Metrics(server)["vllm:request_prompt_tokens_count"]


def home_of(servers: list[TritonServer], gateway: Gateway, content: str) -> int:
    """The server that gets a conversation."""
    before = [num_asked(server) for server in servers]
    assert gateway.chat(content, max_tokens=1).status_code == 200
    changed = list[int]()

    def has_changed() -> bool:
        changed[:] = [
            index for index, server in enumerate(servers) if num_asked(server) > before[index]
        ]
        return bool(changed)

    wait_for(has_changed, "the request in the metrics")
    return changed[0]


def homes_of(servers: list[TritonServer], gateway: Gateway, *, least: int) -> dict[str, int]:
    """The servers of ``least`` conversations, or of more until both servers have some: which server
    gets one depends on the servers' ports, which are random."""
    homes: dict[str, int] = {}
    while len(homes) < least or (len(set(homes.values())) < 2 and len(homes) < 60):
        content = f"talk {len(homes)}"
        homes[content] = home_of(servers, gateway, content)
    assert set(homes.values()) == {0, 1}, gateway.log.read_text()
    return homes


@pytest.mark.server
def test_conversations_stay_and_outlive_their_server(
    pair: tuple[list[TritonServer], Gateway],
) -> None:
    servers, gateway = pair
    homes = homes_of(servers, gateway, least=12)
    content = next(content for content, home in homes.items() if home == 1)
    later = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "again"},
        {"role": "user", "content": "and then?"},
    ]
    before = [num_asked(server) for server in servers]
    body = {"model": "minisgl", "messages": later, "max_tokens": 1}
    assert gateway.post("/v1/chat/completions", body).status_code == 200
    wait_for(lambda: num_asked(servers[1]) == before[1] + 1, "the next turn where the first was")
    assert num_asked(servers[0]) == before[0]

    # a drain: what runs there ends well, and nobody notices
    with ThreadPoolExecutor(8) as pool:
        long = pool.submit(gateway.chat, content, max_tokens=500)
        running_there = "vllm:num_requests_running"
        wait_for(lambda: Metrics(servers[1])[running_there] == 1, "a request at the second server")
        stopped = pool.submit(servers[1].stop)
        while not stopped.done():
            for answer in pool.map(lambda content: gateway.chat(content, max_tokens=2), homes):
                assert answer.status_code == 200, answer.text
        answer = long.result()
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 500
    assert gateway.get("/health").status_code == 200
    assert "gets no requests for now" in gateway.log.read_text()


@pytest.mark.server
def test_a_tritonserver_that_was_told_to_end_refuses_and_others_answer(
    pair: tuple[list[TritonServer], Gateway],
) -> None:
    """By SIGTERM to its process alone; running requests keep it from ending."""
    servers, gateway = pair
    homes = homes_of(servers, gateway, least=8)
    content = next(content for content, home in homes.items() if home == 1)
    body = {"model": "minisgl", "messages": [{"role": "user", "content": content}]}
    with (
        ThreadPoolExecutor(8) as pool,
        httpx.stream(
            "POST",
            gateway.url + "/v1/chat/completions",
            json={**body, "max_tokens": 7000, "stream": True},
            timeout=PATIENCE_S,
        ) as long,
    ):
        texts = long.iter_text()
        assert next(texts)  # it has begun there, and cannot go to another server
        servers[1].signal(signal.SIGTERM)
        for _ in range(3):
            for answer in pool.map(lambda content: gateway.chat(content, max_tokens=2), homes):
                assert answer.status_code == 200, answer.text
        assert servers[1].poll() is None
        servers[1].signal(signal.SIGKILL)
        assert '"error"' in "".join(texts)


@pytest.mark.server
def test_a_silent_server_costs_no_request_that_had_not_begun(
    pair: tuple[list[TritonServer], Gateway],
) -> None:
    """It is frozen, and its connections with it. What had begun there ends with an error; when it
    continues, it gets requests again."""
    servers, gateway = pair
    homes = homes_of(servers, gateway, least=8)
    content = next(content for content, home in homes.items() if home == 1)
    body = {"model": "minisgl", "messages": [{"role": "user", "content": content}]}
    begun = threading.Event()

    def streamed() -> str:
        text = ""
        with httpx.stream(
            "POST",
            gateway.url + "/v1/chat/completions",
            json={**body, "max_tokens": 7000, "stream": True},
            timeout=PATIENCE_S,
        ) as response:
            for chunk in response.iter_text():
                text += chunk
                begun.set()
        return text

    with ThreadPoolExecutor(9) as pool:
        long = pool.submit(streamed)
        assert begun.wait(PATIENCE_S)
        servers[1].signal(signal.SIGSTOP)
        try:
            later = list(pool.map(lambda content: gateway.chat(content, max_tokens=2), homes))
            assert [answer.status_code for answer in later] == [200] * len(homes)
            assert "it is silent" in gateway.log.read_text()
            assert '"error"' in long.result()
        finally:
            servers[1].signal(signal.SIGCONT)

    def is_back() -> bool:
        gateway.chat(content, max_tokens=1)  # requests make the gateway probe
        return "takes requests again" in gateway.log.read_text()

    wait_for(is_back, "the server's return")
    wait_for(lambda: home_of(servers, gateway, content) == 1, "its requests")


@pytest.mark.server
def test_a_killed_server_costs_no_request_that_had_not_begun(
    pair: tuple[list[TritonServer], Gateway],
) -> None:
    servers, gateway = pair
    with ThreadPoolExecutor(8) as pool:
        first = list(pool.map(lambda n: gateway.chat(f"talk {n}", max_tokens=2), range(8)))
        assert all(answer.status_code == 200 for answer in first)
        servers[0].signal(signal.SIGKILL)
        later = list(pool.map(lambda n: gateway.chat(f"talk {n}", max_tokens=2), range(24)))
    assert [answer.status_code for answer in later] == [200] * 24
    assert gateway.get("/health").status_code == 200
    servers[1].signal(signal.SIGKILL)
    assert gateway.chat("talk 1", max_tokens=2).status_code == 503
    wait_for(lambda: gateway.get("/health").status_code == 503, "an honest answer")


@pytest.mark.parametrize("sentence", sorted(_LOST))
def test_what_is_lost_with_a_process_of_a_server_goes_to_another(sentence: str) -> None:
    class Server:
        """Loses the first request and answers the next."""

        num_asked = 0

        async def is_ready(self) -> bool:
            return True

        async def generate(self, **_: Any) -> str:
            Server.num_asked += 1
            if Server.num_asked == 1:
                raise error_from(f"in ensemble 'minisgl', INTERNAL: {sentence}")
            return "answer"

        @asynccontextmanager
        async def stream(self, **call: Any) -> AsyncIterator[AsyncIterator[str]]:
            async def deltas() -> AsyncIterator[str]:
                yield await self.generate(**call)

            yield deltas()

    async def ask() -> None:
        servers = Servers(["127.0.0.1:1", "127.0.0.1:2"], "minisgl")
        for client in servers._clients:
            await client.aclose()
        servers._clients[:] = [Server(), Server()]  # type: ignore[list-item]
        assert await servers.generate(prompt="a") == "answer"  # type: ignore[comparison-overlap]
        Server.num_asked = 0
        async with servers.stream(prompt="a") as deltas:
            assert [delta async for delta in deltas] == ["answer"]  # type: ignore[comparison-overlap]
        servers._clients.clear()
        await servers.aclose()

    asyncio.run(ask())


def test_later_turns_of_a_chat_go_to_the_same_server() -> None:
    def chat(*contents: str) -> dict[str, Any]:
        roles = ("system", "user", "assistant", "user")
        return {"messages": [dict(role=r, content=c) for r, c in zip(roles, contents)]}  # noqa: B905

    first = beginning(chat("be brief", "hello"))
    assert first == beginning(chat("be brief", "hello", "hi", "and now?"))
    assert first != beginning(chat("be brief", "bye"))
    assert first != beginning({**chat("be brief", "hello"), "cache_salt": "key"})
    assert beginning({"input_ids": list(range(600))}) == beginning({"input_ids": list(range(700))})
    assert beginning({"prompt": "a"}) != beginning({"prompt": "b"})


@pytest.mark.parametrize(
    "options",
    [
        ("--server", "127.0.0.1:1", "--server", "127.0.0.1:1"),
        ("--server", "127.0.0.1:1", "--triton", "127.0.0.1:2"),
        ("--server", "http://127.0.0.1:1"),
    ],
)
def test_wrong_servers_are_refused(options: tuple[str, ...]) -> None:
    ended = subprocess.run([*COMMAND, *options], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "--server" in ended.stderr
