"""Work in threads at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def at_once(work: Callable[..., None], given: Sequence[Any]) -> None:
    """A thread for each of `given`.

    Raises:
        Exception: what the first of them that failed raised; a bare thread would only print it.
    """
    with ThreadPoolExecutor(len(given)) as pool:
        list(pool.map(work, given))
