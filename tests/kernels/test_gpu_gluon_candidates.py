"""Forms of the Gluon kernels that are not in use yet, on a Hopper GPU against the oracle; `pytest
-m gpu`. A form may wait for a barrier that never comes: each test is a process that can be given
up. What is fast is for `python -m benchmarks.gpu_candidates` to say."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.harness.case import Case
from tests.harness.check import check_attention
from tests.harness.draw import Sizes
from tests.harness.implementations import attnloom_with

BF16, FP16 = torch.bfloat16, torch.float16
SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=300, KV_LEN=400, D=64, Dv=64)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]


def apart(call: str) -> None:
    code = f"from tests.kernels.test_gpu_gluon_candidates import *; {call}"
    done = subprocess.run([sys.executable, "-c", code], timeout=100, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]


@contextlib.contextmanager
def ahead() -> Iterator[None]:
    """Inside, forwards draw tiles ahead and hold ids in 32 bits wherever their form allows it."""
    from attnloom.backends.gluon import launch_forward

    forms = launch_forward._forms

    def changed(call):
        return tuple(
            replace(form, ahead=True, narrow=True)
            for form in forms(call)
            if form.q_stages == 2 and not form.out_in_q
        )

    with (
        mock.patch.object(launch_forward, "_ready", {}),
        mock.patch.object(launch_forward, "_forms", changed),
    ):
        yield


def forward(mod: str, sizes: Sizes, dtype: torch.dtype = BF16, **given) -> None:
    block = given.pop("block_size", 128)
    case = Case(mod, sizes, dtype, block_size=block, **given)
    with ahead():
        check_attention(case, attnloom_with("cuda", backend="gluon"), backward=False)


MODS = ["plain", "causal", "document", "document_unsorted_per_batch", "key_padding", "nothing"]
MODS += ["every_second_row", "window_with_sinks", "dilated_by_head", "softcap", "bool_table_mask"]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("first", range(0, len(MODS), 4))
def test_tiles_drawn_ahead(head_dim: int, first: int) -> None:
    apart(f"mods({head_dim}, {first})")


def mods(head_dim: int, first: int) -> None:
    sizes = replace(SIZES, D=head_dim, Dv=head_dim)
    for mod in MODS[first : first + 4]:
        forward(mod, sizes, FP16 if mod == "document" else BF16)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths_ahead(head_dim: int) -> None:
    """Fewer tiles than programs, tiles of one step, of none, and more than the ring has slots."""
    apart(f"lengths({head_dim})")


def lengths(head_dim: int) -> None:
    sizes = replace(SIZES, D=head_dim, Dv=head_dim)
    for q_len, kv_len in ((1, 1), (63, 1), (129, 257), (17, 1000), (1000, 17), (1000, 1000)):
        forward("sliding_window", replace(sizes, Q_LEN=q_len, KV_LEN=kv_len))
    forward("document", replace(sizes, Q_LEN=700, KV_LEN=900), block_size=(512, 128))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_tiles_a_program_ahead(head_dim: int) -> None:
    """Programs draw several tiles each, and every launch leaves the counter at zero."""
    apart(f"many_tiles({head_dim})")


def many_tiles(head_dim: int) -> None:
    sizes = replace(SIZES, B=4, Hq=16, Hkv=4, Q_LEN=700, KV_LEN=700, D=head_dim, Dv=head_dim)
    for seed in range(3):
        forward("document", sizes, seed=seed)
        forward("plain", replace(sizes, Q_LEN=1500), seed=seed)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 192), (136, 192), (192, 144)])
def test_three_panels(head_dim: int, value_dim: int) -> None:
    apart(f"panels({head_dim}, {value_dim})")


def panels(head_dim: int, value_dim: int) -> None:
    from attnloom.backends.gluon import launch_forward
    from benchmarks.candidates import CANDIDATES, GluonForward

    changes = [c.change for c in CANDIDATES if isinstance(c.change, GluonForward)]
    form = next(change.form for change in changes if change.form.panels == 3)
    sizes = replace(SIZES, D=head_dim, Dv=value_dim)
    with (
        mock.patch.object(launch_forward, "_ready", {}),
        mock.patch.object(launch_forward, "_forms", lambda call: (form,)),
    ):
        for mod in ("plain", "causal", "document", "softcap", "alibi", "every_second_row"):
            case = Case(mod, sizes, FP16 if mod == "plain" else BF16, block_size=128)
            check_attention(case, attnloom_with("cuda", backend="gluon"), backward=False)
        many = replace(sizes, B=4, Hq=16, Hkv=4, Q_LEN=700, KV_LEN=700)
        check_attention(
            Case("causal", many, BF16, block_size=128),
            attnloom_with("cuda", backend="gluon"),
            backward=False,
        )


@pytest.mark.parametrize("mod", ["causal", "window_with_sinks", "every_second_row", "plain"])
def test_backward_from_lse_and_delta(mod: str) -> None:
    apart(f"backward({mod!r})")


def backward(mod: str) -> None:
    """D=128 and, padded to it, D=96; keys that end inside a tile, and scores that overflow; lists
    whose extent comes with the tile, for heads in groups and alone."""
    from attnloom.backends.gluon import configs_backward, ready_backward
    from tests.kernels.gluon_backward import check_gradients

    form = configs_backward.form_for(128, 128, may_mask=False, may_fold=True)
    form = replace(form, header=True)
    with mock.patch.object(ready_backward, "form_of", lambda operands: form):
        for head_dim, dtype, magnitude in ((128, BF16, 1.0), (96, FP16, 1.0), (128, BF16, 30.0)):
            sizes = replace(SIZES, D=head_dim, Dv=head_dim)
            check_gradients(Case(mod, sizes, dtype, block_size=128, magnitude=magnitude))
        check_gradients(Case("dilated_by_head", replace(sizes, Hkv=4), BF16, block_size=128))
        check_gradients(Case(mod, replace(sizes, Q_LEN=700), BF16, block_size=(512, 256)))
