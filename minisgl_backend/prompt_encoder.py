"""The tokenizer and the chat template that the options name.

Must not know requests, or the engine, which checks the context once more.
"""

from __future__ import annotations

from pathlib import Path

from minisgl_backend.config import EngineOptions
from minisgl_backend.limits import Limits
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.models.hub import resolve_model, resolve_tokenizer
from minisgl_backend.text.tokenizer import PromptEncoder


def tokenizer_folder(options: EngineOptions) -> Path:
    """The folder with the tokenizer's files, fetched from its hub if it is an id."""
    return resolve_tokenizer(options.tokenizer or options.model, options.model_source)


def load_encoder(options: EngineOptions, limits: Limits) -> PromptEncoder:
    """Raises ``ConfigError`` if the files cannot be read, or do not fit the model."""
    spec = load_spec(resolve_model(options.model, options.model_source))
    context = options.max_sequence_length or spec.context
    encoder = PromptEncoder.load(tokenizer_folder(options), limits, context=context)
    encoder.vocabulary.check_fits(spec.vocab_size)
    return encoder
