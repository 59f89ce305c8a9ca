"""Ways to run kernels that no device has shown right, or faster, yet: what gpu_candidates.py tries.

One that wins becomes the choice of the table that its change names, with an entry in docs/log.md,
and leaves this list; so does one that loses.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar
from unittest import mock

from attnloom.backends.gluon import configs_backward, configs_forward
from attnloom.backends.triton.configs import Tile, clamped
from benchmarks.gpu_cases import GpuCase

_UNLIMITED = 1 << 20


class Change:
    """Something else in a backend's place of choice. `exchanged`: (module, name, value), the first
    of the module whose launches are remembered, which are kept apart."""

    backend: ClassVar[str]

    def exchanged(self) -> list[tuple[ModuleType, str, Any]]:
        raise NotImplementedError

    @functools.cached_property
    def _known(self) -> dict[Any, Any]:
        return {}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the backend runs so."""
        exchanged = self.exchanged()
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(exchanged[0][0], "_ready", self._known))
            for module, name, value in exchanged:
                stack.enter_context(mock.patch.object(module, name, value))
            yield


def _cut(tile: Tile, shape: Any) -> Tile:
    """As the tables cut their tiles: blocks of a mask may be smaller than those it was given
    (triton/refined.py), and a larger tile has no entry in their lists."""
    return clamped(tile, shape.max_m, shape.max_n)


@dataclass(frozen=True)
class GluonForward(Change):
    """A form of configs_forward.py."""

    form: configs_forward.Form
    backend = "gluon"

    def exchanged(self) -> list[tuple[ModuleType, str, Any]]:
        from attnloom.backends.gluon import launch_forward

        return [(launch_forward, "_in_order", lambda call, fixed: (self.form,))]


@dataclass(frozen=True)
class GluonBackward(Change):
    """A form of configs_backward.py, whatever it spills."""

    form: configs_backward.Form
    backend = "gluon"

    def exchanged(self) -> list[tuple[ModuleType, str, Any]]:
        from attnloom.backends.gluon import launch_backward, ready_backward

        return [
            (ready_backward, "form_of", lambda operands: self.form),
            (launch_backward, "FEW_SPILLS", _UNLIMITED),
        ]


@dataclass(frozen=True)
class PortableForward(Change):
    """A tile of triton/configs.py."""

    tile: Tile
    backend = "triton"

    def exchanged(self) -> list[tuple[ModuleType, str, Any]]:
        from attnloom.backends.triton import launch_forward

        tables = launch_forward.configs
        return [
            (launch_forward, "configs", tables),
            (tables, "forward_tiles", lambda device, shape: (_cut(self.tile, shape),)),
        ]


@dataclass(frozen=True)
class PortableBackward(Change):
    """Tiles of the key and the row kernel of triton/configs_backward.py."""

    keys: Tile
    rows: Tile
    backend = "triton"

    def exchanged(self) -> list[tuple[ModuleType, str, Any]]:
        from attnloom.backends.triton import configs_backward as tables
        from attnloom.backends.triton import ready_backward

        return [
            (ready_backward, "configs_backward", tables),
            (tables, "key_tiles", lambda device, shape: (_cut(self.keys, shape),)),
            (tables, "row_tiles", lambda device, shape: (_cut(self.rows, shape),)),
        ]


@dataclass(frozen=True)
class PortableDecode(Change):
    """A tile of the decode kernel, of 16 rows."""

    tile: Tile
    backend = "triton"

    def exchanged(self) -> list[tuple[ModuleType, str, Any]]:
        from attnloom.backends.triton import launch_decode

        tables = launch_decode.configs
        return [
            (launch_decode, "configs", tables),
            (tables, "decode_tiles", lambda device, shape: (_cut(self.tile, shape),)),
        ]


@dataclass(frozen=True, slots=True)
class Candidate:
    """change: to what `auto` runs. spills: bytes a thread, as compiled for sm_90 (Triton 3.6), the
    most of its kernels. why: what it may save."""

    name: str
    change: Change
    cases: tuple[GpuCase, ...]
    spills: int
    why: str

    @property
    def phase(self) -> str:
        backward = isinstance(self.change, GluonBackward | PortableBackward)
        return "backward" if backward else "forward"


_WIDE = configs_forward.forms(128, 128, 128)[0]
_NARROW = configs_forward.forms(64, 64, 128)[0]
_KEYS_WIDE = configs_backward.form_for(128, 128, may_mask=True, may_fold=True)
_KEYS_NARROW = configs_backward.form_for(64, 64, may_mask=False, may_fold=False)
_FOLDED = configs_backward.form_for(128, 128, may_mask=False, may_fold=True)

_DOCUMENTS = GpuCase("documents12", 16, 16, 16, 2048, 2048, 128)
_LONG_DOCUMENTS = GpuCase("documents12", 4, 16, 16, 8192, 8192, 128)
_SHORT = GpuCase("causal", 16, 16, 16, 2048, 2048, 128)
_CAUSAL = GpuCase("causal", 4, 16, 16, 8192, 8192, 128)
_FULL = GpuCase("full", 4, 16, 16, 8192, 8192, 128)
_CAUSAL_64 = GpuCase("causal", 4, 16, 16, 8192, 8192, 64)
_CAUSAL_96 = GpuCase("causal", 4, 16, 16, 8192, 8192, 96)
_FULL_192 = GpuCase("full", 4, 16, 16, 8192, 8192, 192)
_CAUSAL_192 = GpuCase("causal", 4, 16, 16, 8192, 8192, 192)
_DECODE_64 = GpuCase("full", 32, 16, 16, 1, 8192, 64)
_DECODE_128 = GpuCase("full", 32, 32, 8, 1, 8192, 128)
_DECODE_LONG = GpuCase("full", 1, 32, 8, 1, 131072, 128)
_SLOPE = GpuCase("causal+slope", 4, 16, 16, 2048, 2048, 64)
_BIAS = GpuCase("full+bias", 4, 16, 16, 2048, 2048, 64)

CANDIDATES = (
    Candidate(
        "narrow ids",
        GluonForward(replace(_WIDE, narrow=True)),
        (_DOCUMENTS, _LONG_DOCUMENTS),
        24,
        "65 of 409 instructions of a masked step, 24 bytes spilled",
    ),
    Candidate(
        "tiles drawn ahead",
        GluonForward(replace(_WIDE, ahead=True)),
        (_DOCUMENTS, _SHORT, _CAUSAL, _FULL),
        32,
        "a fence, a draw and two divisions before a tile's first copy",
    ),
    Candidate(
        "narrow ids, tiles drawn ahead",
        GluonForward(replace(_WIDE, narrow=True, ahead=True)),
        (_DOCUMENTS, _LONG_DOCUMENTS),
        24,
        "both",
    ),
    Candidate(
        "tiles drawn ahead, D=64",
        GluonForward(replace(_NARROW, narrow=True, ahead=True)),
        (_CAUSAL_64,),
        24,
        "as at D=128; three consumers",
    ),
    Candidate(
        "sums started from -lse and -delta",
        GluonBackward(_FOLDED),
        (_SHORT, _CAUSAL),
        32,
        "a subtraction a score and 20 bytes spilled; 15% without a mask",
    ),
    Candidate(
        "a list's header beside its tile",
        GluonBackward(replace(_KEYS_WIDE, header=True)),
        (_SHORT,),
        56,
        "one of three loads that wait for each other before a program's first copy",
    ),
    Candidate(
        "sums started from -lse and -delta, header beside the tile",
        GluonBackward(replace(_FOLDED, header=True)),
        (_SHORT,),
        32,
        "both",
    ),
    Candidate(
        "Gluon backward, D=96 in 128",
        GluonBackward(_KEYS_WIDE),
        (_CAUSAL_96,),
        56,
        "5 products of 128 columns take less than 7 of 96",
    ),
    Candidate(
        "Gluon backward, D=96 in 128, from -lse and -delta",
        GluonBackward(_FOLDED),
        (_CAUSAL_96,),
        32,
        "both",
    ),
    Candidate(
        "captured gradients, a slope a head",
        GluonBackward(_KEYS_NARROW),
        (_SLOPE,),
        128,
        "5 products instead of 7; a sum a head",
    ),
    Candidate(
        "captured gradients, an element a score",
        GluonBackward(_KEYS_NARROW),
        (_BIAS,),
        128,
        "5 products instead of 7; a store a score",
    ),
    Candidate(
        "D=192 keys, steps of 32 queries",
        PortableBackward(Tile(32, 128, 8, 3), Tile(128, 64, 8, 2)),
        (_CAUSAL_192,),
        0,
        "a third stage fits, and 31 registers are free",
    ),
    Candidate(
        "D=192 rows, steps of 32 keys",
        PortableBackward(Tile(64, 128, 8, 2), Tile(128, 32, 8, 3)),
        (_CAUSAL_192,),
        0,
        "a third stage fits",
    ),
    Candidate(
        "D=192 in three panels",
        GluonForward(configs_forward.Form(2, 64, 2, 2, True, True, 240, 24, (232, 40), panels=3)),
        (_CAUSAL_192, _FULL_192),
        8,
        "saves a quarter of the products of 256 columns; two tiles of queries fit",
    ),
    Candidate(
        "D=192 forward, steps of 32 keys",
        PortableForward(Tile(128, 32, 8, 4)),
        (_CAUSAL_192,),
        0,
        "four stages in 147 KB, where three of 64 keys take 197",
    ),
    Candidate(
        "decode D=64, 2 warps",
        PortableDecode(Tile(16, 64, 2, 3)),
        (_DECODE_64,),
        0,
        "four barriers a tile; over pages 2 warps took 129 us against 134",
    ),
    Candidate(
        "decode D=64, 2 warps, 4 stages",
        PortableDecode(Tile(16, 64, 2, 4)),
        (_DECODE_64,),
        0,
        "as above, and 208 KB of buffers a processor instead of 144",
    ),
    Candidate(
        "decode D=64, one warp, 32 keys",
        PortableDecode(Tile(16, 32, 1, 4)),
        (_DECODE_64,),
        0,
        "no barriers; 8 programs fit a processor",
    ),
    Candidate(
        "decode D=128, 2 warps",
        PortableDecode(Tile(16, 64, 2, 3)),
        (_DECODE_128, _DECODE_LONG),
        0,
        "four barriers a tile; three programs fit a processor instead of two",
    ),
    Candidate(
        "decode D=128, 4 stages",
        PortableDecode(Tile(16, 64, 4, 4)),
        (_DECODE_128, _DECODE_LONG),
        0,
        "204 KB of buffers a processor instead of 140",
    ),
    Candidate(
        "decode D=128, 2 warps, 32 keys, 5 stages",
        PortableDecode(Tile(16, 32, 2, 5)),
        (_DECODE_128, _DECODE_LONG),
        0,
        "as many bytes in flight in smaller steps",
    ),
)
