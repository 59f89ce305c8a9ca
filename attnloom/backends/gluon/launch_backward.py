"""Backward launches of the Gluon backend."""

from __future__ import annotations

import torch

from attnloom.backends.registry import AttentionCall, Gradients


def refusal(call: AttentionCall) -> str | None:
    """Why the backward of this call cannot run here."""
    return "its backward has no Gluon kernel."


def backward(
    call: AttentionCall,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> Gradients:
    raise AssertionError("refused")
