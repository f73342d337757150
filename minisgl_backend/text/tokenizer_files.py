"""The tokenizer in a checkpoint's folder: tokenizer.json and the files that belong to it.

Knows the names of the files and the library that reads them. Must not know prompts, or how a
template is rendered. Everything here raises ``ConfigError`` for files that cannot be used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.config_json import read_json
from minisgl_backend.request import TokenId
from minisgl_backend.text.vocabulary import Vocabulary

_MOST_TOLD: Final = 300
"""Characters of a library's error that are shown."""
_NO_CHARACTER: Final = "\ufdd0"
_PROCESSOR_TEMPLATE: Final = "chat_template.json"
"""Where multi-modal checkpoints written by older transformers have their template."""


def check_tokenizer(folder: str | Path) -> None:
    """Raise ``ConfigError`` if there is no tokenizer.json, or one that is not JSON.

    Cheap, so `minisgl serve` calls it before starting the server.
    """
    place = Path(folder)
    if not (place / "tokenizer.json").is_file():
        raise ConfigError(
            f"{folder} holds no tokenizer.json, and no other tokenizer is read; save_pretrained of "
            "transformers writes one, and the option tokenizer names a folder or model that has one"
        )
    for name in ("tokenizer.json", "tokenizer_config.json", _PROCESSOR_TEMPLATE):
        if (place / name).exists():
            read_json(place / name)


def load_vocabulary(folder: str | Path) -> Vocabulary:
    """The vocabulary of the tokenizer in a folder; raises ``ConfigError``."""
    with understood(folder):
        return Vocabulary.of(load_tokenizer(folder).backend_tokenizer)


def load_definition(
    folder: str | Path, *, num_embeddings: int | None = None
) -> tuple[str, dict[str, TokenId]]:
    """tokenizer.json as llguidance needs it, and the ids of the tokens without text, by their
    names; raises ``ConfigError``. Tokens for which the model has none of its ``num_embeddings`` are
    left out (``Vocabulary.check_fits``).

    These are the special tokens, and other added tokens with names in angle brackets, which
    llguidance treats as special too. In the definition they get names that no text contains.
    Otherwise a text spelled like such a token could only be generated as that token, which is not
    allowed in texts.
    """
    with understood(folder):
        tokenizer = load_tokenizer(folder).backend_tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        definition = json.loads(tokenizer.to_str())
    if num_embeddings is not None:
        _leave_out(definition, num_embeddings)
    ids: dict[str, TokenId] = {}
    names: dict[str, str] = {}
    for token in definition["added_tokens"]:
        name = token["content"]
        if token["special"] or (name.startswith("<") and name.endswith(">")):
            ids[name] = token["id"]
            names[name] = f"<{_NO_CHARACTER}{token['id']}>"
            token |= {"content": names[name], "special": True}
    model = definition["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(name, name): number for name, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(name, name), score] for name, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    definition["post_processor"] = None  # it refers to tokens by name, and is only for prompts
    return json.dumps(definition, ensure_ascii=False), ids


def _leave_out(definition: dict[str, Any], begin: TokenId) -> None:
    """Remove the tokens from the id ``begin`` on."""
    added, model = definition["added_tokens"], definition["model"]
    definition["added_tokens"] = [token for token in added if token["id"] < begin]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {name: number for name, number in vocabulary.items() if number < begin}
    else:
        model["vocab"] = vocabulary[:begin]


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a folder, by transformers. To be called within ``understood``.

    Not by ``AutoTokenizer``, which imports torch into processes that do not need it, and some of
    whose classes rebuild the tokenizer instead of taking the file as it is.
    """
    from transformers import PreTrainedTokenizerFast

    check_tokenizer(folder)
    return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)


def template_sources(tokenizer: Any, folder: Path) -> dict[str, str]:
    """The programs of the chat templates by name, ``default`` for one without a name; there may be
    none. ``tokenizer`` is that of the folder (``load_tokenizer``)."""
    sources = tokenizer.chat_template or _template_of_processor(folder) or {}
    if isinstance(sources, str):
        return {"default": sources}
    if isinstance(sources, dict) and all(isinstance(source, str) for source in sources.values()):
        return sources
    raise ConfigError(f"the chat template of {folder} must be a text, or texts by name")


@contextmanager
def understood(folder: str | Path) -> Iterator[None]:
    """Turn the errors of a tokenizer's libraries into a ``ConfigError``. For files that they do not
    understand they raise errors of all kinds, and panics of Rust, which are no ``Exception``."""
    try:
        yield
    except (ConfigError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        told = " ".join(str(error).split())
        told = told if len(told) <= _MOST_TOLD else f"{told[:_MOST_TOLD]}..."
        raise ConfigError(f"the tokenizer of {folder} cannot be loaded: {told}") from error


def _template_of_processor(folder: Path) -> str | None:
    path = folder / _PROCESSOR_TEMPLATE
    if not path.is_file():
        return None
    template = read_json(path).get("chat_template")
    if not isinstance(template, str):
        raise ConfigError(f"{path}: chat_template must be a string")
    return template
