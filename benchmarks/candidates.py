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
from attnloom.backends.registry import AttentionCall, Gradients
from attnloom.backends.triton.configs import Tile, clamped
from attnloom.backends.triton.splits import Splitting
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
class FineGluonBackward(GluonBackward):
    """The same in blocks of a step's queries and a program's keys, where the mask's are larger."""

    def exchanged(self) -> list[tuple[ModuleType, str, Any]]:
        from attnloom.backends.gluon import launch_backward
        from attnloom.backends.triton.refined import refined

        def backward(call: AttentionCall, *rest: Any) -> Gradients:
            return given(refined(call, _FINE), *rest)

        given = launch_backward.backward
        return [*super().exchanged(), (launch_backward, "backward", backward)]


@dataclass(frozen=True)
class GluonWide(Change):
    """A form of the kernel for heads of 129 to 192, whatever it spills."""

    form: configs_backward.Form
    backend = "gluon"

    def exchanged(self) -> list[tuple[ModuleType, str, Any]]:
        from attnloom.backends.gluon import launch_wide

        return [
            (launch_wide, "form_of", lambda call: self.form),
            (launch_wide, "FEW_SPILLS", _UNLIMITED),
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
    """Tiles of the key and the row kernel of triton/configs_backward.py. values: of the pass that
    has dv alone, where there is one; those of keys if None."""

    keys: Tile
    rows: Tile
    values: Tile | None = None
    backend = "triton"

    def exchanged(self) -> list[tuple[ModuleType, str, Any]]:
        from attnloom.backends.triton import configs_backward as tables
        from attnloom.backends.triton import ready_backward

        return [
            (ready_backward, "configs_backward", tables),
            (tables, "adds_queries", lambda device, shape: False),
            (tables, "key_tiles", lambda device, shape: (_cut(self.keys, shape),)),
            (tables, "value_tiles", lambda _, shape: (_cut(self.values or self.keys, shape),)),
            (tables, "row_tiles", lambda device, shape: (_cut(self.rows, shape),)),
        ]


@dataclass(frozen=True)
class PortableAdding(Change):
    """dq added to memory by the key kernel, and its tile."""

    keys: Tile
    backend = "triton"

    def exchanged(self) -> list[tuple[ModuleType, str, Any]]:
        from attnloom.backends.triton import configs_backward as tables
        from attnloom.backends.triton import ready_backward

        return [
            (ready_backward, "configs_backward", tables),
            (tables, "adds_queries", lambda device, shape: True),
            (tables, "adding_tiles", lambda device, shape: (_cut(self.keys, shape),)),
        ]


@dataclass(frozen=True)
class PortableSplits(Change):
    """A way to divide keys of splits.py, perhaps with a tile of its own."""

    splitting: Splitting
    tile: Tile | None = None
    backend = "triton"

    def exchanged(self) -> list[tuple[ModuleType, str, Any]]:
        from attnloom.backends.triton import launch_decode

        changes: list[tuple[ModuleType, str, Any]] = [(launch_decode, "SPLITTING", self.splitting)]
        if (tile := self.tile) is not None:
            tables = launch_decode.configs
            changes.append((tables, "decode_tiles", lambda device, shape: (_cut(tile, shape),)))
        return changes


_BACKWARD = GluonBackward | GluonWide | PortableBackward | PortableAdding


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
        return "backward" if isinstance(self.change, _BACKWARD) else "forward"


_KEYS_WIDE = configs_backward.form_for(128, 128, may_mask=True, may_fold=True)
_KEYS_WIDE_FROM_0 = configs_backward.form_for(128, 128, may_mask=False, may_fold=False)
_KEYS_NARROW = configs_backward.form_for(64, 64, may_mask=False, may_fold=False)
_KEYS_NARROW_MASKED = configs_backward.form_for(64, 64, may_mask=True, may_fold=True)
_NARROW, _TWO_NARROW = configs_forward.forms(64, 64, None)
_WIDE_OUT_IN_Q = configs_forward.forms(128, 128, None)[1]

_FINE = (configs_backward.STEP, configs_backward.KEYS)

_SHORT = GpuCase("causal", 16, 16, 16, 2048, 2048, 128)
_DOCUMENTS = GpuCase("documents12", 16, 16, 16, 2048, 2048, 128)
_LONG_DOCUMENTS = GpuCase("documents12", 4, 16, 16, 8192, 8192, 128)
_FULL_192 = GpuCase("full", 4, 16, 16, 8192, 8192, 192)

_CAUSAL_64 = GpuCase("causal", 4, 16, 16, 8192, 8192, 64)
_ALIBI = GpuCase("causal+alibi", 4, 16, 16, 8192, 8192, 128)
_CAPPED = GpuCase("causal+softcap", 4, 16, 16, 8192, 8192, 128)
_CAUSAL_192 = GpuCase("causal", 4, 16, 16, 8192, 8192, 192)
_DECODE_128 = GpuCase("full", 32, 32, 8, 1, 8192, 128)
_DECODE_64 = GpuCase("full", 32, 16, 16, 1, 8192, 64)
_DECODE_FEW = GpuCase("full", 8, 32, 8, 1, 32768, 128)
_DECODE_LONG = GpuCase("full", 1, 32, 8, 1, 131072, 128)
_BIAS = GpuCase("full+bias", 4, 16, 16, 2048, 2048, 64)
_BIAS_128 = GpuCase("full+bias", 4, 16, 16, 2048, 2048, 128)

CANDIDATES = (
    Candidate(
        "documents backward, queries looked up by a warp",
        GluonBackward(replace(_KEYS_WIDE, rows=True)),
        (_DOCUMENTS, _LONG_DOCUMENTS),
        148,
        "16 loads a thread in each partial step, which nearly all are",
    ),
    Candidate(
        "backward, results of a tile waited for under the next",
        GluonBackward(replace(_KEYS_WIDE, deferred=True)),
        (_SHORT, _DOCUMENTS),
        64,
        "a microsecond a tile, of 47 and 15",
    ),
    Candidate(
        "documents backward, queries looked up by a warp, results waited for under the next",
        GluonBackward(replace(_KEYS_WIDE, rows=True, deferred=True)),
        (_DOCUMENTS, _LONG_DOCUMENTS),
        152,
        "both",
    ),
    Candidate(
        "documents backward, queries looked up by a warp, blocks of 64 x 128",
        FineGluonBackward(replace(_KEYS_WIDE, rows=True)),
        (_DOCUMENTS, _LONG_DOCUMENTS),
        148,
        "both",
    ),
    Candidate(
        "documents backward in blocks of 64 x 128",
        FineGluonBackward(_KEYS_WIDE),
        (_DOCUMENTS, _LONG_DOCUMENTS),
        56,
        "7% (4%) of the steps are left out",
    ),
    Candidate(
        "backward with a score_mod, a tile a program",
        GluonBackward(_KEYS_WIDE_FROM_0),
        (_ALIBI, _CAPPED),
        320,
        "what drawing is worth there: chosen for its spills, a third of these, untimed",
    ),
    Candidate(
        "backward, tiles drawn, D=64",
        GluonBackward(replace(_KEYS_NARROW_MASKED, persistent=True)),
        (_CAUSAL_64,),
        0,
        "as above",
    ),
    Candidate(
        "Gluon backward, D=80 in 128",
        GluonBackward(_KEYS_WIDE),
        (GpuCase("causal", 4, 16, 16, 8192, 8192, 80),),
        36,
        "5 products of 128 columns against 7 of 80: even, if D=96 is what it seems",
    ),
    Candidate(
        "Gluon backward, D=48 in 64",
        GluonBackward(_KEYS_NARROW_MASKED),
        (GpuCase("causal", 4, 16, 16, 8192, 8192, 48),),
        32,
        "5 products of 64 columns take less than 7 of 48",
    ),
    Candidate(
        "captured gradients, a slope a head, D=128",
        GluonBackward(_KEYS_WIDE_FROM_0),
        (GpuCase("causal+slope", 4, 16, 16, 2048, 2048, 128),),
        352,
        "as at D=64 (1.42), but for 44 registers spilled",
    ),
    Candidate(
        "captured gradients, by query",
        GluonBackward(_KEYS_NARROW),
        (GpuCase("causal+queries", 4, 16, 16, 2048, 2048, 64),),
        64,
        "5 products instead of 7; an addition a query and tile of 64 keys in both",
    ),
    Candidate(
        "a bias in lines, backward",
        GluonBackward(replace(_KEYS_NARROW, lines=True)),
        (_BIAS,),
        0,
        "4 requests of 128 bytes a warp's load or store in place of 16 of 32; 4 barriers a step",
    ),
    Candidate(
        "a bias in pieces, streamed, backward",
        GluonBackward(replace(_KEYS_NARROW, streamed=True)),
        (_BIAS,),
        0,
        "1.1 GB of bias and gradient do not drive 33 MB of dq's sums out of the cache",
    ),
    Candidate(
        "a bias in lines, streamed, backward",
        GluonBackward(replace(_KEYS_NARROW, lines=True, streamed=True)),
        (_BIAS,),
        0,
        "both",
    ),
    Candidate(
        "a bias in lines, streamed, a step ahead, backward",
        GluonBackward(replace(_KEYS_NARROW, lines=True, streamed=True, prefetch=True)),
        (_BIAS,),
        0,
        "both, and the latency of memory behind half a step: nothing by itself",
    ),
    Candidate(
        "a bias in pieces, backward, D=128",
        GluonBackward(replace(_KEYS_WIDE_FROM_0, pieces=True)),
        (_BIAS_128,),
        276,
        "4 loads and 4 stores of 16 bytes in place of 32 and 32 of 2, as at D=64",
    ),
    Candidate(
        "a bias in lines, dP late, backward, D=128",
        GluonBackward(replace(_KEYS_WIDE_FROM_0, pieces=True, lines=True, late=True)),
        (_BIAS_128,),
        96,
        "180 bytes less spilled again, for a product that nothing hides",
    ),
    Candidate(
        "a bias in pieces, forward",
        GluonForward(replace(_TWO_NARROW, pieces=True)),
        (_BIAS,),
        0,
        "8 loads of 16 bytes a thread and step in place of 64 of 2",
    ),
    Candidate(
        "a bias in pieces a step ahead, forward",
        GluonForward(replace(_TWO_NARROW, pieces=True, prefetch=True)),
        (_BIAS,),
        0,
        "as above, and the latency of memory behind a step's exponentials",
    ),
    Candidate(
        "a bias in pieces, three consumers, forward",
        GluonForward(replace(_NARROW, pieces=True)),
        (_BIAS,),
        28,
        "half as many bytes more in flight",
    ),
    Candidate(
        "a bias in lines, forward",
        GluonForward(replace(_TWO_NARROW, pieces=True, lines=True)),
        (_BIAS,),
        0,
        "rows of 256 bytes in place of 64, moved at once",
    ),
    Candidate(
        "a bias in lines a step ahead, forward",
        GluonForward(replace(_TWO_NARROW, pieces=True, lines=True, prefetch=True)),
        (_BIAS,),
        0,
        "both",
    ),
    Candidate(
        "a bias in lines, streamed, a step ahead, forward",
        GluonForward(replace(_TWO_NARROW, pieces=True, lines=True, streamed=True, prefetch=True)),
        (_BIAS,),
        0,
        "all three",
    ),
    Candidate(
        "a bias in lines a step ahead, forward, D=128",
        GluonForward(replace(_WIDE_OUT_IN_Q, pieces=True, lines=True, prefetch=True)),
        (_BIAS_128,),
        16,
        "as at D=64",
    ),
    Candidate(
        "D=192, dq added to memory",
        PortableAdding(Tile(64, 128, 8, 2)),
        (_CAUSAL_192, _FULL_192),
        0,
        "6 products instead of 8; 48 KB of additions a step",
    ),
    Candidate(
        "D=192 in Gluon without dv",
        GluonWide(configs_backward.Form(2, False, False, False, 240)),
        (_CAUSAL_192, _FULL_192),
        96,
        "6 products instead of 8, 4 of them by warps that load apart from those that multiply",
    ),
    Candidate(
        "D=192 in Gluon without dv, from -lse and -delta",
        GluonWide(configs_backward.Form(2, False, False, True, 240)),
        (_CAUSAL_192, _FULL_192),
        108,
        "and a subtraction a score less",
    ),
    Candidate(
        "D=128 documents, dq added to memory",
        PortableAdding(Tile(64, 64, 4, 1)),
        (_DOCUMENTS,),
        156,
        "5 products instead of 7, two programs a processor without a pipeline",
    ),
    Candidate(
        "D=192 forward, steps of 32 keys",
        PortableForward(Tile(128, 32, 8, 4)),
        (_CAUSAL_192,),
        0,
        "four stages in 147 KB, where three of 64 keys take 197",
    ),
    Candidate(
        "decode, merged by the last",
        PortableSplits(Splitting(fused=True)),
        (_DECODE_FEW, _DECODE_LONG),
        0,
        "no second kernel; 8 programs merge what 32 merged, 32 KB at a time",
    ),
    Candidate(
        "decode, first keys asked for ahead",
        PortableSplits(Splitting(ahead=True)),
        (_DECODE_128, _DECODE_FEW, _DECODE_LONG, _DECODE_64),
        0,
        "queries take more than 1 us to come, before which nothing is copied",
    ),
    Candidate(
        "decode, 128 keys, 2 stages",
        PortableSplits(Splitting(), Tile(16, 128, 4, 2)),
        (_DECODE_128, _DECODE_FEW, _DECODE_LONG),
        0,
        "32 KB of a head at a time: 0.5 to 1% when merged after it",
    ),
    Candidate(
        "decode, 128 keys, one program a processor",
        PortableSplits(Splitting(a_processor=1), Tile(16, 128, 4, 3)),
        (_DECODE_FEW, _DECODE_LONG),
        0,
        "half as many places in memory at a time, and half as many splits",
    ),
    Candidate(
        "decode, 128 keys, one program a processor, asked for ahead",
        PortableSplits(Splitting(ahead=True, a_processor=1), Tile(16, 128, 4, 3)),
        (_DECODE_FEW, _DECODE_LONG),
        0,
        "both",
    ),
)
