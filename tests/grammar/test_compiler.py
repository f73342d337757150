"""Grammars that take long or are numerous do not keep others waiting for long."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial

import pytest
from llguidance import LLMatcher

from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.errors import EngineFailure, InvalidRequest, Overloaded, Unsupported
from minisgl_backend.grammar.compiler import MOST_LONG, MOST_WAITING, Compiler, _Queue
from minisgl_backend.grammar.vetting import NUM_WORKERS
from minisgl_backend.request import Grammar, GrammarKind
from minisgl_backend.text.tokenizer_files import load_definition
from tests.waiting import PATIENCE_S


def new_compiler() -> Compiler:
    return Compiler(partial(load_definition, DEMO_MODEL), vocab_size=4096, eos_token_ids=(0,))


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    made = new_compiler()
    yield made
    made.close()


def choice(text: str) -> Grammar:
    return Grammar(GrammarKind.CHOICE, json.dumps([text]))


def exploding(number: int) -> Grammar:
    """A schema of 2,500 optional properties, which takes more than a quarter of a second."""
    names = [f"{number} {index}" for index in range(2500)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def made(asked: Future[LLMatcher]) -> LLMatcher:
    return asked.result(PATIENCE_S)


@contextmanager
def held_up(*queues: _Queue) -> Iterator[None]:
    """Keep all threads of these queues busy."""
    release, is_held = threading.Event(), threading.Semaphore(0)

    def hold() -> None:
        is_held.release()
        release.wait(PATIENCE_S)

    for queue in queues:
        for _ in range(NUM_WORKERS):
            queue.threads.submit(hold)
    for _ in range(NUM_WORKERS * len(queues)):
        assert is_held.acquire(timeout=PATIENCE_S)
    try:
        yield
    finally:
        release.set()


def test_grammars_that_take_long_hold_up_no_others(compiler: Compiler) -> None:
    with held_up(compiler._long):
        hostile = [compiler.ask(exploding(number)) for number in range(3 * NUM_WORKERS)]
        assert not made(compiler.ask(choice("behind them"))).is_error()
        assert not any(asked.done() for asked in hostile)
    for asked in hostile:
        with pytest.raises(InvalidRequest, match=r"longer than 0\.25 s"):
            made(asked)


def test_requests_wait_for_the_same_grammar_together(compiler: Compiler) -> None:
    """However many there are, they take one place."""
    with held_up(compiler._long):
        hostile = [compiler.ask(exploding(99)) for _ in range(MOST_LONG + 5)]
        assert not made(compiler.ask(choice("behind one"))).is_error()
    for asked in hostile:
        with pytest.raises(InvalidRequest, match="longer than"):
            made(asked)


def test_only_so_many_grammars_that_take_long_may_wait(compiler: Compiler) -> None:
    with held_up(compiler._long):
        hostile = [compiler.ask(exploding(number)) for number in range(MOST_LONG + 3)]
        done, waiting = wait(hostile, PATIENCE_S, "FIRST_EXCEPTION")
        for asked in done:
            with pytest.raises(Overloaded, match="too many grammars that take long"):
                made(asked)
        for asked in waiting:
            asked.cancel()
    assert done and not made(compiler.ask(choice("afterwards"))).is_error()


def test_only_so_many_grammars_may_wait(compiler: Compiler) -> None:
    made(compiler.ask(choice("kept")))
    with held_up(compiler._quick):
        waiting = [compiler.ask(choice(f"{number}")) for number in range(MOST_WAITING)]
        with pytest.raises(Overloaded, match="too many grammars wait"):
            made(compiler.ask(choice("one too many")))
        made(compiler.ask(choice("kept")))
    for asked in waiting:
        assert not made(asked).is_error()


def test_large_grammars_are_kept_as_far_as_their_bytes_allow(compiler: Compiler) -> None:
    small = [choice(f"small {number}") for number in range(3)]
    schemas = [{"const": number, "description": "x" * 200_000} for number in range(12)]
    large = [Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)) for schema in schemas]
    for grammar in (*small[:2], *large[:5], small[2], *large[5:]):
        made(compiler.ask(grammar))
    kept = [source for _, source, _ in compiler._kept]
    assert sum(map(len, kept)) == compiler._kept_bytes <= 2 * 2**20
    assert small[2].source in kept and small[0].source not in kept
    assert [one.source in kept for one in large] == [False] * 2 + [True] * 10
    compiler.drop(large[-1])
    assert compiler._kept_bytes == sum(len(source) for _, source, _ in compiler._kept)


def test_a_kept_grammar_does_not_wait_for_others(compiler: Compiler) -> None:
    made(compiler.ask(choice("kept")))
    with held_up(compiler._quick, compiler._long):
        made(compiler.ask(choice("kept")))


@pytest.mark.parametrize("takes_long", [False, True])
def test_few_answers_share_a_lexer_unless_another_takes_long(
    compiler: Compiler, takes_long: bool
) -> None:
    grammar = choice(f"shared {takes_long}")
    made(compiler.ask(grammar))
    (kept,) = [kept for key, kept in compiler._kept.items() if key[1] == grammar.source]
    kept._is_quick = not takes_long
    for _ in range(39):
        assert not made(compiler.ask(grammar)).is_error()
    assert kept._num_copies == (40 if takes_long else 8)  # of the lexer in use


def test_a_grammar_that_cannot_be_copied_fails_its_request(compiler: Compiler) -> None:
    grammar = choice("copied")
    made(compiler.ask(grammar))
    (kept,) = [kept for key, kept in compiler._kept.items() if key[1] == grammar.source]
    del kept._matcher
    with pytest.raises(EngineFailure, match="could not be compiled: AttributeError"):
        made(compiler.ask(grammar))


def test_what_is_taken_back_is_not_compiled(compiler: Compiler) -> None:
    alone, first, second = choice("taken back"), choice("wanted"), choice("wanted")
    with held_up(compiler._quick):
        asked = [compiler.ask(grammar) for grammar in (alone, first, second)]
        assert asked[0].cancel() and asked[1].cancel()
    made(asked[2])
    made(compiler.ask(choice("the last")))
    kept = [source for _, source, _ in compiler._kept]
    assert first.source in kept and alone.source not in kept


def test_a_dropped_grammar_is_compiled_again(compiler: Compiler) -> None:
    grammar = choice("dropped")
    made(compiler.ask(grammar))
    compiler.drop(grammar)
    with held_up(compiler._quick):
        asked = compiler.ask(grammar)
        assert not asked.done()
    made(asked)


def test_a_grammar_survives_the_end_of_the_processes(compiler: Compiler) -> None:
    made(compiler.ask(choice("before")))
    for _ in range(2):
        _, vetting = compiler._opened()
        vetting._keeper.kill()
        vetting._keeper.wait()
        made(compiler.ask(choice(f"after {vetting._keeper.pid}")))


def test_nothing_is_compiled_after_the_end() -> None:
    closed = new_compiler()
    closed.close()
    closed.close()
    with pytest.raises(Overloaded):
        made(closed.ask(choice("x")))


def test_what_waits_at_the_end_is_cancelled() -> None:
    closed = new_compiler()
    made(closed.ask(choice("begun")))
    with held_up(closed._quick):
        asked = closed.ask(choice("waits"))
        closing = threading.Thread(target=closed.close)
        closing.start()
        assert wait([asked], 0.0).not_done  # or it is already cancelled
    closing.join(PATIENCE_S)
    assert asked.cancelled()


def test_a_tokenizer_of_an_unknown_kind_is_read_once_and_told_of() -> None:
    definition, special = load_definition(DEMO_MODEL)
    words = json.dumps({**json.loads(definition), "decoder": None, "pre_tokenizer": None})
    loads: list[None] = []

    def load() -> tuple[str, dict[str, int]]:
        loads.append(None)
        return words, special

    compiler = Compiler(load, vocab_size=4096, eos_token_ids=(0,))
    for text in ("one", "two"):
        error = compiler.ask(choice(text)).exception(PATIENCE_S)
        assert isinstance(error, Unsupported)
        assert str(error).startswith("this tokenizer takes no structured outputs: can't determine")
    compiler.close()
    assert len(loads) == 1
