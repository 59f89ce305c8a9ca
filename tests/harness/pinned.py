"""Messages of errors whose whole text is pinned."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attnloom.errors import AttnloomError

# What a user does, the error that it raises, and its text.
Pinned = tuple[Callable[[], object], type[AttnloomError], str]


def assert_says(mistake: Pinned) -> None:
    """The error is of exactly this kind and says exactly this."""
    call, kind, text = mistake
    with pytest.raises(AttnloomError) as caught:
        call()
    assert type(caught.value) is kind
    assert str(caught.value) == text
