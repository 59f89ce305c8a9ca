"""Which problems the Gluon backward computes itself, and which the portable kernels do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import attnloom
from attnloom.backends.registry import AttentionCall
from attnloom.ir.node import DType
from attnloom.plan.problem import KernelOptions
from attnloom.trace.tracer import trace_mask, trace_score
from tests.kernels.cross_compile import device_is

CPU = torch.device("cpu")
SLOPES = torch.rand(8)
LEARNED = torch.rand(8, requires_grad=True)
BY_KEY = torch.rand(2048, requires_grad=True)
BY_QUERY = torch.rand(2048, requires_grad=True)
BY_DISTANCE = torch.rand(4096, requires_grad=True)
FULL = torch.rand(2, 8, 2048, 2048, dtype=torch.bfloat16, requires_grad=True)
ROWS = torch.rand(8, 4, requires_grad=True)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def alibi(score, b, h, q_idx, kv_idx):
    return score + SLOPES[h] * (kv_idx - q_idx)


def learned(score, b, h, q_idx, kv_idx):
    return score + LEARNED[h] * (kv_idx - q_idx)


def softcap(score, b, h, q_idx, kv_idx):
    return 30 * torch.tanh(score / 30)


def make_call(
    D: int = 64,
    Hkv: int = 8,
    KV_LEN: int = 2048,
    score_mod: Any = None,
    block: int | tuple[int, int] = 128,
    Dv: int | None = None,
    **options: Any,
) -> AttentionCall:
    query = torch.empty(2, 8, 2048, D, dtype=torch.bfloat16)
    key = torch.empty(2, Hkv, KV_LEN, D, dtype=torch.bfloat16)
    value = torch.empty(2, Hkv, KV_LEN, Dv or D, dtype=torch.bfloat16)
    blocks = attnloom.create_block_mask(causal, None, None, 2048, KV_LEN, "cpu", BLOCK_SIZE=block)
    score = None if score_mod is None else trace_score(score_mod, DType.F32, CPU)
    mask = trace_mask(causal, CPU)
    return AttentionCall(
        query, key, value, score, mask, blocks.lists(), 0.125, KernelOptions(**options)
    )


def why(call: AttentionCall) -> str | None:
    from attnloom.backends.gluon import ready_backward

    with device_is("sm_90"):
        return ready_backward.portable(call)


def takes_wide(call: AttentionCall) -> bool:
    from attnloom.backends.gluon import launch_wide

    with device_is("sm_90"):
        return launch_wide.takes(call)


@pytest.mark.parametrize("score_mod", [None, softcap, alibi])
@pytest.mark.parametrize("D", [40, 48, 64, 72, 80, 96, 128])
def test_what_was_measured_runs_in_gluon(score_mod: Any, D: int) -> None:
    """Portable kernels cover 40 and 72 columns by 48 and 80."""
    assert why(make_call(D, score_mod=score_mod)) is None


@pytest.mark.parametrize(
    ("score_mod", "is_slower"),
    [
        (learned, False),
        (lambda s, b, h, q, kv: s + BY_KEY[kv], False),
        (lambda s, b, h, q, kv: s + FULL[b, h, q, kv], False),
        (lambda s, b, h, q, kv: s + FULL[b, h, q, kv] * BY_QUERY[q], True),
        (lambda s, b, h, q, kv: s * BY_QUERY[q], True),
        (lambda s, b, h, q, kv: s + BY_DISTANCE[q - kv + 2047], True),
        (lambda s, b, h, q, kv: s * (ROWS[h] * ROWS[h]).sum(), True),
    ],
    ids=["head", "key", "score", "score and query", "query", "distance", "row"],
)
def test_gradients_that_are_summed_first_or_stored_leave_in_gluon(
    score_mod: Any, is_slower: bool
) -> None:
    found = why(make_call(score_mod=score_mod))
    assert found == (
        "gradients of captured tensors are added to in every step." if is_slower else None
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"deterministic": True}, "bitwise repeatable"),
        ({"D": 200}, "wider than 128"),
        ({"D": 100}, "multiples of 16 bytes"),
        ({"block": 64}, "smaller than 64 x 128"),
        ({"block": (32, 128)}, "smaller than 64 x 128"),
    ],
)
def test_what_the_kernel_cannot_do_is_portable_whoever_asks(given: Any, reason: str) -> None:
    for backend in ("auto", "gluon"):
        found = why(make_call(**{"backend": backend, **given}))
        assert found is not None and reason in found


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"D": 16, "Dv": 80}, "padded to 64 and 128"),
        ({"D": 32}, "padded to 64 and 64"),
        ({"Hkv": 1, "KV_LEN": 1024}, "few keys"),
        ({"score_mod": lambda s, b, h, q, kv: s * BY_QUERY[q]}, "added to in every step"),
        ({"score_mod": alibi, "Hkv": 4, "KV_LEN": 4096}, "tell heads apart"),
    ],
)
def test_what_was_not_seen_faster_is_portable_under_auto(given: Any, reason: str) -> None:
    call = make_call(**given)
    found = why(call)
    assert found is not None and reason in found
    assert why(replace(call, options=KernelOptions(backend="gluon"))) is None


@pytest.mark.parametrize(
    ("D", "score_mod", "is_slower"),
    [
        (64, None, False),
        (64, softcap, True),
        (80, None, False),
        (128, None, False),
        (128, softcap, True),
    ],
)
def test_masks_with_few_blocks_a_row_were_seen_faster_without_a_score_mod_alone(
    D: int, score_mod: Any, is_slower: bool
) -> None:
    """The portable kernels leave out more of them in blocks of 64."""
    from attnloom.backends.gluon import ready_backward

    with mock.patch.object(ready_backward, "refined", lambda call: replace(call)):
        found = why(make_call(D, score_mod=score_mod))
        assert found == ("blocks of 64 leave out many scores of those of the mask." if is_slower
                         else None)  # fmt: skip
        assert not takes_wide(make_call(192))


@pytest.mark.parametrize("D", [136, 144, 160, 192])
@pytest.mark.parametrize("Dv", [8, 64, 192])
def test_heads_of_129_to_192_have_a_kernel_of_their_own(D: int, Dv: int) -> None:
    assert takes_wide(make_call(D, Dv=Dv, score_mod=softcap))


@pytest.mark.parametrize(
    "given",
    [
        {"D": 128},
        {"D": 200},
        {"D": 140},
        {"D": 192, "deterministic": True},
        {"D": 192, "block": 64},
        {"D": 192, "score_mod": learned},
        {"D": 192, "Hkv": 1, "KV_LEN": 1024},
    ],
    ids=["narrow", "too wide", "no 16 bytes", "repeatable", "small blocks", "learns", "few keys"],
)
def test_what_the_kernel_of_wide_heads_leaves_to_others(given: Any) -> None:
    call = make_call(**given)
    assert not takes_wide(call)
    # an order of the user, which is slower, but not one that the kernel cannot follow
    by_name = replace(call, options=replace(call.options, backend="gluon"))
    assert takes_wide(by_name) == ("KV_LEN" in given)


def test_values_wider_than_192_are_portable() -> None:
    assert not takes_wide(make_call(192, Dv=200))


DOCUMENTS = torch.arange(2048) * 12 // 2048


def documents(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (DOCUMENTS[q_idx] == DOCUMENTS[kv_idx])


def packed(
    heads: int = 16, heads_kv: int = 16, mask_mod: Any = documents, block: Any = 128, **others: Any
) -> AttentionCall:
    """16 batch entries of 2,048 tokens."""
    query = torch.empty(16, heads, 2048, 128, dtype=torch.bfloat16, device="meta")
    key = torch.empty(16, heads_kv, 2048, 128, dtype=torch.bfloat16, device="meta")
    blocks = attnloom.create_block_mask(mask_mod, None, None, 2048, 2048, "cpu", BLOCK_SIZE=block)
    found = AttentionCall(
        query, key, key, None, trace_mask(mask_mod, CPU), blocks.lists(), 0.125, KernelOptions()
    )
    return replace(found, **others)


def is_swept(call: AttentionCall) -> bool:
    from attnloom.backends.gluon import ready_backward

    with device_is("sm_90"):
        return ready_backward._form_of(call).sweeps


def test_short_documents_are_swept_and_repeat() -> None:
    assert is_swept(packed())
    assert why(packed(options=KernelOptions(deterministic=True))) is None


@pytest.mark.parametrize(
    "given",
    [
        {"mask_mod": causal},
        {"heads_kv": 4},
        {"heads": 9, "heads_kv": 9},
        {"block": (128, 256)},
        {"score": trace_score(softcap, DType.F32, CPU)},
        {"scale": -1.0},
        {"blocks": None},
        {"mask": None},
    ],
    ids=[
        "many keys a query", "keys of several heads", "processors without a head", "large blocks",
        "score_mod", "scores that do not fold", "no lists", "no mask",
    ],
)  # fmt: skip
def test_other_problems_are_not_swept(given: Any) -> None:
    assert not is_swept(packed(**given))


def test_heads_in_use_have_the_forms_that_were_timed() -> None:
    from attnloom.backends.gluon import configs_backward, launch_wide

    assert configs_backward.form_for(48, 64, may_mask=True, may_fold=True).persistent
    assert not configs_backward.form_for(64, 64, may_mask=True, may_fold=False).persistent
    for score_mod, fold in ((None, True), (softcap, False)):
        assert launch_wide.form_of(make_call(192, score_mod=score_mod)).fold == fold


@pytest.mark.parametrize("may_mask", [False, True])
def test_columns_past_the_heads_are_left_out_in_whole_slices(may_mask: bool) -> None:
    from attnloom.backends.gluon.configs_backward import form_for

    for head_dim, columns in ((64, 64), (72, 80), (96, 96), (112, 112), (120, 128), (128, 128)):
        assert form_for(head_dim, 72, may_mask, may_fold=True).columns(head_dim) == columns
        assert form_for(head_dim, 72, may_mask, may_fold=False).columns(96) == 128


def test_dk_takes_dscore_from_shared_memory_where_it_was_timed() -> None:
    from attnloom.backends.gluon.configs_backward import form_for

    found = {
        (d, dv): form_for(d, dv, may_mask=True, may_fold=True).dk_shared
        for d, dv in ((72, 72), (96, 40), (112, 112), (96, 128), (128, 96), (64, 64))
    }
    assert [dims for dims, shared in found.items() if shared] == [(72, 72), (96, 40), (112, 112)]
    assert not form_for(96, 96, may_mask=False, may_fold=True).dk_shared


@pytest.mark.parametrize("may_mask", [False, True])
def test_products_have_96_columns_where_both_heads_do(may_mask: bool) -> None:
    from attnloom.backends.gluon.configs_backward import form_for

    heads = ((80, 80), (88, 88), (96, 96), (88, 96), (96, 80), (96, 64), (96, 104), (64, 64))
    native = [dims for dims in heads if form_for(*dims, may_mask, may_fold=True).native]
    assert native == [(88, 88), (96, 96), (88, 96)]
    # from 0 under a mask, from -lse without one
    assert form_for(96, 96, may_mask, may_fold=True).fold != may_mask
    for others in ({"may_fold": False}, {"may_fold": True, "sees_few": True}):
        found = form_for(96, 96, may_mask, **others)
        assert not found.native or (not may_mask and others["may_fold"])
    assert not form_for(96, 96, True, may_fold=True, sweeps=True).native


@pytest.mark.parametrize(("spills", "tried"), [((8,), 1), ((9, 32), 2), ((9, 33), 2)])
def test_long_steps_that_spill_give_way(spills: tuple[int, ...], tried: int) -> None:
    from attnloom.backends.gluon import configs_backward, launch_backward, ready_backward

    first = configs_backward.form_for(64, 64, True, True, sees_many=True, long_steps=True)
    usual = configs_backward.form_for(64, 64, True, True)
    made = [mock.Mock(main=mock.Mock(spills=n)) for n in spills]
    prepare = mock.Mock(side_effect=made)
    with (
        mock.patch.object(ready_backward, "_ready", {}),
        mock.patch.object(ready_backward, "key_of", lambda operands: "key"),
        mock.patch.object(ready_backward, "form_of", lambda operands: first),
        mock.patch.object(ready_backward, "prepare", prepare),
        mock.patch.object(launch_backward, "Mods", mock.Mock()),
        mock.patch.object(launch_backward, "has_first_numbers", lambda call: True),
        mock.patch.object(launch_backward, "_run", lambda operands, ready: ready),
    ):
        found = [launch_backward._run_known(mock.Mock()) for _ in range(2)]
    assert found == [made[-1] if spills[-1] <= 32 else None] * 2
    assert [call.args[1] for call in prepare.call_args_list] == [first, usual][:tried]


def test_a_wide_kernel_that_spills_is_asked_once() -> None:
    """Its results are not used either: a later call's would differ from them."""
    from attnloom.backends.gluon import launch_wide

    ready = mock.Mock()
    ready.main.spills = launch_wide.FEW_SPILLS + 1
    operands = mock.Mock()
    with (
        mock.patch.object(launch_wide, "_ready", {}),
        mock.patch.object(launch_wide, "_prepare", mock.Mock(return_value=ready)) as prepare,
        mock.patch.object(launch_wide, "_run", mock.Mock(return_value="gradients")) as run,
        mock.patch.object(launch_wide.ready_backward, "key_of", lambda operands: "key"),
    ):
        assert [launch_wide.backward(operands) for _ in range(2)] == [None, None]
        assert (prepare.call_count, run.call_count) == (1, 1)
        launch_wide._ready.clear()
        ready.main.spills -= 1
        assert launch_wide.backward(operands) == "gradients"
