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

from attnloom.api import near, repeats
from attnloom.backends.gluon import configs_backward, configs_forward
from attnloom.backends.triton.configs import Tile, clamped
from benchmarks.gpu_cases import GpuCase

_UNLIMITED = 1 << 20


class Change:
    """Something else in a backend's place of choice. `exchanged`: (module, name, value), the first
    of the module whose launches are remembered, which are kept apart, as calls that are repeated
    are: a call without a mask is the same one under every change, and the first would run for all.
    """

    backend: ClassVar[str]

    def exchanged(self) -> list[tuple[ModuleType, str, Any]]:
        raise NotImplementedError

    @functools.cached_property
    def _known(self) -> dict[Any, Any]:
        return {}

    @functools.cached_property
    def _repeated(self) -> tuple[tuple[ModuleType, str, Any], ...]:
        return (repeats, "_buckets", {}), (repeats, "_met", set()), (near, "_calls", {})

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the backend runs so."""
        exchanged = self.exchanged()
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(exchanged[0][0], "_ready", self._known))
            for module, name, value in (*self._repeated, *exchanged):
                stack.enter_context(mock.patch.object(module, name, value))
            yield


def _cut(tile: Tile, shape: Any) -> Tile:
    """As the tables cut their tiles: blocks of a mask may be smaller than those it was given
    (triton/refined.py), and a larger tile has no entry in their lists."""
    return clamped(tile, shape.max_m, shape.max_n)


@dataclass(frozen=True)
class GluonForward(Change):
    """A form of configs_forward.py. finer: with blocks of refined.py."""

    form: configs_forward.Form
    finer: bool = False
    backend = "gluon"

    def exchanged(self) -> list[tuple[ModuleType, str, Any]]:
        from attnloom.backends.gluon import launch_forward
        from attnloom.backends.triton.refined import refined

        return [
            (launch_forward, "_in_order", lambda call, fixed: (self.form,)),
            (launch_forward, "_forms", lambda call, pieces=False: (self.form,)),
            (launch_forward, "finer", refined if self.finer else lambda call: call),
        ]


@dataclass(frozen=True)
class GluonBackward(Change):
    """A form of configs_backward.py, whatever it spills."""

    form: configs_backward.Form
    backend = "gluon"

    def exchanged(self) -> list[tuple[ModuleType, str, Any]]:
        from attnloom.backends.gluon import launch_backward, ready_backward

        return [
            (ready_backward, "form_of", lambda operands: self.form),
            (ready_backward, "followed", lambda form: None),
            (launch_backward, "FEW_SPILLS", _UNLIMITED),
        ]


@dataclass(frozen=True)
class GluonWide(Change):
    """A form of the kernel for heads of 129 to 192 without dv, whatever it spills."""

    form: configs_backward.Form
    backend = "gluon"

    def exchanged(self) -> list[tuple[ModuleType, str, Any]]:
        from attnloom.backends.gluon import launch_roles, launch_wide

        return [
            (launch_roles, "takes", lambda call: False),
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
            (tables, "key_tiles", lambda device, shape: (_cut(self.keys, shape),)),
            (tables, "value_tiles", lambda _, shape: (_cut(self.values or self.keys, shape),)),
            (tables, "row_tiles", lambda device, shape: (_cut(self.rows, shape),)),
        ]


_BACKWARD = GluonBackward | GluonWide | PortableBackward


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


_IN_PANELS = configs_backward.form_in_panels(may_fold=False)
_DOCUMENTS_IN_PANELS = replace(configs_backward.form_in_panels(may_fold=True), narrow=True)
_PORTABLE = {
    64: PortableBackward(Tile(64, 64, 4, 3), Tile(64, 128, 4, 3)),
    96: PortableBackward(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
    192: PortableBackward(Tile(64, 128, 8, 2), Tile(128, 64, 8, 2), Tile(64, 128, 8, 3)),
}


def _causal(head_dim: int, score: str = "") -> GpuCase:
    return GpuCase("causal" + score, 4, 16, 16, 8192, 8192, head_dim)


# Three programs share a processor.
_THREE_PROGRAMS = configs_forward.Form(1, 64, 2, 2, True, False, 240, 24, (216, 24), programs=3)
_OF_SHORT_ROWS = configs_forward.forms_of_short_rows(128, 128)[0]
CANDIDATES = (
    Candidate(
        "three programs of one consumer, D=64",
        GluonForward(_THREE_PROGRAMS),
        (GpuCase("causal", 32, 16, 16, 1024, 1024, 64), GpuCase("full", 32, 16, 16, 512, 512, 64)),
        0,
        "0.2146 ms where two consumers take 0.2157: more with fewer steps still?",
    ),
    Candidate(
        "programs of short rows under a causal mask, D=128",
        GluonForward(_OF_SHORT_ROWS),
        (GpuCase("causal", 32, 16, 16, 1024, 1024, 128),),
        0,
        "a tile's beginning and end are 2.0 us, of 6.9 of steps; documents gained by them",
    ),
    Candidate(
        "portable backward, D=40",
        _PORTABLE[64],
        (_causal(40),),
        0,
        "in use before; 0.66 at D=48, which has the same columns in both",
    ),
    Candidate(
        "portable backward, D=72",
        _PORTABLE[96],
        (_causal(72),),
        0,
        "in use before; 0.94 at D=80, which has the same columns in both",
    ),
    Candidate(
        "D=192 in Gluon with a score_mod",
        GluonWide(_IN_PANELS),
        (_causal(192, "+softcap"), _causal(192, "+alibi")),
        368,
        "1.35 from 0 without one; 65 and 92 registers are spilled, where 32 are allowed",
    ),
    Candidate(
        "D=192 in Gluon, documents",
        GluonWide(_DOCUMENTS_IN_PANELS),
        (GpuCase("documents12", 4, 16, 16, 8192, 8192, 192),),
        164,
        "as above: 41 registers",
    ),
    Candidate(
        "portable backward, D=136 and 160",
        _PORTABLE[192],
        (_causal(136), _causal(160)),
        0,
        "in use before, with 8 products of 144 and 160 columns; those in use have 6 of 192",
    ),
)
