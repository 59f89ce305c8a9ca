"""Who takes part in the suites on a CUDA device.

`fa4` needs the package flash-attn-4, and `torch-flex-flash`, torch's own use of it, needs it too.
`taking_part` says which peers are left out because a package is not there; one that does not know
a case is left out of that case.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
    needs: a module that is not a part of torch.
    """

    prepare: Prepare
    tokens_first: bool = False
    needs: str = ""

    def hindrance(self) -> str | None:
        """Why it takes no part at all, None if it does."""
        try:
            if self.needs:
                importlib.import_module(self.needs)
        except Exception as error:  # a broken installation fails in ways of its own
            return f"{self.needs} cannot be imported: {summary(error)}"
        return None

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


def forget_graphs() -> None:
    """To be called before the contenders of a case are prepared: torch compiles eight graphs of a
    function, then runs it eagerly. Attentions of torch flex that are still in use compile again."""
    torch.compiler.reset()


def _torch_flex(options: dict[str, str], case: GpuCase, learned: torch.Tensor | None) -> Attention:
    function: Any = torch_flex.flex_attention
    if options:
        function = functools.partial(function, kernel_options=options)
    return _flex(torch_flex, torch.compile(function, dynamic=False, fullgraph=True), case, learned)


def _torch_flex_flash(case: GpuCase, learned: torch.Tensor | None) -> Attention | None:
    """Without captured gradients and without a split of the keys of one query."""
    if learned is not None or case.q_len == 1:
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


# The masks that FlashAttention 4 knows by name. A window counts keys before the query.
_FA4_MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window1024": {"window_size": (1023, 0)},
}
_FA4_SCORES: dict[str, dict[str, Any]] = {"": {}, "softcap": {"softcap": 30.0}}


def _fa4(case: GpuCase, learned: torch.Tensor | None) -> Attention | None:
    if case.mask not in _FA4_MASKS or case.score not in _FA4_SCORES or case.q_len == 1:
        return None
    function = importlib.import_module(_FA4).flash_attn_func
    options = _FA4_MASKS[case.mask] | _FA4_SCORES[case.score]

    def attention(query, key, value):
        return function(query, key, value, **options)[0]  # and the log-sum-exp

    return attention


_FA4 = "flash_attn.cute.interface"
CONTENDERS: dict[str, Contender] = {
    "attnloom": Contender(functools.partial(attention_of, "auto")),
    "triton": Contender(functools.partial(attention_of, "triton")),
    "torch-flex": Contender(functools.partial(_torch_flex, {})),
    "torch-flex-flash": Contender(_torch_flex_flash, needs=_FA4),
    "sdpa-flash": Contender(functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION)),
    "sdpa-cudnn": Contender(functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION)),
    "fa4": Contender(_fa4, tokens_first=True, needs=_FA4),
}
# Not a peer: our portable backend beside the one that is chosen by itself.
OURS = ("attnloom", "triton")
GPU_PEERS = tuple(name for name in CONTENDERS if name != "attnloom")


def taking_part(names: Iterable[str]) -> tuple[str, ...]:
    """Those of the names whose packages are there; a line on stderr for each other."""
    found = []
    for name in names:
        hindrance = CONTENDERS[name].hindrance()
        if hindrance is None:
            found.append(name)
        else:
            print(f"{name} takes no part: {hindrance}", file=sys.stderr, flush=True)
    return tuple(found)


def summary(error: Exception) -> str:
    """One line of an error: its kind and the first line of what it says."""
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}"[:300]
