"""Values of a config.json, each found to mean something, or refused by its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attnloom.errors import ModelError


@dataclass(frozen=True, slots=True)
class Fields:
    """Those of one object in there; every method raises ModelError, as what it reads says.

    Attributes:
        of: whose they are, as messages say it.
    """

    of: str
    given: Mapping[str, Any]

    def whole(self, name: str) -> int:
        """A number of things, 1 or more; 32.0 is one."""
        value = self._value(name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 1 <= value < math.inf or value != int(value):
            raise self.refusal(name, value, "a whole number, 1 or more")
        return int(value)

    def whole_or(self, name: str, default: int) -> int:
        """The same, which may be null or left out."""
        return default if self.given.get(name) is None else self.whole(name)

    def number(
        self, name: str, default: float | None, fine: Callable[[float], bool], wanted: str
    ) -> float:
        """A number; default: where it is null or left out, or None if it may not be."""
        value = self._value(name) if default is None else self.given.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.refusal(name, value, f"a number {wanted}")
        if not math.isfinite(value) or not fine(value):
            raise self.refusal(name, value, f"a number {wanted}")
        return float(value)

    def above_0(self, name: str, default: float | None = None) -> float:
        """A factor or a divisor."""
        return self.number(name, default, lambda value: value > 0, "above 0")

    def cap(self, name: str, default: float) -> float | None:
        """A bound of scores; null: none."""
        return None if self.given.get(name, default) is None else self.above_0(name, default)

    def truth(self, name: str, default: bool = False) -> bool:
        """true or false; null is what is left out."""
        value = self.given.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(name, value, "true or false")
        return default if value is None else value

    def _value(self, name: str) -> Any:
        if name not in self.given:
            raise ModelError(f"config.json of {self.of} lacks {name!r}.")
        return self.given[name]

    def refusal(self, name: str, value: object, wanted: str) -> ModelError:
        """Of a value that is something else."""
        return ModelError(f"config.json of {self.of}: {name} is {value!r}; it must be {wanted}.")
