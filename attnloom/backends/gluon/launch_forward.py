"""Forward launches of the Gluon backend."""

from __future__ import annotations

from attnloom.backends.registry import AttentionCall, ForwardResult


def refusal(call: AttentionCall) -> str | None:
    """Why the forward of this call cannot run here."""
    return "its forward has no Gluon kernel."


def forward(call: AttentionCall, want_max_scores: bool) -> ForwardResult:
    raise AssertionError("refused")
