"""The entries of the wire's table: one value that a request may give or an answer may hold.

Knows how Triton carries each kind of value. Must not know any name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, Final


class Kind(Enum):
    """The kind of a value; ``DATA_TYPES`` and ``DIMS`` say how Triton carries it."""

    TEXT = auto()
    TEXTS = auto()
    FLAG = auto()
    INTEGER = auto()
    INTEGERS = auto()
    COUNT = auto()
    SEED = auto()
    TIME_NS = auto()
    NUMBER = auto()
    NUMBERS = auto()
    NUMBER_ROWS = auto()
    """[samples, n]; shorter rows are padded with zeros."""
    BIASES = auto()
    """A JSON object {token id: bias}, as a string."""
    JSON = auto()
    """A JSON object, as a string or, in JSON, as itself."""
    BYTES = auto()


DATA_TYPES: Final[Mapping[Kind, str]] = MappingProxyType(
    {
        Kind.BYTES: "TYPE_UINT8",
        Kind.TEXT: "TYPE_STRING",
        Kind.TEXTS: "TYPE_STRING",
        Kind.FLAG: "TYPE_BOOL",
        Kind.INTEGER: "TYPE_INT32",
        Kind.INTEGERS: "TYPE_INT32",
        Kind.COUNT: "TYPE_UINT32",
        Kind.SEED: "TYPE_UINT64",
        Kind.TIME_NS: "TYPE_INT64",
        Kind.NUMBER: "TYPE_FP32",
        Kind.NUMBERS: "TYPE_FP32",
        Kind.NUMBER_ROWS: "TYPE_FP32",
        Kind.BIASES: "TYPE_STRING",
        Kind.JSON: "TYPE_STRING",
    }
)
DIMS: Final[Mapping[Kind, tuple[int, ...]]] = MappingProxyType(
    {
        Kind.BYTES: (-1,),
        Kind.TEXTS: (-1,),
        Kind.INTEGERS: (-1,),
        Kind.NUMBERS: (-1,),
        Kind.NUMBER_ROWS: (-1, -1),
    }
)
"""-1 stands for any number; kinds that are not listed have one element, (1,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor as a model without a batch dimension declares it; ``each`` as for ``Output``."""

    name: str
    kind: Kind
    each: bool = False

    @property
    def data_type(self) -> str:
        return DATA_TYPES[self.kind]

    @property
    def dims(self) -> tuple[int, ...]:
        return DIMS.get(self.kind, (-1,) if self.each else (1,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One value that a request may give.

    ``synonyms`` are declared as tensors too; ``single_synonyms``, of a list of integers, as tensors
    of one element. ``parameter_synonyms`` work only as request parameters and in
    ``sampling_parameters``. ``above`` is an exclusive lower bound. A ``top_level`` input is not
    allowed in ``sampling_parameters``. A ``text_only`` input needs the text models, so
    ``llm_engine`` refuses it when it is called directly.
    """

    name: str
    kind: Kind
    meaning: str
    synonyms: tuple[str, ...] = ()
    single_synonyms: tuple[str, ...] = ()
    parameter_synonyms: tuple[str, ...] = ()
    default: Any = None
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    top_level: bool = False
    text_only: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that carry it, its own name first."""
        names = (self.name, *self.synonyms)
        return (
            *(Tensor(name=name, kind=self.kind) for name in names),
            *(Tensor(name=name, kind=Kind.INTEGER) for name in self.single_synonyms),
        )

    @property
    def all_names(self) -> tuple[str, ...]:
        """Its own name and all synonyms."""
        return (self.name, *self.synonyms, *self.single_synonyms, *self.parameter_synonyms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One value that an answer may hold, and the inputs that ask for it. With ``each`` there is one
    for every sample, in their order."""

    name: str
    kind: Kind
    meaning: str
    asked_by: tuple[str, ...] = ()
    text_only: bool = False
    each: bool = False

    @property
    def tensor(self) -> Tensor:
        """The tensor that carries it."""
        return Tensor(name=self.name, kind=self.kind, each=self.each)
