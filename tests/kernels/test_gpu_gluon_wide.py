"""The Gluon backward of heads of 129 to 192 without dv on a Hopper GPU against the oracle; `pytest
-m gpu`. The kernel that has dv too: test_gpu_gluon_roles.py.

Each in a process that can be given up: barriers that were waited for in vain would hold all others.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from tests.harness.case import Case
from tests.harness.draw import Sizes
from tests.kernels.apart import apart

BF16, FP16 = torch.bfloat16, torch.float16
SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=150, KV_LEN=290, D=192, Dv=192)


def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _is_hopper(), reason="needs a Hopper GPU"),
]


def check(case: Case, fold: bool = False) -> None:
    from attnloom.backends.gluon import launch_roles, launch_wide
    from attnloom.backends.gluon.configs_backward import form_in_panels
    from tests.kernels.gluon_backward import check_gradients

    form = form_in_panels(fold)
    ran = mock.Mock(wraps=launch_wide.backward)
    with (
        mock.patch.object(launch_roles, "takes", lambda call: False),
        mock.patch.object(launch_wide, "form_of", lambda call: form),
        mock.patch.object(launch_wide, "FEW_SPILLS", 1 << 20),
        mock.patch.object(launch_wide, "backward", ran),
        mock.patch.object(launch_wide, "_ready", {}),
    ):
        check_gradients(case)
    assert ran.called


# Without captured gradients, which the portable kernels compute.
MODS = [
    ("plain", FP16),
    ("causal", BF16),
    ("softcap", FP16),
    ("alibi", BF16),
    ("document", BF16),
    ("window_with_sinks", BF16),
    ("every_second_row", BF16),
    ("nothing", BF16),
    ("dilated_by_head", BF16),
]


@pytest.mark.parametrize(("mod", "dtype"), MODS, ids=str)
def test_mods(mod: str, dtype: torch.dtype) -> None:
    apart(check_mod, mod, dtype is FP16)


def check_mod(mod: str, half: bool) -> None:
    magnitude = 3.0 if mod == "plain" else 1.0
    dtype = FP16 if half else BF16
    check(Case(mod, SIZES, dtype, magnitude=magnitude, block_size=128))


@pytest.mark.parametrize(("D", "Dv"), [(192, 128), (136, 192), (192, 64), (144, 24)])
def test_head_dims(D: int, Dv: int) -> None:
    apart(check_head_dims, D, Dv)


def check_head_dims(D: int, Dv: int) -> None:
    check(Case("causal", replace(SIZES, D=D, Dv=Dv), BF16, scale=-0.3, block_size=128))


def test_lengths() -> None:
    apart(check_lengths)


def check_lengths() -> None:
    for q_len, kv_len in ((1, 1), (1, 63), (63, 1), (129, 257), (17, 1000), (1000, 17)):
        sizes = replace(SIZES, Q_LEN=q_len, KV_LEN=kv_len)
        check(Case("causal", sizes, BF16, block_size=128))


@pytest.mark.parametrize("mod", ["plain", "causal", "every_second_row"])
def test_sums_from_lse_and_delta(mod: str) -> None:
    apart(check_fold, mod)


def check_fold(mod: str) -> None:
    """And scores that overflow where keys end: exp(0 - lse) is infinite there."""
    for magnitude in (1.0, 30.0):
        check(Case(mod, SIZES, BF16, magnitude=magnitude, block_size=128), fold=True)


def test_blocks_larger_than_tiles_and_keys_of_one_batch_entry() -> None:
    apart(check_blocks)


def check_blocks() -> None:
    sizes = replace(SIZES, Q_LEN=700, KV_LEN=600)
    for block_size in ((64, 128), (512, 256)):
        check(Case("sliding_window", sizes, BF16, block_size=block_size))
    check(Case("causal", replace(SIZES, B=3), BF16, kv_batch=1, block_size=128))
    check(Case("causal", SIZES, BF16, layout="transposed", block_size=128))


def test_repeated_calls_start_the_same_kernels() -> None:
    apart(check_repeated)


def check_repeated() -> None:
    """dk and dv bit for bit; dq is a sum in no order. Later calls write addresses alone."""
    import attnloom
    from attnloom.backends.gluon import launch_roles, launch_wide

    launch_roles.takes = lambda call: False  # in a process of its own
    mask = attnloom.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 500, 500, "cuda")
    draw = torch.Generator("cuda").manual_seed(0)
    query, key, value, dout = (
        torch.randn(1, 4, 500, 192, generator=draw, dtype=BF16, device="cuda") for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (query, key, value)]

    def run() -> tuple[torch.Tensor, ...]:
        out = attnloom.flex_attention(*leaves, block_mask=mask, kernel_options={"backend": "gluon"})
        return torch.autograd.grad(out, leaves, dout)

    first = run()
    ran = mock.Mock(wraps=launch_wide.backward)
    with mock.patch.object(launch_wide, "backward", ran):
        later = [run() for _ in range(4)]
    assert ran.call_count < len(later), "no call was started anew with other addresses"
    for dq, dk, dv in later:
        assert torch.equal(dk, first[1]) and torch.equal(dv, first[2])
        torch.testing.assert_close(dq, first[0], atol=2e-2, rtol=2e-2)
