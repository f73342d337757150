"""Writes docs/reference.md from the tables in the code, so that the two cannot differ.

`make docs` runs it; a test compares the file with what it would write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from minisgl_backend.config import DEMO_MODEL, option_type, options_by_subject
from minisgl_backend.wire.entries import Input, Tensor
from minisgl_backend.wire.parameters import INPUTS, NEUTRAL, OUTPUTS

PATH: Final = Path(__file__).parent.parent / "docs" / "reference.md"

_INTRODUCTION: Final = """\
# Reference
Written by `make docs` from the tables in the code.

## Inputs of the ensembles `minisgl` and `minisgl_batched`
Exactly one of `text_input`, `messages`, `input_ids` and `stop_request`; all else is optional. A
value may come as a tensor, as a request parameter of the same name, or, if its row is below that of
`sampling_parameters`, inside that object; given twice, the values must be equal. `minisgl` takes
shape [1] (or [n] for lists), `minisgl_batched` the same behind a batch dimension of 1. `llm_engine`
alone takes the names that are about tokens.

JSON goes as a string. A value of another type (an object for a string, a string for a number) is
refused by Triton itself over HTTP, with status 500 and `Unable to parse`. Triton's own parameter
`priority` has no effect here; `priority_level` has.
"""

_REFUSED: Final = """\
These names are known and not offered. Each is accepted with the values that change nothing, so that
clients may send whole schemas with their defaults, and refused by name with any other. A name that
is not known at all is refused, with the most similar known one if there is one. Lists, objects and
null go inside `sampling_parameters`: over HTTP Triton itself refuses them as parameters, with
`invalid type`.
"""

_TOKENIZER: Final = """\
## The tokenizer alone
The model `tokenizer` takes the same inputs and answers with `input_ids`, INT32[-1], and a record
for `llm_engine`. A client that asks it alone, and names no outputs or some of these, also gets
`token_strs`, STRING[-1], the tokens as the vocabulary spells them; `text`, STRING[1], what they
stand for, special tokens spelled out; `max_sequence_length`, INT32[1], the most tokens of a prompt
and its answer; and `chat_format`, STRING[1], what the chat template shows of the answer to a chat,
as JSON (null for other prompts): `tool_dialect`, how calls of tools are written (`hermes`,
`qwen_xml`, `glm`, `minimax`, `seed`, `gemma4`, `llama3_json`, `mistral`, `nemotron`, `lfm2`,
`command`, `harmony`, or null), and `tool_marks`, which of the dialect's marks the template writes;
`thinking`, the marks around a section of thoughts, or null, and `begins_thinking`, whether the
prompt has begun one; and `variables`, the names that the template reads. Then the text may be
longer than the context, and full queues turn nothing away.
"""

_OUTPUTS: Final = """\
## Outputs
Absent unless asked for by a flag that is true, `text_output` apart. Names, types and values are
those of the backend that has them: the flags of vllm_backend bring its outputs, `return_log_probs`
those of the TensorRT-LLM backend. `minisgl_batched` gives each output a batch dimension of 1 more.

An output of -1 elements has one for each of the `n` samples, in order; the others are about the
prompt or the request. In a stream every response has all places: a sample of which it says nothing
new has an empty text, no tokens, and the `finish_reason` that it had. `llm_engine` alone gives the
`output_ids` of one sample after the other, and with `n` above 1 always `num_output_tokens`, which
says how many are whose. A sample's deadline, stop strings and grammar are its own; an error of one
is the answer to the request, and a cancel ends all.
"""

_ERRORS: Final = """\
## Errors
One short sentence that starts with its code; of an ensemble Triton writes
`in ensemble 'minisgl', ` before it. HTTP answers 400 whatever the code; gRPC clients that send the
header `triton_grpc_error: true` get the code as the status.

| code | meaning |
| --- | --- |
| `INVALID_ARG` | the request is wrong |
| `UNSUPPORTED` | the request is right, but asks for what is not offered |
| `UNAVAILABLE` | the queue is full, the server drains, or the engine is down |
| `CANCELLED` | the request was cancelled |
| `INTERNAL` | the server's fault; its log has the details under the request id |

A deadline ends a request with finish_reason `timeout` if it has a token, else with
`UNAVAILABLE`.
"""

_OPTIONS: Final = """\
## Options
`minisgl serve --name-with-dashes VALUE`, or `parameters` of the same names in `config.pbtxt` of
`llm_engine`. On a command line, `--name` alone stands for `--name true`. An unknown name fails the
load; the error names a similar known one if there is one. `minisgl serve --help` has those of the
server, too: addresses, ports, `--allow-remote`, `--tritonserver`, `--log-verbose`.
"""


def render() -> str:
    """The whole document."""
    return "\n".join(
        [
            _INTRODUCTION,
            *_table(("name", "type", "default", "meaning"), map(_input_row, INPUTS)),
            "",
            _REFUSED,
            *_table(("name", "accepted"), ((f"`{n}`", _words(v)) for n, v in NEUTRAL.items())),
            "",
            _OUTPUTS,
            *_table(
                ("name", "type", "asked for by", "meaning"),
                (
                    (
                        _names([output.tensor]),
                        _type(output.tensor),
                        ", ".join(f"`{name}`" for name in output.asked_by),
                        output.meaning,
                    )
                    for output in OUTPUTS
                ),
            ),
            "",
            _TOKENIZER,
            _ERRORS,
            _OPTIONS,
            *_options(),
        ]
    )


def _options() -> Iterator[str]:
    """A table for each subject."""
    for subject, options in options_by_subject().items():
        yield f"### {subject[0].upper()}{subject[1:]}"
        yield from _table(("option", "type", "default", "meaning"), map(_option_row, options))
        yield ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def _input_row(entry: Input) -> tuple[str, str, str, str]:
    names = _names(entry.tensors)
    if entry.parameter_synonyms:
        synonyms = ", ".join(f"`{name}`" for name in entry.parameter_synonyms)
        names += f" (as a parameter also {synonyms})"
    types = ", ".join(dict.fromkeys(map(_type, entry.tensors)))
    return names, types, _default(entry.default), entry.meaning


def _option_row(spec: Any) -> tuple[str, str, str, str]:
    default = "the demo model" if spec.default == DEMO_MODEL else _default(spec.default, "auto")
    meaning = spec.metadata["help"]
    if spec.metadata["choices"]:
        meaning += f" ({', '.join(spec.metadata['choices'])})"
    return f"`{spec.name}`", option_type(spec.name).__name__, default, meaning


def _names(tensors: Iterable[Tensor]) -> str:
    return ", ".join(f"`{tensor.name}`" for tensor in tensors)


def _type(tensor: Tensor) -> str:
    dims = ", ".join(map(str, tensor.dims))
    return f"{tensor.data_type.removeprefix('TYPE_')}[{dims}]"


def _default(value: Any, absent: str = "") -> str:
    if value is None or value in ((), ""):
        return absent
    return str(value).lower() if isinstance(value, bool) else str(value)


def _words(values: Iterable[Any]) -> str:
    shown = [str(value).lower() if isinstance(value, bool) else repr(value) for value in values]
    return ", ".join(f"`{value}`" for value in shown) or "nothing"


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
