"""Operations that Gluon's compiler has and its language does not export.

Each is a builtin as Triton's own are: it sees the compiler's semantic object at compile time.
"""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin


@builtin
def scalar(value: Any, dtype: Any, _semantic: Any = None) -> Any:
    """A scalar of a type. `tl.full((), ...)` asks for a layout here, which a scalar has none of."""
    return _semantic.scalar_constant(_unwrap_if_constexpr(value), _unwrap_if_constexpr(dtype))
