"""What a caller of flex_attention says, handed on as one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Call(NamedTuple):
    """Arguments of flex_attention that a launch depends on, as given: nothing is checked yet.

    A named tuple, which is made on every call in a third of the time of a frozen dataclass.
    """

    query: Any
    key: Any
    value: Any
    score_mod: Callable[..., Any] | None
    block_mask: Any
    scale: float | None
    enable_gqa: bool
    kernel_options: Mapping[str, object] | None

    def on(self, query: Any, key: Any, value: Any) -> Call:
        """The same of other inputs."""
        return Call(query, key, value, *self[3:])
