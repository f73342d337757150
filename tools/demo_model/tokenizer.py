"""The byte-level BPE tokenizer: training it and writing its files.

Characters beyond the Latin alphabet are kept rare in the text the tokenizer is trained on, so that
most of them stay spread over several tokens, which a server's streaming must cope with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_model.chat import CHAT_TEMPLATE, END_OF_TEXT, IM_END, SPECIAL_TOKENS
from tools.demo_model.corpus import CorpusMaker

VOCABULARY: Final = 2048
_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FIRST_RARE: Final = 0x0370
"""Letters from Greek on, and every symbol, are rare in the tokenizer's training text."""


def _thinned(texts: Iterable[str]) -> Iterator[str]:
    """The texts, with rare characters kept only in every twelfth."""
    for i, text in enumerate(texts):
        if i % 12 == 0:
            yield text
        else:
            yield "".join(c for c in text if ord(c) < _FIRST_RARE or c.isspace())


def train_tokenizer(seed: int, documents: int = 40_000) -> Tokenizer:
    """A byte-level BPE tokenizer trained on the corpus with this seed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (doc.text() for doc in islice(CorpusMaker(seed).documents(), documents))
    tokenizer.train_from_iterator(_thinned(texts), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json, including the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "chat_template": CHAT_TEMPLATE,
    }
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
