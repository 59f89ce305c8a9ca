"""What planning decides about a problem, once."""

from __future__ import annotations

from dataclasses import dataclass

from attnloom.ir.node import Program
from attnloom.plan.problem import Problem


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """A problem, the backend that runs it and its mods as that backend will see them.

    backend: a key of `backends.registry.BACKENDS`.
    score, mask: programs after the passes; None for an identity score or an always true mask.
        Their binding slots are those of the traced programs.
    """

    problem: Problem
    backend: str
    score: Program | None
    mask: Program | None
