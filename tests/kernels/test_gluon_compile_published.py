"""The Gluon kernels of every published mod, compiled for Hopper without one: they fit, no product
is waited for at once, and forwards spill within bounds.

Forms are tried as a launch tries them; the backward is compiled whatever it spills, where a launch
would leave it to the portable kernels beyond FEW_SPILLS.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.kernels.gluon_triton import needs_gluon

needs_gluon()

# ruff: noqa: E402
from triton.runtime.errors import OutOfResources

from attnloom import create_block_mask
from attnloom.api.planning import _after_passes
from attnloom.backends.gluon import launch_forward, ready_forward
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton.fields import Tensors
from attnloom.ir.node import BoundProgram, DType
from attnloom.plan.problem import KernelOptions
from attnloom.trace.tracer import trace_mask, trace_score
from tests.harness.draw import Draw, Sizes
from tests.harness.mods import PUBLISHED
from tests.harness.published import PREFIX
from tests.kernels import test_gluon_compile_backward
from tests.kernels.cross_compile import TARGETS, device_is
from tests.kernels.cross_compile_gluon import CompiledGluon, compile_gluon

CPU, BF16 = torch.device("cpu"), torch.bfloat16
NAMES = sorted(PUBLISHED)
OPTIONS = KernelOptions(backend="gluon")
LIMIT = TARGETS["sm_90"][1].shared_bytes
# Bytes that a thread of the forward spills, by (mod, head dimension), as recorded with Triton 3.6;
# more than 256, and "auto" leaves the call to the portable kernels. What is not here was not
# recorded. The backward's are no bound: a launch looks at them.
SPILLS = {
    ("alibi", 128): 64,
    ("bigbird", 128): 48,
    ("block_diffusion", 64): 12,
    ("documents/unsorted", 128): 8,
    ("graphormer_edge", 128): 6592,
    ("graphormer_spatial", 64): 36,
    ("latent_rope", 64): 772,
    ("logical_to_physical/scores", 128): 540,
    ("longformer", 128): 44,
    ("morton_order", 128): 60,
    ("neighborhood", 128): 368,
    ("neighborhood/dilated", 128): 3424,
    ("on_documents", 128): 32,
    ("on_documents/ids", 128): 48,
    ("on_documents/scores", 64): 88,
    ("or_masks", 128): 20,
    ("per_head", 128): 72,
    ("right_padding", 64): 4,
    ("sandwich", 128): 64,
    ("shared_prefix", 64): 36,
    ("sliding_tile", 128): 36,
    ("swin_bias", 64): 536,
    ("swin_window", 64): 456,
    ("temporal_head", 64): 28,
    ("tiled_order", 64): 60,
    ("token_tree", 128): 32,
    ("token_tree_from_bits", 128): 1444,
} | dict.fromkeys(
    [
        ("additive_bias", 64),
        ("alibi/symmetric", 64),
        ("and_masks", 128),
        ("bidirectional_window", 64),
        ("causal_lower_right", 128),
        ("causal_mask", 64),
        ("compose", 128),
        ("dilated_window", 64),
        ("distance_decay", 128),
        ("documents", 64),
        ("documents_from_cu_seqlens", 64),
        ("fixed_sparse", 128),
        ("flamingo", 64),
        ("head_bias", 128),
        ("head_temperature", 64),
        ("key_padding", 128),
        ("left_padding", 128),
        ("logical_to_physical", 64),
        ("noop_mask", 64),
        ("not_mask", 128),
        ("offset", 128),
        ("offset/scores", 64),
        ("pair_bias", 64),
        ("per_head/scores", 64),
        ("position_temperature", 128),
        ("prefix_lm", 64),
        ("relative_bias", 64),
        ("selected_blocks", 64),
        ("sliding_window", 128),
        ("softcap", 64),
        ("softcap/learned", 64),
        ("spatial_head", 128),
        ("strided_sparse", 128),
        ("t5_bias", 64),
        ("t5_bias/decoder", 64),
        ("topk_blocks", 64),
        ("window_with_sinks", 64),
        ("xor_masks", 64),
    ],
    0,
)
ROOM = 16


def call_of(mod: str, head_dim: int) -> AttentionCall:
    """512 tokens on uninitialised memory: kernels are compiled for it, never run."""
    row = PUBLISHED[mod]
    s = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=512, KV_LEN=512, D=head_dim, Dv=head_dim)
    captures = row.draw(s, Draw(0, BF16))
    for name in row.learnable:
        captures[name].requires_grad_()
    score_mod, mask_mod = row.build(captures, s)
    blocks = score = mask = None
    if score_mod is not None:
        score = _planned(trace_score(score_mod, DType.F32, CPU), "score")
    if mask_mod is not None:
        mask = _planned(trace_mask(mask_mod, CPU), "mask")
        B = s.B if "b" in row.mask_axes else None
        H = s.Hq if "h" in row.mask_axes else None
        blocks = create_block_mask(mask_mod, B, H, s.Q_LEN, s.KV_LEN, device="cpu").lists()
    q, k, v = (torch.empty(s.B, n, s.Q_LEN, head_dim, dtype=BF16) for n in (s.Hq, s.Hkv, s.Hkv))
    return AttentionCall(q, k, v, score, mask, blocks, head_dim**-0.5, OPTIONS)


def _planned(bound: BoundProgram, purpose: str) -> BoundProgram | None:
    program = _after_passes(bound, OPTIONS, purpose)
    return None if program is None else BoundProgram(program, bound.tensors, bound.numbers)


class _Compiler:
    """In place of launcher.Launcher: compiles what it would launch."""

    def __init__(
        self, kernel: Any, config: Any, grid: int, options: dict[str, int], hasty: bool = False
    ) -> None:
        assert not hasty
        self.kernel, self.config, self.options = kernel, config, options

    def __call__(self, aligned: bool, *args: object) -> None:
        self.made = compile_gluon(self.kernel, (*args, self.config), self.options)
        if self.made.shared > LIMIT:
            raise OutOfResources(self.made.shared, LIMIT, "shared memory")

    @property
    def spills(self) -> int:
        """Registers, as the driver counts them."""
        return self.made.spills // 4


def forward_of(call: AttentionCall) -> CompiledGluon:
    """The kernel of the form that a launch would choose."""
    with (
        device_is("sm_90"),
        mock.patch("torch.cuda.is_current_stream_capturing", lambda: True),
        mock.patch.object(ready_forward, "Launcher", _Compiler),
    ):
        ready = launch_forward._choose(call, Tensors.of(call, False), True, call)
    assert not isinstance(ready, str), ready
    return ready.launch.made  # type: ignore[attr-defined]


def check_forward(mod: str, head_dim: int) -> None:
    made = forward_of(call_of(mod, head_dim))
    assert made.serialised == ()
    assert made.shared <= LIMIT
    recorded = SPILLS.get((mod.removeprefix(PREFIX), head_dim))
    assert recorded is None or made.spills <= recorded + ROOM


def check_backward(mod: str, head_dim: int) -> None:
    made = test_gluon_compile_backward.compiled(call_of(mod, head_dim))
    main = made["backward_kernel"]
    assert main.serialised == ()
    assert main.shared <= LIMIT


@pytest.mark.parametrize("mod", [f"{PREFIX}per_head", f"{PREFIX}alibi"])
def test_forward(mod: str) -> None:
    check_forward(mod, 128)


def test_backward() -> None:
    check_backward(f"{PREFIX}head_temperature", 128)


@pytest.mark.long
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mod", NAMES)
def test_every_forward(mod: str, head_dim: int) -> None:
    check_forward(mod, head_dim)


@pytest.mark.long
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mod", NAMES)
def test_every_backward(mod: str, head_dim: int) -> None:
    check_backward(mod, head_dim)
