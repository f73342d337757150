"""Tables of shared attention: a row's positions are each in one partial result, in place."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl_backend.kernels.shared_attention import (
    MOST_SLOTS,
    PIECE_WORDS,
    SharedShape,
    SharedTable,
)
from minisgl_backend.request import IntArray

SHAPE = SharedShape(
    max_batch=256, page_size=16, num_heads=16, num_kv_heads=8, head_dim=128, processors=132
)
Group = tuple[list[int], int, int]
"""Rows, and the pages from index ``begin`` up to ``end`` that they share."""


def arrays(groups: list[Group]) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    members = [member for group, _, _ in groups for member in group]
    columns = [len(group) for group, _, _ in groups], *zip(*groups, strict=True)
    return (
        np.array(columns[0], np.int32),
        np.array(columns[2], np.int32),
        np.array(columns[3], np.int32),
        np.array(members, np.int32),
    )


def equal_groups(count: int, each: int, pages: int) -> list[Group]:
    rows = np.random.default_rng(count).permutation(count * each).tolist()
    return [(rows[i * each : (i + 1) * each], 0, pages) for i in range(count)]


PATTERNS = {
    "one": equal_groups(1, 256, 500),
    "sixteen": equal_groups(16, 16, 128),
    "pairs": equal_groups(128, 2, 8),
    "short": equal_groups(2, 3, 1),
    "long": equal_groups(1, 2, 8000),
    "uneven": [([5, 2, 9], 0, 1000), ([0, 1], 0, 2), ([*range(40, 100)], 0, 37)],
    "two levels": [([*range(20)], 0, 40), ([3, 1, 8], 40, 300), ([0, 19], 40, 41)],
    "four levels": [([*range(60 - 10 * n)], 50 * n, 50 * n + 50) for n in range(4)],
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("max_batch", [256, 1024])
def test_each_shared_position_is_in_one_partial(pattern: str, max_batch: int) -> None:
    groups = PATTERNS[pattern]
    table = SharedTable(
        SharedShape(
            max_batch=max_batch,
            page_size=16,
            num_heads=40,
            num_kv_heads=8,
            head_dim=128,
            processors=132,
        )
    )
    words = table.content(*arrays(groups))
    assert len(words) <= table.size
    starts = words[table.starts_at : table.slots_at].reshape(-1, 2)
    slots = words[table.slots_at : table.members_at].reshape(-1, MOST_SLOTS)
    pieces = words[table.pieces_at :].reshape(-1, PIECE_WORDS)
    assert words[0] == len(pieces)
    # for each partial result: its row, and the positions that it stands for
    partials: dict[int, tuple[int, range]] = {}
    for first, count, of_group, begin, end, partial, *_ in pieces.tolist():
        assert count <= table.shape.rows_of_tile
        rows = words[table.members_at + first :][:count].tolist()
        (group,) = (
            group
            for group in groups
            if rows[0] in group[0] and group[1] * 16 <= begin < group[2] * 16
        )
        assert {of_group, *rows} <= {*group[0]}
        assert end <= group[2] * 16
        for index, row in enumerate(rows):
            assert partial + index not in partials
            partials[partial + index] = (row, range(begin, end))
    assert sorted(partials) == [*range(len(partials))]
    assert len(partials) <= table.max_partials
    for row, (start, count) in enumerate(starts.tolist()):
        shared = max((end for group, _, end in groups if row in group), default=0)
        assert start == 16 * shared
        found = [partials[slot] for slot in slots[row, :count].tolist()]
        assert all(owner == row for owner, _ in found)
        assert [at for _, span in sorted(found, key=lambda one: one[1].start) for at in span] == [
            *range(start)
        ]
    assert sum(starts[:, 1]) == len(partials)


@pytest.mark.parametrize(
    ("groups", "window", "pays"),
    [
        (equal_groups(16, 16, 128), None, True),
        (equal_groups(16, 16, 4), None, False),
        (equal_groups(64, 4, 128), None, True),
        (equal_groups(1, 256, 500), None, True),
        (equal_groups(1, 2, 256), None, False),
        (equal_groups(1, 16, 32), None, False),
        (equal_groups(128, 2, 8), None, False),
        (equal_groups(16, 16, 128), 64, False),
        (equal_groups(16, 16, 128), 1024, True),
    ],
)
def test_whether_grouping_pays(groups: list[Group], window: int | None, pays: bool) -> None:
    """As measured."""
    sizes, begins, ends, _ = arrays(groups)
    assert (SharedTable(SHAPE).saved_us(sizes, begins, ends, window=window) > 0) == pays


def test_a_table_without_groups_has_no_pieces_and_no_partials() -> None:
    table, none = SharedTable(SHAPE), np.empty(0, np.int32)
    words = table.content(none, none, none, none)
    assert words[0] == 0
    assert not words[table.starts_at : table.slots_at].any()
    assert len(words) >= table.slots_at
