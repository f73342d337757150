"""Prefixes in main memory, against a model that is a plain list of prefixes by their last use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_backend.cache.host import HostCache
from minisgl_backend.cache.host_windows import HostWindows
from minisgl_backend.plan import NO_PAGE, NO_SNAPSHOT
from minisgl_backend.request import IntArray
from tests.fakes.executor import tokens_of

SIZE = 4


def tokens(pattern: str, rest: int = 1) -> IntArray:
    """Each character fills a page; ``rest`` more tokens follow."""
    return tokens_of([ord(each) for each in pattern for _ in range(SIZE)] + [0] * rest)


def pages(*numbers: int) -> IntArray:
    return np.array(numbers, np.int32)


def saves(host: HostCache) -> dict[int, int]:
    """The slots of pages that a plan saves."""
    taken = host.take_saves()
    host.check()
    assert len({*taken.slots.tolist()}) == len(taken.slots), "a slot is written once"
    return dict(zip(taken.pages.tolist(), taken.slots.tolist(), strict=True))


def found(host: HostCache, pattern: str, salt: str = "", rest: int = 1) -> list[int]:
    prefix = tokens(pattern, rest)
    slots: list[int] = host.match(prefix, salt).slots.tolist()
    assert host.keeps_windows or host.match_length(prefix, salt) == len(slots) * SIZE
    return slots


def test_a_prefix_is_found_in_the_slots_that_its_pages_are_saved_to() -> None:
    host = HostCache(8, SIZE)
    host.save(tokens("abc"), "", pages(30, 10, 20))
    taken = saves(host)
    slots = [taken[page] for page in (30, 10, 20)]
    assert found(host, "abc") == found(host, "abcd") == slots
    assert found(host, "abx") == slots[:2]
    assert found(host, "abc", rest=0) == slots[:2], "the last token is always computed"
    assert found(host, "bc") == found(host, "abc", salt="other") == []
    assert host.num_used == 3
    assert saves(host) == {}, "what is kept already is not saved again"


def test_only_what_is_not_kept_yet_is_saved() -> None:
    host = HostCache(8, SIZE)
    host.save(tokens("ab"), "", pages(1, 2))
    first = saves(host)
    host.save(tokens("abcd"), "", pages(7, 8, 3, 4))
    more = saves(host)
    assert more.keys() == {3, 4}
    assert found(host, "abcd") == [first[1], first[2], more[3], more[4]]


def test_pages_at_the_end_of_a_sequence_that_are_not_given_are_not_saved() -> None:
    host = HostCache(8, SIZE)
    host.save(tokens("abcd"), "", pages(1, 2))
    assert saves(host).keys() == {1, 2}
    host.save(tokens("x"), "", pages())
    assert saves(host) == {}
    assert found(host, "x") == []


def test_the_least_recently_used_slots_make_room_from_their_end() -> None:
    host = HostCache(4, SIZE)
    host.save(tokens("ab"), "", pages(1, 2))
    host.save(tokens("xy"), "", pages(3, 4))
    assert len(found(host, "ab")) == 2  # more recent now
    saves(host)
    host.save(tokens("q"), "", pages(5))
    assert saves(host).keys() == {5}
    assert [len(found(host, each)) for each in ("ab", "xy", "q")] == [2, 1, 1]


def test_the_end_of_a_prefix_that_does_not_fit_is_left_out() -> None:
    host = HostCache(3, SIZE)
    host.save(tokens("abcde"), "", pages(1, 2, 3, 4, 5))
    assert saves(host).keys() == {1, 2, 3}
    assert len(found(host, "abcde")) == 3


def test_a_slot_that_is_matched_is_not_saved_to_in_the_same_plan() -> None:
    host = HostCache(3, SIZE)
    host.save(tokens("ab"), "", pages(1, 2))
    saves(host)
    loaded = found(host, "ab")
    host.save(tokens("xyz"), "", pages(3, 4, 5))
    assert not {*saves(host).values()} & {*loaded}
    host.save(tokens("uvw"), "", pages(6, 7, 8))  # in the next one it is
    assert {*loaded} <= {*saves(host).values()}


def test_a_slot_that_is_taken_away_before_it_is_saved_to_gets_the_newer_page() -> None:
    host = HostCache(2, SIZE)
    host.save(tokens("ab"), "", pages(1, 2))
    host.save(tokens("xy"), "", pages(3, 4))
    assert saves(host).keys() == {3, 4}
    assert found(host, "ab") == []


def with_states(num_slots: int, num_state_slots: int) -> HostCache:
    return HostCache(num_slots, SIZE, num_state_slots=num_state_slots)


def saved_states(host: HostCache) -> dict[int, int]:
    """The state slots of snapshots that a plan saves."""
    taken = host.take_saves()
    host.check()
    assert len({*taken.state_slots.tolist()}) == len(taken.state_slots), "each is written once"
    return dict(zip(taken.snapshots.tolist(), taken.state_slots.tolist(), strict=True))


def test_a_prefix_is_found_up_to_the_last_states() -> None:
    host = with_states(8, 4)
    host.save(tokens("abcd"), "", pages(1, 2, 3, 4), snapshots=[(1, 70), (3, 71), (5, 72)])
    slots = saved_states(host)
    assert slots.keys() == {70, 71}, "there are no pages before the third"
    assert host.num_used == 4
    for pattern, num_pages, snapshot in (("abcd", 3, 71), ("abc", 3, 71), ("abx", 1, 70)):
        prefix = host.match(tokens(pattern), "")
        assert (len(prefix.slots), prefix.state_slot) == (num_pages, slots[snapshot])
    assert host.match(tokens("abc", rest=0), "").state_slot == slots[70]
    assert host.match(tokens("xbc"), "").state_slot == NO_SNAPSHOT
    host.save(tokens("abcd"), "", pages(5, 6, 7, 8), snapshots=[(1, 80), (3, 81), (4, 82)])
    assert saved_states(host).keys() == {82}, "others are kept already"


def test_the_least_recently_used_states_make_room() -> None:
    host = with_states(8, 2)
    host.save(tokens("ab"), "", pages(1, 2), snapshots=[(1, 70), (2, 71)])
    assert saved_states(host).keys() == {70, 71}
    assert len(found(host, "ax")) == 1  # more recent now
    assert saved_states(host) == {}
    host.save(tokens("q"), "", pages(3), snapshots=[(1, 72)])
    assert saved_states(host).keys() == {72}
    assert [len(found(host, each)) for each in ("ab", "ax", "q")] == [1, 1, 1]
    assert host.num_used == 3, "pages stay without states"


def test_a_state_slot_that_is_matched_is_not_saved_to_in_the_same_plan() -> None:
    host = with_states(8, 1)
    host.save(tokens("a"), "", pages(1), snapshots=[(1, 70)])
    slots = saved_states(host)
    assert host.match(tokens("a"), "").state_slot == slots[70]
    host.save(tokens("b"), "", pages(2), snapshots=[(1, 71)])
    assert saved_states(host) == {}
    host.save(tokens("c"), "", pages(3), snapshots=[(1, 72)])  # in the next one it is
    assert saved_states(host) == {72: slots[70]}


def test_evicted_pages_lose_their_states() -> None:
    host = with_states(2, 2)
    host.save(tokens("ab"), "", pages(1, 2), snapshots=[(1, 70), (2, 71)])
    host.save(tokens("xy"), "", pages(3, 4), snapshots=[(2, 72)])
    assert saved_states(host).keys() >= {72}
    assert [len(found(host, each)) for each in ("ab", "xy")] == [0, 2]
    fresh = host.emptied()
    assert (fresh.num_state_slots, fresh.num_used, found(fresh, "xy")) == (2, 0, [])


SPAN = 2


def with_windows(num_slots: int, num_window_slots: int) -> HostCache:
    windows = HostWindows(num_window_slots, num_slots=num_slots, span=SPAN)
    return HostCache(num_slots, SIZE, windows=windows)


def saved_windows(host: HostCache) -> dict[int, int]:
    """The window slots of window pages that a plan saves."""
    taken = host.take_saves()
    host.check()
    assert len({*taken.window_slots.tolist()}) == len(taken.window_slots), "each is written once"
    return dict(zip(taken.window_pages.tolist(), taken.window_slots.tolist(), strict=True))


def test_a_prefix_is_found_up_to_the_last_window() -> None:
    host = with_windows(9, 6)
    host.save(
        tokens("abcdef"),
        "",
        pages(1, 2, 3, 4, 5, 6),
        window_pages=pages(71, NO_PAGE, 73, 74, 75, NO_PAGE),
    )
    slots = saved_windows(host)
    assert slots.keys() == {71, 73, 74, 75}
    for pattern, num_pages, window in (
        ("abcdef", 5, [74, 75]),
        ("abcd", 4, [73, 74]),
        ("abc", 1, [71]),  # before the third there is one page with a window page
        ("x", 0, []),
    ):
        prefix = host.match(tokens(pattern), "")
        assert len(prefix.slots) == num_pages
        assert prefix.window_slots.tolist() == [slots[page] for page in window]
    host.save(tokens("ab"), "", pages(1, 2), window_pages=pages(81, 82))
    assert saved_windows(host).keys() == {82}, "others are kept already"
    assert len(host.match(tokens("abcdef"), "").slots) == 5


def test_the_least_recently_used_window_pages_make_room() -> None:
    host = with_windows(9, 3)
    host.save(tokens("ab"), "", pages(1, 2), window_pages=pages(71, 72))
    host.save(tokens("x"), "", pages(3), window_pages=pages(73))
    assert saved_windows(host).keys() == {71, 72, 73}
    assert len(found(host, "ab")) == 2  # more recent now
    assert saved_windows(host) == {}
    host.save(tokens("q"), "", pages(4), window_pages=pages(74))
    assert saved_windows(host).keys() == {74}
    assert [len(found(host, each)) for each in ("ab", "x", "q")] == [2, 0, 1]
    assert host.num_used == 4, "pages stay without window pages"


def test_a_window_slot_that_is_matched_is_not_saved_to_in_the_same_plan() -> None:
    host = with_windows(9, 1)
    host.save(tokens("a"), "", pages(1), window_pages=pages(71))
    slots = saved_windows(host)
    assert host.match(tokens("a"), "").window_slots.tolist() == [slots[71]]
    host.save(tokens("b"), "", pages(2), window_pages=pages(72))
    assert saved_windows(host) == {}
    host.save(tokens("c"), "", pages(3), window_pages=pages(73))
    host.save(tokens("d"), "", pages(4), window_pages=pages(74))
    assert saved_windows(host) == {74: slots[71]}, "the newer page"


def test_evicted_pages_lose_their_window_pages() -> None:
    host = with_windows(2, 4)
    host.save(tokens("ab"), "", pages(1, 2), window_pages=pages(71, 72))
    host.save(tokens("xy"), "", pages(3, 4), window_pages=pages(73, 74))
    saved_windows(host)
    assert [len(found(host, each)) for each in ("ab", "xy")] == [0, 2]
    fresh = host.emptied()
    assert (fresh.num_used, found(fresh, "xy"), fresh.keeps_windows) == (0, [], True)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 6))
def test_it_is_like_a_list_of_prefixes(data: st.DataObject, num_slots: int) -> None:
    """Each kept page is a prefix; the model has them with what was saved, in order of last use."""
    host = HostCache(num_slots, SIZE)
    used: list[tuple[str, str]] = []  # salt, pattern: the least recently used first
    contents: dict[int, tuple[str, str]] = {}  # what plans have saved, by slot
    of_pages: dict[int, tuple[str, str]] = {}
    next_page = 0

    def use(salt: str, pattern: str) -> None:
        """A prefix is more recent than what continues it, so that its end goes first."""
        for end in range(len(pattern), 0, -1):
            if (salt, pattern[:end]) in used:
                used.remove((salt, pattern[:end]))
                used.append((salt, pattern[:end]))

    for _ in range(data.draw(st.integers(1, 12))):
        salt, pattern = data.draw(st.sampled_from(["", "s"])), data.draw(st.text("ab", max_size=5))
        known = 0
        while known < len(pattern) and (salt, pattern[: known + 1]) in used:
            known += 1
        if data.draw(st.booleans()):
            slots = found(host, pattern, salt)
            contents |= {slot: of_pages[page] for page, slot in saves(host).items()}
            assert [contents[slot] for slot in slots] == [
                (salt, pattern[: end + 1]) for end in range(known)
            ]
            use(salt, pattern)
            continue
        own = list(range(next_page, next_page + len(pattern)))
        next_page += len(own)
        of_pages |= {page: (salt, pattern[: index + 1]) for index, page in enumerate(own)}
        host.save(tokens(pattern), salt, pages(*own))
        use(salt, pattern)
        end = min(len(pattern), num_slots)
        for index in range(known, end):
            used.append((salt, pattern[: index + 1]))
        kept = {(salt, pattern[: index + 1]) for index in range(end)}
        while len(used) > num_slots:
            gone = next(each for each in used if each not in kept)
            used.remove(gone)
        use(salt, pattern)
        assert host.num_used == len(used) <= num_slots
        host.check()


class Watched:
    """What a watch was told."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[str, bytes]] = {}
        self.num_emptied = 0

    def published(self, tokens: IntArray, salt: str, pages: IntArray) -> None:
        ends = range(len(tokens) - SIZE * (len(pages) - 1), len(tokens) + 1, SIZE)
        for page, end in zip(pages.tolist(), ends, strict=True):
            assert page not in self.known
            self.known[page] = (salt, tokens[:end].tobytes())

    def left(self, pages: IntArray) -> None:
        for page in pages.tolist():
            del self.known[page]

    def emptied(self) -> None:
        self.known.clear()
        self.num_emptied += 1


def test_a_watch_knows_what_is_kept() -> None:
    watch = Watched()
    host = HostCache(4, SIZE, watch=watch)
    for number, (pattern, salt) in enumerate([("ab", ""), ("abcd", ""), ("x", "s"), ("abc", "s")]):
        host.save(tokens(pattern), salt, pages(*range(10 * number, 10 * number + len(pattern))))
        saves(host)
        slots = found(host, pattern, salt)
        assert [watch.known[slot] for slot in slots] == [
            (salt, tokens(pattern)[: SIZE * end].tobytes()) for end in range(1, len(slots) + 1)
        ]
        assert len(watch.known) == host.num_used
    fresh = host.emptied()
    assert (fresh.num_used, watch.known, watch.num_emptied) == (0, {}, 1)
    fresh.save(tokens("q"), "", pages(1))
    assert len(watch.known) == 1


@pytest.mark.parametrize("num_slots", [1, 5])
def test_nothing_is_kept_at_first(num_slots: int) -> None:
    host = HostCache(num_slots, SIZE)
    assert (host.num_used, host.num_slots) == (0, num_slots)
    assert found(host, "abc") == []
    assert saves(host) == {}
