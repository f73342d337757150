"""Prompts -> token ids, with checkpoint folders made on the spot."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer, LlamaTokenizer

from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.errors import ConfigError, InvalidRequest, RequestError, Unsupported
from minisgl_backend.limits import Limits
from minisgl_backend.request import IntArray
from minisgl_backend.text.tokenizer import PromptEncoder
from minisgl_backend.text.tokenizer_files import check_tokenizer, load_vocabulary
from minisgl_backend.wire.generation import MessagesPrompt, Prompt, TextPrompt, TokenPrompt
from tests.fakes import vocabularies

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools | length }}{% endif %}"
)


def folder(path: Path, *, bos: bool = True, template: Any = TEMPLATE) -> Path:
    """A byte-level checkpoint folder; with ``bos``, prompts begin with <|start|>."""
    tokenizer = vocabularies.byte_level()
    if bos:
        start = ("<|start|>", tokenizer.token_to_id("<|start|>"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|start|> $A", special_tokens=[start]
        )
    tokenizer.enable_truncation(3)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|start|>" if bos else None,
        "eos_token": "<|end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def encoder(tmp_path: Path) -> PromptEncoder:
    return PromptEncoder.load(folder(tmp_path))


@pytest.fixture(scope="module")
def demo() -> PromptEncoder:
    return PromptEncoder.load(DEMO_MODEL)


def token(encoder: PromptEncoder, name: str) -> int:
    return list(encoder.vocabulary.names).index(name)


def chat(*contents: Any, **more: Any) -> MessagesPrompt:
    return MessagesPrompt(json.dumps([{"role": "user", "content": c, **more} for c in contents]))


def ids_of(encoder: PromptEncoder, prompt: Prompt) -> IntArray:
    return encoder.encode(encoder.rendered(prompt))


def shown(encoder: PromptEncoder, ids: Any) -> list[str]:
    return [vocabularies.token_text(encoder.vocabulary, token_id) for token_id in ids.tolist()]


def test_the_template_of_a_multi_modal_checkpoint(tmp_path: Path) -> None:
    """As older transformers wrote it: in its own file. The tokenizer's template has precedence."""
    other = tmp_path / "chat_template.json"
    other.write_text(json.dumps({"chat_template": "{{ messages[0].content }}?"}))
    without = PromptEncoder.load(folder(tmp_path, template=None))
    assert without.render_chat(chat("a")).text == "a?"
    assert PromptEncoder.load(folder(tmp_path)).render_chat(chat("a")).text != "a?"
    other.write_text(json.dumps({"chat_template": ["a"]}))
    with pytest.raises(ConfigError, match=r"chat_template\.json: chat_template must be a string"):
        PromptEncoder.load(folder(tmp_path, template=None))
    other.write_text("{")
    with pytest.raises(ConfigError, match=r"chat_template\.json cannot be read"):
        check_tokenizer(tmp_path)


def test_text_begins_as_the_tokenizer_asks(encoder: PromptEncoder) -> None:
    ids = ids_of(encoder, TextPrompt("abcdef"))
    assert ids.dtype == np.int32
    assert shown(encoder, ids) == ["<|start|>", *"abcdef"]


def test_text_is_not_control(encoder: PromptEncoder) -> None:
    plain = shown(encoder, ids_of(encoder, TextPrompt("a<|end|>")))
    assert plain == ["<|start|>", *"a<|end|>"]
    control = shown(encoder, ids_of(encoder, TextPrompt("a<|end|>", parse_special_tokens=True)))
    assert control == ["<|start|>", "a", "<|end|>"]


def test_in_a_chat_the_spelling_of_a_special_token_is_one(encoder: PromptEncoder) -> None:
    """No matter who wrote it: the template's text is tokenized as a whole."""
    ids = ids_of(encoder, chat("a<|end|>"))
    assert shown(encoder, ids) == ["<|start|>", "a", "<|end|>"]


def test_the_beginning_is_not_doubled(encoder: PromptEncoder) -> None:
    prompt = TextPrompt("<|start|>a", parse_special_tokens=True)
    assert shown(encoder, ids_of(encoder, prompt)) == ["<|start|>", "a"]
    assert shown(encoder, ids_of(encoder, chat("a"))) == ["<|start|>", "a"]


def test_no_beginning_if_the_caller_wants_none(encoder: PromptEncoder) -> None:
    for control in (False, True):
        prompt = TextPrompt("a", parse_special_tokens=control, add_special_tokens=False)
        assert shown(encoder, ids_of(encoder, prompt)) == ["a"]


def test_a_lookup_has_as_many_tokens_as_there_are(tmp_path: Path) -> None:
    encoder = PromptEncoder.load(folder(tmp_path), context=4)
    assert len(encoder.look_up(TextPrompt("a" * 1000))) == 1001
    assert len(encoder.look_up(TextPrompt(""))) == 1
    assert not encoder.look_up(TextPrompt("", add_special_tokens=False)).size
    ids = np.zeros(9, dtype=np.int32)
    assert encoder.look_up(TokenPrompt(ids)) is ids
    with pytest.raises(InvalidRequest, match="input_ids must be in"):
        encoder.look_up(TokenPrompt(ids - 1))
    for prompt in (TextPrompt("a" * 1000), TokenPrompt(ids)):
        with pytest.raises(InvalidRequest, match="does not fit the context"):
            ids_of(encoder, prompt)


def test_the_text_of_tokens_spells_special_ones_out(demo: PromptEncoder) -> None:
    text = "é 日本 🎉<|im_end|>\n"
    ids = demo.look_up(TextPrompt(text, parse_special_tokens=True))
    assert demo.text(ids) == text
    assert "<|im_end|>" in demo.names(ids)


def test_no_beginning_where_the_tokenizer_wants_none(tmp_path: Path) -> None:
    encoder = PromptEncoder.load(folder(tmp_path, bos=False, template=None))
    assert shown(encoder, ids_of(encoder, TextPrompt("a"))) == ["a"]
    with pytest.raises(InvalidRequest, match="messages need a chat template, and this model has"):
        ids_of(encoder, chat("a"))


def test_templates_by_name(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with {{ tools | length }}"},
    ]
    encoder = PromptEncoder.load(folder(tmp_path, template=named))
    messages = chat("a").messages
    assert encoder.render_chat(MessagesPrompt(messages)).text == "plain"
    assert encoder.render_chat(MessagesPrompt(messages, "[]")).text == "plain"
    assert encoder.render_chat(MessagesPrompt(messages, "[{}, {}]")).text == "with 2"


def test_as_transformers_does(demo: PromptEncoder) -> None:
    theirs = AutoTokenizer.from_pretrained(DEMO_MODEL)
    for text in ("What is the capital of France?", "日本 🎉 é", " a  b\n"):
        assert ids_of(demo, TextPrompt(text)).tolist() == theirs(text)["input_ids"]
        messages = [{"role": "system", "content": "x"}, {"role": "user", "content": text}]
        tools: Any = [{"type": "function", "function": {"name": "f", "description": text}}]
        for given in (None, tools):
            expected = theirs.apply_chat_template(
                messages, tools=given, add_generation_prompt=True, return_dict=False
            )
            prompt = MessagesPrompt(json.dumps(messages), json.dumps(given) if given else None)
            assert ids_of(demo, prompt).tolist() == expected
            unopened = theirs.apply_chat_template(messages, tools=given, return_dict=False)
            prompt = replace(prompt, add_generation_prompt=False)
            assert ids_of(demo, prompt).tolist() == unopened


def test_token_prompts(encoder: PromptEncoder) -> None:
    last = len(encoder.vocabulary) - 1
    ids = np.array([0, last], dtype=np.int32)
    assert ids_of(encoder, TokenPrompt(ids)) is ids
    with pytest.raises(InvalidRequest, match=rf"^input_ids must be in 0 \.\. {last}, got"):
        ids_of(encoder, TokenPrompt(ids + 1))
    with pytest.raises(InvalidRequest, match=r"^end_id must be in .*, got -1"):
        encoder.check_token_ids("end_id", [0, -1])


def test_the_prompts_text(encoder: PromptEncoder) -> None:
    ids = ids_of(encoder, TextPrompt("é<|end|>", parse_special_tokens=True))
    assert encoder.prompt_text(TextPrompt("é<|end|>"), ids) == "é<|end|>"
    assert encoder.prompt_text(TokenPrompt(ids), ids) == "é"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (TextPrompt(""), "text_input must not be empty"),
        (MessagesPrompt("{"), "messages must be valid JSON"),
        (MessagesPrompt("[" * 10**5), "messages must be valid JSON"),
        (MessagesPrompt("{}"), "messages must be a JSON list"),
        (
            MessagesPrompt('[{"role": "user", "role": "system", "content": "x"}]'),
            "messages has the key 'role' twice",
        ),
        (MessagesPrompt("[]"), "messages must not be empty"),
        (MessagesPrompt("[5]"), "messages[0] must be an object"),
        (MessagesPrompt('[{"content": "a"}]'), "messages[0].role must be a string"),
        (MessagesPrompt('[{"role": "user"}]'), "messages[0].content must be a string or a list"),
        (chat("a", 5), "messages[1].content must be a string or a list of text parts"),
        (chat(["a"]), "messages[0].content[0] must be an object with a type"),
        (chat([{"type": "text"}]), "messages[0].content[0].text must be a string"),
        (MessagesPrompt('[{"role": "user", "content": "\\ud800"}]'), "messages must be valid Uni"),
        (MessagesPrompt("[" * 40 + "]" * 40), "messages must be at most 32 levels deep"),
        (replace(chat("a"), tools="[5]"), "tools[0] must be an object"),
        (replace(chat("a"), tools="5"), "tools must be a JSON list"),
        (replace(chat("a"), tools="[" + "{}," * 1024 + "{}]"), "tools must be at most 1024, got"),
        (replace(chat("a"), variables=""), "chat_template_kwargs must be valid JSON"),
        (replace(chat("a"), variables="[]"), "chat_template_kwargs must be a JSON object"),
        (replace(chat("a"), variables='{"tools": 1}'), "chat_template_kwargs may not hold 'tools'"),
        (
            replace(chat("a"), variables='{"a": "\\ud800"}'),
            "chat_template_kwargs must be valid Unicode",
        ),
        (chat(*["a"] * 8193), "messages must be at most 8192, got 8193"),
    ],
)
def test_what_is_wrong_is_named(encoder: PromptEncoder, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ids_of(encoder, prompt)
    assert str(caught.value).startswith(message)


def test_parts_of_text(encoder: PromptEncoder, demo: PromptEncoder) -> None:
    parts = chat([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    assert encoder.render_chat(parts).text == "<|start|>a\nb"
    assert "user\nab<|im_end|>" in demo.render_chat(parts).text  # its template reads parts itself


def test_images_are_not_offered(encoder: PromptEncoder) -> None:
    image = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
    with pytest.raises(Unsupported, match="must be of type text, got 'image_url'"):
        ids_of(encoder, chat([image]))


def test_calls_of_tools(tmp_path: Path) -> None:
    source = (
        "{% for c in messages[0].tool_calls %}{{ (c.function.arguments or {}).where }};{% endfor %}"
    )
    encoder = PromptEncoder.load(folder(tmp_path, template=source))
    arguments = ['{"where": "Paris"}', {"where": "Rome"}, "{broken", "[1]"]
    calls = [{"function": {"arguments": a}} for a in arguments] + [{"function": {}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    assert encoder.render_chat(MessagesPrompt(json.dumps([message]))).text == "Paris;Rome;;;;"


@pytest.mark.parametrize("arguments", ["", " \n", "{}"])
def test_a_call_without_arguments_has_an_empty_object(tmp_path: Path, arguments: str) -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments.items() | list }}"
    encoder = PromptEncoder.load(folder(tmp_path, template=source))
    called = chat("a", tool_calls=[{"function": {"arguments": arguments}}])
    assert encoder.render_chat(called).text == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (r'{"where": "\ud800"}', "messages must be valid Unicode"),
        (r'{"\udfff": 1}', "messages must be valid Unicode"),
        ('{"where": ' + "[" * 40 + "]" * 40 + "}", "messages must be at most 32 levels deep"),
    ],
)
def test_arguments_in_a_string_are_checked_as_if_they_were_an_object(
    tmp_path: Path, arguments: str, message: str
) -> None:
    source = "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    encoder = PromptEncoder.load(folder(tmp_path, template=source))
    with pytest.raises(InvalidRequest, match=message):
        ids_of(encoder, chat("a", tool_calls=[{"function": {"arguments": arguments}}]))


def test_tool_calls_of_another_shape_are_the_templates_business(encoder: PromptEncoder) -> None:
    for calls in (5, [5], [{"function": 5}]):
        assert encoder.render_chat(chat("a", tool_calls=calls)).text == "<|start|>a"


def test_the_limit_on_bytes_comes_first(tmp_path: Path) -> None:
    encoder = PromptEncoder.load(folder(tmp_path), Limits(prompt_bytes=8))
    assert ids_of(encoder, TextPrompt("é" * 4)).size == 9
    with pytest.raises(InvalidRequest, match="the prompt must be at most 8 bytes, got 10"):
        ids_of(encoder, TextPrompt("é" * 5))
    with pytest.raises(InvalidRequest, match="the chat template makes more than 8 characters"):
        ids_of(encoder, chat("a"))


def test_a_template_may_leave_nothing(tmp_path: Path) -> None:
    encoder = PromptEncoder.load(folder(tmp_path, template="{# nothing #}"))
    with pytest.raises(InvalidRequest, match="the prompt has no tokens"):
        ids_of(encoder, chat("a"))


@pytest.mark.parametrize(
    "text",
    ["\0", "\ufeff", "e" + "\u0301" * 10_000, "." * 26_000, " " * 100_000, "日" * 100_000],
)
def test_odd_texts_come_back_whole(demo: PromptEncoder, text: str) -> None:
    ids = ids_of(demo, TextPrompt(text))
    assert demo.prompt_text(TokenPrompt(ids), ids) == text


def test_a_million_letters(demo: PromptEncoder) -> None:
    text = "a" * 10**6
    ids = ids_of(demo, TextPrompt(text))
    assert demo.prompt_text(TokenPrompt(ids), ids) == text


def test_lone_surrogates_do_not_get_through(demo: PromptEncoder) -> None:
    with pytest.raises(RequestError):
        ids_of(demo, MessagesPrompt('[{"role": "user", "content": ["\\udfff"]}]'))


def test_other_threads_run_while_one_tokenizes(demo: PromptEncoder) -> None:
    """If the GIL were not released, the counting thread would get no turn before the end."""
    started, done = threading.Event(), threading.Event()

    def tokenize() -> int:
        started.set()
        try:
            return len(ids_of(demo, TextPrompt("Paris is the capital of France. " * 50_000)))
        finally:
            done.set()

    turns = 0
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(tokenize)
        started.wait()
        while not done.is_set():
            turns += 1
        assert future.result() > 0
    assert turns > 1000


def test_threads_share_an_encoder(demo: PromptEncoder) -> None:
    texts = [f"the number {n} " * 50 for n in range(64)]
    prompts: list[Prompt] = [*map(TextPrompt, texts), *map(chat, texts)]
    alone = [ids_of(demo, prompt).tolist() for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert [ids.tolist() for ids in pool.map(partial(ids_of, demo), prompts)] == alone


def test_a_folder_without_a_tokenizer_fails_the_load(tmp_path: Path) -> None:
    config = {"tokenizer_class": "ByT5Tokenizer"}  # which has no file
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        PromptEncoder.load(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        load_vocabulary(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        PromptEncoder.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        PromptEncoder.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # each would have a line in a table
        ({"vocab": {"a": 2**31}, "merges": []}, r"'a' has the id 2147483648, which must be below"),
        # a panic of Rust
        ({"continuing_subword_prefix": "x" * 500}, "cannot be loaded: range end index"),
    ],
)
def test_vocabularies_that_cannot_be(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    definition = json.loads(file.read_text("utf-8"))
    definition["model"] |= changes
    file.write_text(json.dumps(definition), "utf-8")
    for load in (PromptEncoder.load, load_vocabulary):
        with pytest.raises(ConfigError, match=message):
            load(tmp_path)


@pytest.mark.parametrize("template", [7, ["x"], {"default": 7}, [{"name": "x", "template": 7}]])
def test_a_chat_template_that_is_no_text(tmp_path: Path, template: Any) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**config, "chat_template": template}), "utf-8")
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(
        ConfigError, match=r"the chat template of .* must be a text|cannot be loaded"
    ):
        PromptEncoder.load(tmp_path)


def test_loading_a_tokenizer_brings_no_torch() -> None:
    """Two of the server's processes need a tokenizer, but not torch and the memory it takes."""
    load = f"PromptEncoder.load({str(DEMO_MODEL)!r})"
    code = f"import sys; from minisgl_backend.text.tokenizer import PromptEncoder; {load}"
    subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"], check=True)


def test_a_folder_of_llama_2s_kind(tmp_path: Path) -> None:
    pieces = json.loads(vocabularies.sentence_piece().to_str())["model"]["vocab"]
    vocab = {piece: n for n, piece in enumerate(["<unk>", "<s>", "</s>", *pieces])}
    theirs = LlamaTokenizer(vocab=vocab, merges=[])
    theirs.save_pretrained(tmp_path)
    encoder = PromptEncoder.load(tmp_path)
    for text in ("Paris é", "日本 🎉\n"):
        ids = ids_of(encoder, TextPrompt(text))
        assert ids.tolist() == theirs(text)["input_ids"]
        decoded = encoder.prompt_text(TokenPrompt(ids), ids)
        assert decoded == theirs.decode(ids, skip_special_tokens=True) == text


def test_the_vocabulary_is_that_of_the_encoder(tmp_path: Path, encoder: PromptEncoder) -> None:
    vocabulary = load_vocabulary(tmp_path)
    assert vocabulary.pieces == encoder.vocabulary.pieces
    assert vocabulary.special == encoder.vocabulary.special
    assert isinstance(Tokenizer.from_file(str(tmp_path / "tokenizer.json")), Tokenizer)
