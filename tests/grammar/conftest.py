"""What tests of grammars share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minisgl_backend.grammar.matchers import Grammars
from minisgl_backend.text.tokenizer_files import load_definition
from tests.grammar.matching import EOS, FOLDER, NUM_EMBEDDINGS


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(
        lambda: load_definition(FOLDER), vocab_size=NUM_EMBEDDINGS, eos_token_ids=(EOS,)
    )
    yield made
    made.close()
