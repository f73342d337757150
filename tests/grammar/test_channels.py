"""Forms of answers in channels: what may come before the last message, and what it may be."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import pytest

from minisgl_backend.errors import InvalidRequest, Unsupported
from minisgl_backend.grammar.matchers import AnswerState, Batch, Grammars
from minisgl_backend.text.tokenizer import PromptEncoder
from minisgl_backend.text.tokenizer_files import load_definition
from minisgl_backend.wire.generation import TextPrompt
from tests.fakes import chat_templates
from tests.grammar.matching import FOLDER, compiled

THINKS: Final = "<|channel|>analysis<|message|>Hm.\nWell {<|end|><|start|>assistant"
SAYS: Final = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL: Final = "<|channel|>final<|message|>"
CALL: Final = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
TAG: Final[dict[str, Any]] = {
    "structures": [{"begin": CALL, "schema": {"const": {"at": 1}}}],
    "triggers": ["<|channel|>commentary to="],
    "stop_after_first": True,
}
CALLED: Final = f'{CALL}{{"at":1}}'
FORMS: Final[list[tuple[str, Any, str]]] = [
    ("json_schema", {"const": 5}, "5"),
    ("json_object", "", '{"a": 1}'),
    ("regex", "[0-9]{2}", "12"),
    ("choice", ["a b", "c"], "a b"),
    ("grammar", 'root ::= "x" root | "y"', "xxy"),
    ("grammar", 'start: "x"+', "xx"),
    ("structural_tag", {"structures": [{"begin": "(", "schema": {}}], "triggers": ["("]}, "a(1b"),
    (
        "structural_tag",
        {"format": {"type": "grammar", "grammar": 'root ::= "x" root | "y"'}},
        "xxy",
    ),
]


class Engine:
    """Grammars over the demo model's vocabulary, in which the marks are tokens."""

    def __init__(self, folder: Any, marks: tuple[str, ...]) -> None:
        model = chat_templates.demo_model(folder, chat_templates.GPT_OSS, marks, special=True)
        self._encoder = PromptEncoder.load(model)
        vocabulary = self._encoder.vocabulary
        (self._end,) = self._ids("<|im_end|>")
        self.grammars = Grammars(
            partial(load_definition, model),
            vocab_size=len(vocabulary),
            eos_token_ids=(self._end,),
        )

    def _ids(self, text: str) -> list[int]:
        ids = self._encoder.encode(TextPrompt(text, parse_special_tokens=True))
        return [int(token) for token in ids]

    def takes(self, kind: str, source: Any, text: str) -> bool:
        """Whether the text is a complete answer of that form."""
        matcher = compiled(self.grammars, kind, source, channels=True)
        left = [*self._ids(text), self._end]
        while left:
            state = self.grammars.advance(Batch([matcher]), [left.pop(0)]).get(0)
            if state is not None:
                return state is AnswerState.COMPLETE and left in ([], [self._end])
        return False


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("model") / "model"
    made = Engine(folder, chat_templates.GPT_OSS_MARKS)
    yield made
    made.grammars.close()


@pytest.mark.parametrize(("kind", "source", "right"), FORMS)
def test_a_form_is_that_of_the_final_message(
    engine: Engine, kind: str, source: Any, right: str
) -> None:
    assert engine.takes(kind, source, FINAL + right)
    assert engine.takes(kind, source, THINKS * 2 + FINAL + right)
    for wrong in (right, THINKS, SAYS + FINAL + right, CALLED):
        assert not engine.takes(kind, source, wrong)
    if "structures" not in source:  # whose text is free
        assert not engine.takes(kind, source, f"{FINAL}{right}?")
        assert not engine.takes(kind, source, f"{THINKS}{FINAL}")


def test_structures_that_are_messages(engine: Engine) -> None:
    """Allowed besides a free final message, in place of it, or besides one with a form."""
    free = partial(engine.takes, "structural_tag", TAG)
    required = partial(engine.takes, "structural_tag", {**TAG, "at_least_one": True})
    either = partial(
        engine.takes, "structural_tag", {**TAG, "at_least_one": True, "otherwise": {"const": 5}}
    )
    for takes in (free, required, either):
        assert takes(CALLED) and takes(THINKS + CALLED)
        assert not takes(CALLED.replace("1", "2")) and not takes(CALLED.replace("look", "see"))
    assert free(f"{THINKS}{SAYS}{CALLED}") and free(f"{THINKS}{FINAL}Any <b> text")
    assert not required(SAYS + CALLED) and not required(f"{FINAL}5")
    assert either(f"{FINAL}5") and not either(f"{FINAL}6")


@pytest.mark.parametrize("kind", ["triggered_tags", "tags_with_separator"])
def test_tags_that_are_messages(kind: str, engine: Engine) -> None:
    digits = {"type": "grammar", "grammar": 'root ::= "(" root ")" | [0-9]'}
    tags = [
        {"begin": CALL, "content": {"type": "json_schema", "json_schema": {"const": {"at": 1}}}},
        {"begin": CALL.replace("look", "see"), "content": digits},
    ]
    format: dict[str, Any] = {"type": kind, "tags": tags}
    if kind == "triggered_tags":
        format["triggers"] = ["<|channel|>commentary to="]
    free = partial(engine.takes, "structural_tag", {"format": format})
    needed = {"format": {**format, "at_least_one": True}}
    required = partial(engine.takes, "structural_tag", needed)
    for takes in (free, required):
        assert takes(CALLED) and takes(THINKS + CALLED.replace("look", "see")[:-8] + "((1))")
        assert not takes(CALLED.replace("look", "see")) and not takes(CALL + "1")
    assert free(f"{THINKS}{SAYS}{CALLED}") and free(f"{THINKS}{FINAL}Any <b> text")
    assert not required(SAYS + CALLED) and not required(f"{FINAL}5")


def test_errors_are_those_of_the_form(engine: Engine) -> None:
    odd = {"properties": {"a": {"uniqueItems": True}}}
    with pytest.raises(InvalidRequest, match=r"^json_schema: uniqueItems is not .*#/properties/a"):
        engine.takes("json_schema", odd, "")
    for tag in (TAG, {**TAG, "at_least_one": True}):
        tag = {**tag, "structures": [{"begin": CALL, "schema": odd}]}
        with pytest.raises(InvalidRequest, match="uniqueItems is not supported, at #/structures/0"):
            engine.takes("structural_tag", tag, "")


def test_a_form_with_and_without_channels_are_two(engine: Engine) -> None:
    matcher = compiled(engine.grammars, "regex", "[0-9]{2}")
    assert not engine.grammars.advance(Batch([matcher]), engine._ids("1"))
    assert engine.takes("regex", "[0-9]{2}", f"{FINAL}12")


def test_marks_that_are_no_tokens_are_refused() -> None:
    grammars = Grammars(lambda: load_definition(FOLDER), vocab_size=2048, eos_token_ids=(0,))
    with pytest.raises(Unsupported, match=r"regex: .* needs <\|start\|> to be a token"):
        compiled(grammars, "regex", "a", channels=True)
    grammars.close()
