"""`minisgl bench trace-table`: a GPU's time by kernel, from a trace of ``--profile``.

Knows the trace format that torch.profiler writes (Chrome's trace events) and the names of kernels;
needs neither torch nor a GPU, so that traces can be read anywhere.

Kernels may overlap: with programmatic dependent launch one starts early and waits for the one
before it. Overlapping time counts for the kernel that began first, so that the shares of all
kernels and the idle time add up to one, while ``total_ms`` and ``mean_us`` are whole durations.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from minisgl_kit.report import Report, json_option

KINDS: Final = {
    "communication": r"nccl|all_?reduce|all_?gather|multimem",
    "attention": r"attention|flash|fmha|kernel_mha|KVCacheKernel|MergeStates",
    "norms": r"norm|rope_|_rope|rotary",
    "gemm": r"gemm|gemv|nvjet|cublas|cutlass|linear|splitk|^_vector$|^_matrix$|experts",
    "sampling": r"_best_of_split|^_choose|sampling|softmax|argmax|topk|sort|gumbel",
}
"""Kinds of kernels by a pattern in their full names; the first match counts, else ``other``."""

_ON_THE_GPU: Final = frozenset({"kernel", "gpu_memset", "gpu_memcpy"})
"""Categories of events: what clears and copies memory counts as a kernel."""

_CUT_OFF: Final = (OSError, EOFError, zlib.error)
"""What a packed file raises that is not whole."""
_MOST_CHARACTERS: Final = 72
_MOST_NESTED: Final = 2


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch; microseconds."""

    name: str
    begin_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        return self.begin_us + self.duration_us


@dataclass(slots=True)
class Line:
    """Sums over the kernels of one name; ``own_us`` is without overlaps with earlier kernels."""

    kind: str
    count: int = 0
    total_us: float = 0.0
    own_us: float = 0.0


@dataclass(frozen=True, slots=True)
class TraceTable:
    """The kernels of a trace by short name, the costliest first, over ``wall_us``."""

    lines: Mapping[str, Line]
    wall_us: float

    @property
    def idle_us(self) -> float:
        """Time between the first and the last kernel in which none ran."""
        return self.wall_us - sum(line.own_us for line in self.lines.values())

    def shares(self) -> dict[str, float]:
        """The share of the wall time of each kind of kernel, and of ``idle``."""
        shares = dict.fromkeys([*KINDS, "other"], 0.0)
        for line in self.lines.values():
            shares[line.kind] += line.own_us / self.wall_us
        return {**shares, "idle": self.idle_us / self.wall_us}


def read_kernels(path: Path) -> list[Kernel]:
    """The kernels of a trace, in no particular order; ``.gz`` is unpacked.

    Raises ``click.ClickException`` if the file is not a trace.
    """
    content = path.read_bytes()
    try:
        text = gzip.decompress(content) if path.suffix == ".gz" else content
        return [
            Kernel(event["name"], float(event["ts"]), float(event["dur"]))
            for event in json.loads(text)["traceEvents"]
            if event.get("cat") in _ON_THE_GPU and event.get("ph") == "X"
        ]
    except (ValueError, LookupError, TypeError, AttributeError, *_CUT_OFF) as error:
        told = f"{type(error).__name__}: {error}"
        raise click.ClickException(f"{path} is no Chrome trace: {told}") from None


def tabulate(kernels: Iterable[Kernel]) -> TraceTable:
    """Add up the kernels by name. Raises ``click.ClickException`` if there are none, or if they
    take no time."""
    ordered = sorted(kernels, key=lambda kernel: kernel.begin_us)
    if not ordered:
        raise click.ClickException("the trace has no kernels: was it made on a GPU?")
    short = {name: short_name(name) for name in {kernel.name for kernel in ordered}}
    lines: dict[str, Line] = {}
    covered_us = ordered[0].begin_us
    for kernel in ordered:
        name = short[kernel.name]
        line = lines.setdefault(name, Line(kind_of(kernel.name)))
        line.count += 1
        line.total_us += kernel.duration_us
        line.own_us += max(0.0, kernel.end_us - max(kernel.begin_us, covered_us))
        covered_us = max(covered_us, kernel.end_us)
    if covered_us == ordered[0].begin_us:
        raise click.ClickException("the kernels of the trace take no time")
    costliest = sorted(lines.items(), key=lambda item: -item[1].own_us)
    return TraceTable(dict(costliest), covered_us - ordered[0].begin_us)


def middle_steps(kernels: Sequence[Kernel], first: str) -> tuple[list[Kernel], int]:
    """The kernels of the middle half of all steps, and how many steps these are.

    A step begins with each kernel named ``first``. What comes before and after, such as the prompts
    of requests that decode, is left out. Raises ``click.ClickException`` if there are too few
    steps.
    """
    begins_us = sorted(kernel.begin_us for kernel in kernels if kernel.name == first)
    begin, end = len(begins_us) // 4, 3 * len(begins_us) // 4
    if begin == end:
        raise click.ClickException(f"the trace has {len(begins_us)} kernels named {first}")
    begin_us, end_us = begins_us[begin], begins_us[end]
    inside = [kernel for kernel in kernels if begin_us <= kernel.begin_us < end_us]
    return inside, end - begin


def kind_of(name: str) -> str:
    """A kernel's kind, by its name."""
    for kind, pattern in KINDS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return "other"


def short_name(name: str) -> str:
    """The name of a C++ kernel without namespaces, values and arguments.

    Of template arguments the first type stays: a wrapper such as ``device_kernel<T>`` says nothing
    without it.
    """
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return _short(plain, _MOST_NESTED)[:_MOST_CHARACTERS]


def _short(name: str, depth: int) -> str:
    head, bracket, rest = name.partition("<")
    own = re.split(r"[(\s]", head.strip(), maxsplit=1)[0].rpartition("::")[2]
    if not bracket or not depth or "(" in head.strip():
        return own
    for argument in _template_arguments(rest):
        inner = _short(argument.strip(), depth - 1)
        if re.match(r"[A-Za-z_]", inner) and inner not in _PLAIN:
            return f"{own}<{inner}>"
    return own


_PLAIN: Final = frozenset(
    "bool char short int long unsigned float double __half __nv_bfloat16 half bfloat16_t half_t"
    " BFloat16 Half true false std".split()
)
"""Template arguments that say little."""


def _template_arguments(text: str) -> Iterator[str]:
    """The arguments in ``text``, which begins after the ``<``."""
    depth, begin = 0, 0
    for at, character in enumerate(text):
        if character in "<({":
            depth += 1
        elif character in ">)}":
            depth -= 1
        if depth < 0 or (character == "," and depth == 0):
            yield text[begin:at]
            begin = at + 1
        if depth < 0:
            return


def report_trace(path: Path, *, top: int, step: str | None = None) -> Report:
    """The table of a trace; ``info`` has the share of each kind of kernel and of idle time.

    ``step`` is the kernel that begins a step: then only the middle half of all steps counts.
    """
    kernels, num_steps = read_kernels(path), 0
    if step is not None:
        kernels, num_steps = middle_steps(kernels, step)
    table = tabulate(kernels)

    def of_step(value: float) -> float | str:
        return round(value / num_steps, 2) if num_steps else "-"

    shares = {f"{kind}_share": round(share, 4) for kind, share in table.shares().items()}
    report = Report(
        f"kernels of {path.name}",
        info={"wall_ms": round(table.wall_us / 1e3, 3), "steps": num_steps or "-", **shares},
    )
    for name, line in list(table.lines.items())[:top]:
        report.add(
            kernel=name,
            kind=line.kind,
            count=line.count,
            total_ms=round(line.total_us / 1e3, 3),
            mean_us=round(line.total_us / line.count, 2),
            count_a_step=of_step(line.count),
            us_a_step=of_step(line.own_us),
            share=f"{line.own_us / table.wall_us:.1%}",
        )
    report.add(
        kernel="(no kernel runs)",
        kind="idle",
        count="-",
        total_ms=round(table.idle_us / 1e3, 3),
        mean_us="-",
        count_a_step="-",
        us_a_step=of_step(table.idle_us),
        share=f"{table.idle_us / table.wall_us:.1%}",
    )
    return report


def report_order(path: Path, *, count: int, step: str) -> Report:
    """Up to ``count`` kernels of one of the middle steps, from its middle on, in the order in which
    they began: when each began and ended, counted from the start of the first, and how much later
    it ended than all before it."""
    inside, num_steps = middle_steps(read_kernels(path), step)
    begins_us = sorted(kernel.begin_us for kernel in inside if kernel.name == step)
    begin_us = begins_us[num_steps // 2]
    end_us = min((later for later in begins_us if later > begin_us), default=math.inf)
    kernels = [kernel for kernel in inside if begin_us <= kernel.begin_us < end_us]
    kernels.sort(key=lambda kernel: kernel.begin_us)
    first = len(kernels) // 2
    origin_us = kernels[first].begin_us
    covered_us = max((kernel.end_us for kernel in kernels[:first]), default=origin_us)
    report = Report(f"kernels of {path.name}, in order", info={"kernels_a_step": len(kernels)})
    for kernel in kernels[first : first + count]:
        report.add(
            kernel=short_name(kernel.name),
            begin_us=round(kernel.begin_us - origin_us, 2),
            end_us=round(kernel.end_us - origin_us, 2),
            later_us=round(max(0.0, kernel.end_us - covered_us), 2),
        )
        covered_us = max(covered_us, kernel.end_us)
    return report


@click.command("trace-table")
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--top", type=click.IntRange(min=0), default=40, show_default=True, help="kernels to show"
)
@click.option("--step", help="kernel that begins a step: only the middle half of all steps counts")
@click.option(
    "--in-order",
    type=click.IntRange(min=1),
    help="show this many kernels of one step, one after the other, instead of sums; needs --step",
)
@json_option
def trace_table(
    trace: Path, top: int, step: str | None, in_order: int | None, json_path: Path | None
) -> None:
    """The kernels of a Chrome trace: calls, durations and shares of the time."""
    if in_order is None:
        report = report_trace(trace, top=top, step=step)
    elif step is None:
        raise click.UsageError("--in-order needs --step, the kernel that begins a step")
    else:
        report = report_order(trace, count=in_order, step=step)
    report.emit(json_path)


if __name__ == "__main__":
    trace_table()
