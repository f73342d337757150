"""Faults inside the engine: forward passes, sampling, NaN, missing pages, delays everywhere.

Knows the names of the defects (``defect``). Must not know how they are made.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

from minisgl_client.client import AsyncClient, Client
from minisgl_client.errors import MinisglError

from minisgl_check.asking import Extent
from minisgl_check.canary import PROMPTS
from minisgl_check.case import Case
from minisgl_check.defect import MARK, STEP_S, Defect
from minisgl_check.departures import departures
from minisgl_check.fault import Fault, Settings, Stage, stage
from minisgl_check.leavers import Leavers
from minisgl_check.own_server import OPTIONS
from minisgl_check.waiting import wait_until
from minisgl_kit.repositories import repository_with

LONGEST_WAIT_S: Final = 3.0
"""The longest wait in the queue of the impatient server."""
_FRAIL_MODEL: Final = "from minisgl_check.frail_model import TritonPythonModel\n"
_NUM_STREAMS: Final = 8
_NUM_TOKENS: Final = 40
_NUM_ABORTS: Final = 500
_FEW_PAGES: Final = 8
_GREEDY: Final[dict[str, Any]] = {
    "prompt": "What is the capital of Italy?",
    "max_tokens": _NUM_TOKENS,
    "ignore_eos": True,
    "temperature": 0.0,
}
_HISTORY: Final = (
    {"role": "user", "content": "What is the opposite of hot?"},
    {"role": "assistant", "content": "cold"},
)
_LONG: Final[dict[str, Any]] = {
    "messages": [*_HISTORY * 8, {"role": "user", "content": "What is the capital of Italy?"}],
    "max_tokens": _NUM_TOKENS,
    "ignore_eos": True,
    "temperature": 0.0,
}
"""Its prompt takes several chunks."""


@contextmanager
def frail_stage(settings: Settings, **options: str) -> Iterator[Stage]:
    """A server whose engine breaks when it is told to."""
    with tempfile.TemporaryDirectory(prefix="minisgl-check-") as folder:
        repository = repository_with({"llm_engine": _FRAIL_MODEL}, Path(folder))
        with stage(settings, {**OPTIONS, **options}, repository=repository) as place:
            yield place


def impatient_stage(settings: Settings) -> AbstractContextManager[Stage]:
    """Such a server that also refuses requests that wait too long."""
    return frail_stage(settings, max_queue_time_s=str(LONGEST_WAIT_S))


def small_stage(settings: Settings) -> AbstractContextManager[Stage]:
    """A server with eight pages in total."""
    return stage(settings, {**OPTIONS, "num_pages": str(_FEW_PAGES)})


def one_forward_raises(stage: Stage, case: Case) -> None:
    """No client may notice: requests come back with the tokens that they have."""
    expected = _alone(stage)
    with stage.own.switch.on(Defect.ONE_FORWARD):
        texts = _ask(stage, case, [_GREEDY] * _NUM_STREAMS)
    case.expect(texts == Counter({expected: _NUM_STREAMS}), f"the answers became {texts}")
    stage.expect_canary(case)
    case.what = f"{case.ended['answered']} of {case.count} streams went on to their ends"


def every_forward_raises(stage: Stage, case: Case) -> None:
    """Each request gets one error, and the engine's model is loaded again."""
    own = stage.own
    server, pid = own.server, own.pid("llm_engine")
    with own.switch.on(Defect.EVERY_FORWARD):
        texts = _ask(stage, case, [_GREEDY] * _NUM_STREAMS)
        noticed = wait_until(lambda: not own.is_ready(), stage.settings.patience_s)
    case.expect(not case.ended["answered"], f"some were answered: {texts}")
    case.expect(noticed, "the health port never said so")
    case.expect(wait_until(own.serves, stage.settings.patience_s), "it does not serve again")
    case.expect(own.server is server, "all of the server was started again")
    case.expect(own.pid("llm_engine") != pid, "the broken process still serves")
    stage.expect_canary(case)
    case.what = f"{case.ended['failed']} of {case.count} failed, and it serves again"


def sampling_raises(stage: Stage, case: Case) -> None:
    """One request cannot be sampled: it fails alone."""
    _one_is_poisoned(stage, case, Defect.SAMPLING)


def logits_are_nan(stage: Stage, case: Case) -> None:
    """One request has no numbers in its logits: it fails alone."""
    _one_is_poisoned(stage, case, Defect.NAN)


def pages_vanish(defect: Defect) -> Callable[[Stage, Case], None]:
    """Some steps of one phase find no pages: requests wait or return, with the same tokens."""

    def provoke(stage: Stage, case: Case) -> None:
        own = stage.own
        with Client(own.grpc_address, retries=0) as client:
            expected = client.generate(**_LONG).text
        before = own.stats().engine["scheduler"]["num_retractions"]
        # with its own salt, none finds the others' prompt in the cache
        requests = [{**_LONG, "cache_salt": f"{number}"} for number in range(_NUM_STREAMS)]
        with own.switch.on(defect):
            texts = _ask(stage, case, requests)
        case.expect(own.switch.was_met, "there were pages all the time")
        case.expect(texts == Counter({expected: _NUM_STREAMS}), f"the answers became {texts}")
        retractions = own.stats().engine["scheduler"]["num_retractions"] - before
        case.what = f"{case.ended['answered']} of {case.count} as alone, {retractions} retractions"
        stage.expect_canary(case)

    return provoke


def eight_pages(stage: Stage, case: Case) -> None:
    """As many requests as there are pages: they wait or return, and get the tokens they should."""
    before = stage.own.stats().engine["scheduler"]["num_retractions"]
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(_FEW_PAGES)]

    def ask(client: Client, prompt: dict[str, Any]) -> str:
        return client.generate(**prompt, max_tokens=24, temperature=0.0).text

    with Client(stage.own.grpc_address, retries=0) as client:
        alone = [ask(client, prompt) for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            together = list(pool.map(lambda prompt: ask(client, prompt), prompts))
    case.count = 2 * len(prompts)
    case.ended["answered"] += case.count
    case.expect(together == alone, f"the answers became {together}")
    retractions = stage.own.stats().engine["scheduler"]["num_retractions"] - before
    case.what = f"the same {len(prompts)} answers as alone, {retractions} retractions"


def waits_for_too_long(stage: Stage, case: Case) -> None:
    """A request that waits longer than the queue allows is refused, and never prefilled."""
    own = stage.own
    num_rows = int(own.stats().info["max_running_requests"])
    longest = int(LONGEST_WAIT_S / STEP_S * 1.5)
    with (
        own.switch.on(Defect.SLOW),
        Client(own.grpc_address, retries=0) as client,
    ):
        streams = [
            client.stream(input_ids=[1, 2, number], max_tokens=longest, ignore_eos=True)
            for number in range(num_rows)
        ]
        for stream in streams:
            next(stream)
        before = own.stats().engine["num_prompt_tokens"]
        case.count = 1
        try:
            client.generate(input_ids=[7] * 99, max_tokens=1)
            case.expect(False, "was answered")
        except MinisglError as error:
            case.ended["refused"] += 1
            case.expect(error.code == "UNAVAILABLE", f"ended with {error.code}")
            case.what = f"refused: {error}"
        made = own.stats().engine["num_prompt_tokens"] - before
        case.expect(made == 0, f"{made} prompt tokens were computed meanwhile")
        for stream in streams:
            stream.close()


def all_is_late(stage: Stage, case: Case) -> None:
    """Pauses of up to 50 ms at eight points of a request's path, and clients that leave."""
    extent = Extent(load_s=0.0, num_cut=_NUM_ABORTS, num_churned=0)
    leavers = Leavers(stage.own, extent, stage.settings.rng)
    with stage.own.switch.on(Defect.PAUSES):
        storm = leavers.cancel_storm()
    case.count, case.ended, case.what = storm.count, storm.ended, storm.what
    case.failures += storm.failures
    stage.expect_canary(case)


FAULTS: Final = (
    Fault("F8", "one forward pass raises", one_forward_raises),
    Fault("F9", "sampling for one request raises", sampling_raises),
    Fault("F10", "NaN in the logits of one request", logits_are_nan),
    *(
        Fault("F12", defect.value, pages_vanish(defect))
        for defect in (
            Defect.NO_PAGES_TO_ADMIT,
            Defect.NO_PAGES_BETWEEN_CHUNKS,
            Defect.NO_PAGES_TO_DECODE,
        )
    ),
    Fault("F13", "clients leave in every phase", departures, has_figures=True),
    Fault("F27", f"pauses at eight points, {_NUM_ABORTS} clients leave", all_is_late),
    Fault("F8", "every forward pass raises", every_forward_raises),
)
IMPATIENT_FAULTS: Final = (
    Fault("F24", f"a wait of more than {LONGEST_WAIT_S:g} s in the queue", waits_for_too_long),
)
SMALL_FAULTS: Final = (Fault("F11", f"{_FEW_PAGES} pages, {_FEW_PAGES} requests", eight_pages),)


# --- helpers ---------------------------------------------------------------------------------


def _one_is_poisoned(stage: Stage, case: Case, defect: Defect) -> None:
    expected = _alone(stage)
    with stage.own.switch.on(defect):
        texts = _ask(stage, case, [*[_GREEDY] * (_NUM_STREAMS - 1), {**_GREEDY, "seed": MARK}])
    others = Counter({expected: _NUM_STREAMS - 1})
    case.expect(texts == others, f"the others' answers became {texts}")
    case.expect(case.ended["failed"] == 1, f"{case.ended['failed']} failed")
    case.what = f"{case.ended['failed']} failed, {case.ended['answered']} as ever"
    stage.expect_canary(case)


def _alone(stage: Stage) -> str:
    """The greedy answer on an idle server."""
    with Client(stage.own.grpc_address, retries=0) as client:
        return client.generate(**_GREEDY).text


def _ask(stage: Stage, case: Case, requests: Sequence[dict[str, Any]]) -> Counter[str]:
    """Send all requests at the same time; returns the texts of those answered in full."""
    texts: Counter[str] = Counter()

    async def one(client: AsyncClient, request: dict[str, Any]) -> None:
        try:
            result = await client.generate(**request)
        except MinisglError as error:
            case.ended["failed"] += 1
            case.expect(error.code == "INTERNAL", f"one ended with {error.code}: {error}")
            return
        case.ended["answered"] += 1
        whole = result.num_output_tokens == _NUM_TOKENS
        case.expect(whole, f"an answer of {result.num_output_tokens} tokens")
        texts[result.text] += 1

    async def go() -> None:
        async with AsyncClient(stage.own.grpc_address, retries=0) as client:
            await asyncio.gather(*(one(client, request) for request in requests))

    asyncio.run(go())
    case.count += len(requests)
    return texts
