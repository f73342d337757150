"""What a PromQL expression needs from metrics, and what a /metrics page has."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import promql_parser

Labels = dict[str, str]

ADDED: Final = frozenset({"instance", "job"})
"""Labels that Prometheus adds to whatever it scrapes."""
_VARIABLES: Final = {"$__rate_interval": "1m", "$model": ".*", "$datasource": "prometheus"}
_SERIES: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? \S+$")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric in an expression, and the labels that the expression relies on."""

    metric: str
    matchers: tuple[tuple[str, str], ...]
    """Label names, each with a regular expression that some series must match in full."""
    grouped_by: frozenset[str]


def filled_in(expression: str) -> str:
    """The expression with Grafana's variables replaced, as Grafana does before a query."""
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, f"a variable that the dashboard does not have: {expression}"
    return expression


def selectors(expression: str) -> list[Selector]:
    """All metrics that an expression without variables reads; raises ``ValueError``."""
    return list(_selectors(promql_parser.parse(expression), frozenset()))


def _selectors(node: Any, grouped_by: frozenset[str]) -> Iterator[Selector]:
    if isinstance(node, promql_parser.VectorSelector):
        matchers = tuple(_alternatives(node.matchers))
        yield Selector(str(node.name), matchers, grouped_by)
    elif isinstance(node, promql_parser.MatrixSelector):
        yield from _selectors(node.vector_selector, grouped_by)
    elif isinstance(node, promql_parser.AggregateExpr):
        labels = node.modifier.labels if node.modifier is not None else []
        yield from _selectors(node.expr, grouped_by | set(labels))
    elif isinstance(node, promql_parser.BinaryExpr):
        yield from _selectors(node.lhs, grouped_by)
        yield from _selectors(node.rhs, grouped_by)
    elif isinstance(node, promql_parser.Call):
        for argument in node.args:
            yield from _selectors(argument, grouped_by)
    elif isinstance(node, (promql_parser.ParenExpr, promql_parser.UnaryExpr)):
        yield from _selectors(node.expr, grouped_by)
    else:
        assert isinstance(node, (promql_parser.NumberLiteral, promql_parser.StringLiteral)), node


def _alternatives(matchers: Any) -> Iterator[tuple[str, str]]:
    """Each value that is asked for separately: ``a|b`` asks for two."""
    for matcher in matchers.matchers:
        if matcher.op == promql_parser.MatchOp.Equal:
            yield matcher.name, re.escape(matcher.value)
        else:
            assert matcher.op == promql_parser.MatchOp.Re, matcher
            yield from ((matcher.name, part) for part in matcher.value.split("|"))


def series(page: str) -> dict[str, list[Labels]]:
    """The label sets of each metric on a /metrics page."""
    found: dict[str, list[Labels]] = defaultdict(list)
    for line in page.splitlines():
        match = _SERIES.match(line)
        if match:
            found[match[1]].append(dict(_LABEL.findall(match[2] or "")))
    return found


def missing(selector: Selector, page: dict[str, list[Labels]]) -> list[str]:
    """What a page lacks for this selector, in words."""
    label_sets = page.get(selector.metric)
    if not label_sets:
        return [f"no metric {selector.metric}"]
    lacks = [
        f"{selector.metric} has no label {label}"
        for label in sorted(selector.grouped_by - ADDED)
        if not all(label in labels for labels in label_sets)
    ]
    lacks += [
        f"{selector.metric} has no series with {label} =~ {pattern}"
        for label, pattern in selector.matchers
        if label not in ADDED
        and not any(re.fullmatch(pattern, labels.get(label, "")) for labels in label_sets)
    ]
    return lacks
