"""Who takes part in the suites on a CUDA device.

`fa4` needs the package flash-attn-4 and `flex-flash`, torch's own use of it, needs it too; a peer
that is not installed or does not know a case is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import util
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as torch_flex

import attnloom
from benchmarks.gpu_cases import DEVICE, GpuCase

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Prepare = Callable[[GpuCase, "torch.Tensor | None"], "Attention | None"]


@dataclass(frozen=True, slots=True)
class Contender:
    """prepare: the attention of a case and its learned tensor, None where there is no such thing.

    tokens_first: takes and gives [B, L, H, D].
    """

    prepare: Prepare
    tokens_first: bool = False

    def place(self, x: torch.Tensor) -> torch.Tensor:
        """An input of the case as this contender likes it, in memory of its own."""
        moved = x.detach().transpose(1, 2).contiguous() if self.tokens_first else x.detach()
        return moved.requires_grad_(x.requires_grad)

    def restore(self, x: torch.Tensor) -> torch.Tensor:
        """An output or a gradient as [B, H, L, D]."""
        return x.transpose(1, 2) if self.tokens_first and x.dim() == 4 else x


def _flex(
    module: Any, function: Callable[..., Any], case: GpuCase, learned: torch.Tensor | None
) -> Attention:
    mask = case.mask_mod
    blocks = None
    if mask is not None:
        blocks = module.create_block_mask(mask, None, None, case.q_len, case.kv_len, device=DEVICE)
    return functools.partial(
        function,
        score_mod=case.score_mod(learned),
        block_mask=blocks,
        enable_gqa=case.heads != case.kv_heads,
    )


def attention_of(backend: str, case: GpuCase, learned: torch.Tensor | None = None) -> Attention:
    """attnloom's attention of a case."""
    function = attnloom.flex_attention
    if backend != "auto":
        function = functools.partial(function, kernel_options={"backend": backend})
    return _flex(attnloom, function, case, learned)


def _torch_flex(options: dict[str, str], case: GpuCase, learned: torch.Tensor | None) -> Attention:
    torch.compiler.reset()  # one graph a case: no recompilation limit is met
    function: Any = torch_flex.flex_attention
    if options:
        function = functools.partial(function, kernel_options=options)
    return _flex(torch_flex, torch.compile(function, dynamic=False), case, learned)


def _flex_flash(case: GpuCase, learned: torch.Tensor | None) -> Attention | None:
    if learned is not None or util.find_spec("flash_attn") is None:
        return None
    return _torch_flex({"BACKEND": "FLASH"}, case, learned)


def _sdpa(backend: SDPBackend, case: GpuCase, learned: torch.Tensor | None) -> Attention | None:
    if case.variant not in ("full", "causal"):
        return None
    causal, gqa = case.variant == "causal", case.heads != case.kv_heads

    def attention(query, key, value):
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=causal, enable_gqa=gqa
            )

    return attention


def _fa4(case: GpuCase, learned: torch.Tensor | None) -> Attention | None:
    known = {"full": {}, "causal": {"causal": True}, "window1024": {"window_size": (1023, 0)}}
    if (
        case.mask not in known
        or case.score not in ("", "softcap")
        or case.q_len == 1
        or util.find_spec("flash_attn") is None
    ):
        return None
    from flash_attn.cute.interface import flash_attn_func  # pyright: ignore[reportMissingImports]

    options = dict(known[case.mask])
    if case.score:
        options["softcap"] = 30.0

    def attention(query, key, value):
        out = flash_attn_func(query, key, value, **options)
        return out[0] if isinstance(out, tuple) else out

    return attention


CONTENDERS: dict[str, Contender] = {
    "attnloom": Contender(functools.partial(attention_of, "auto")),
    "triton": Contender(functools.partial(attention_of, "triton")),
    "torch-flex": Contender(functools.partial(_torch_flex, {})),
    "flex-flash": Contender(_flex_flash),
    "sdpa-flash": Contender(functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION)),
    "sdpa-cudnn": Contender(functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION)),
    "fa4": Contender(_fa4, tokens_first=True),
}
# Not a peer: our portable backend beside the one that is chosen by itself.
OURS = ("attnloom", "triton")
GPU_PEERS = tuple(name for name in CONTENDERS if name != "attnloom")
