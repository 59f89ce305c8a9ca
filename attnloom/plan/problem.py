"""Static description of an attention problem and the options that steer it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """What `kernel_options` may say to attnloom, after validation.

    backend: "auto", "cpu", "tiled" (torch operators), "reference", later "triton" and "gluon".
        An explicitly chosen backend never falls back.
    exact_math: no approximate tanh or exp beyond one unit in the last place of the type.
    deterministic: gradients are bitwise equal from run to run.
    debug_bounds: check every index into a captured tensor and name the tensor that is overrun.
    """

    backend: str = "auto"
    exact_math: bool = False
    deterministic: bool = False
    debug_bounds: bool = False
