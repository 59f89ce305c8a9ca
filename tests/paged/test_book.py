"""Pages and their owners: random operations against a model, and what each one promises."""

from __future__ import annotations

import pytest

from attnloom.errors import OptionError, OutOfPagesError, ShapeError
from attnloom.paged import PageAllocator, PageBook
from tests.paged.books import run


@pytest.mark.parametrize("seed", range(3))
def test_random_operations_lose_and_share_no_page_by_mistake(seed: int) -> None:
    """`python -m tests.paged.books 1000000` runs a million."""
    done = run(seed, num_operations=2000, check_every=20)
    assert done.num_written > 2000 and done.num_refused > 10


def test_the_model_sees_a_page_shared_by_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageAllocator, "owners", lambda self, page: 1)  # never copy on write
    with pytest.raises(AssertionError):
        run(0, num_operations=2000, check_every=20)


def test_the_model_sees_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageBook, "free", lambda self, names: self._entries.pop(*names))
    with pytest.raises(AssertionError):
        run(0, num_operations=2000, check_every=20)


def test_out_of_pages_changes_nothing() -> None:
    book = PageBook(num_pages=4, page_size=16)
    a, b = book.new(), book.new()
    book.extend([a, b], [20, 16])
    before = book.state()
    with pytest.raises(OutOfPagesError, match="2 pages are needed and 1 of 4 are free"):
        book.extend([a, b], [13, 1])
    assert book.state() == before


def test_only_the_page_that_is_written_is_copied() -> None:
    book = PageBook(num_pages=10, page_size=16)
    a = book.new()
    book.extend([a], [40])
    b = book.fork(a)
    assert book.pages(a) == book.pages(b) == [0, 1, 2]
    assert book.extend([b], [1]) == [(2, 3)]
    assert book.pages(a) == [0, 1, 2] and book.pages(b) == [0, 1, 3]
    assert book.extend([a], [1]) == []  # the page is its own again


def test_the_last_of_several_sharers_keeps_the_page() -> None:
    book = PageBook(num_pages=10, page_size=16)
    a = book.new()
    book.extend([a], [8])
    others = [book.fork(a) for _ in range(3)]
    assert len(book.extend([a, *others], [1] * 4)) == 3
    book.check()


def test_a_fork_at_a_page_boundary_copies_nothing() -> None:
    book = PageBook(num_pages=10, page_size=16)
    a = book.new()
    book.extend([a], [40])
    b = book.fork(a, 32)
    assert book.extend([b], [5]) == []
    assert book.pages(b)[:2] == book.pages(a)[:2]


def test_a_window_that_begins_before_a_young_sequence_was_refused() -> None:
    book = PageBook(num_pages=10, page_size=16)
    a = book.new()
    book.extend([a], [40])
    before = book.state()
    assert [book.drop_before(a, book.length(a) - window) for window in (64, 41, 40)] == [0, 0, 0]
    assert book.state() == before
    assert book.drop_before(a, book.length(a) - 24) == 1


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda b: b.length(7), OptionError, "there is no sequence 7: it was freed, or never made"),
        (lambda b: b.extend([0, 0], [1, 1]), OptionError, "names one twice"),
        (lambda b: b.extend([0], [-1]), ShapeError, "is extended by -1; 0 tokens or more"),
        (lambda b: b.fork(0, 41), ShapeError, "a fork of its first 41 does not exist"),
        (lambda b: b.truncate(0, 41), ShapeError, "it cannot be cut to 41"),
        (lambda b: b.drop_before(0, 41), ShapeError, "position 41 is not one of them"),
        (lambda b: b.truncate(1, 5), ShapeError, "dropped the page of token 4"),
        (lambda b: b.fork(1, 5), ShapeError, "dropped the page of token 4"),
    ],
)  # fmt: skip
def test_mistakes(call, error, text) -> None:
    book = PageBook(num_pages=10, page_size=16)
    for _ in range(2):
        book.extend([book.new()], [40])
    book.drop_before(1, 20)
    before = book.state()
    with pytest.raises(error, match=text):
        call(book)
    assert book.state() == before
