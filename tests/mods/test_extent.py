"""Mods for other sizes than the call's are refused before anything is launched."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnloom import and_masks, create_block_mask, flex_attention, mods
from attnloom.errors import ShapeError
from attnloom.masking.extent import limits_of
from attnloom.trace import snapshots
from attnloom.trace.dependencies import dependencies

CAUSAL, WINDOW = mods.causal_mask, mods.sliding_window(3)
ZEROS = torch.zeros
LONGS = lambda *shape: torch.zeros(*shape, dtype=torch.int64)

# (mod, what the message begins with), each wrong for B=3, H=4, Q_LEN=KV_LEN=20
MASKS: dict[str, tuple[Callable[..., Any], str]] = {
    "documents": (mods.documents(LONGS(10)), "documents: ids has shape [10]"),
    "documents of keys": (
        mods.documents(LONGS(2, 20), LONGS(2, 19)),
        "documents: ids has shape [2, 20]",
    ),
    "on_documents": (
        mods.on_documents(CAUSAL, ids=LONGS(19)),
        "on_documents: ids has shape [19]",
    ),
    "per_head": (mods.per_head(WINDOW, CAUSAL), "per_head: mods has 2 elements"),
    "heads": (mods.per_head(WINDOW, CAUSAL, heads=[0, 1, 0]), "per_head: heads has 3 elements"),
    "prefix": (mods.prefix_lm([1, 2]), "prefix_lm: prefix_length has shape [2]"),
    "padding": (mods.right_padding([3, 4]), "right_padding: lengths has shape [2]"),
    "keys": (mods.key_padding(LONGS(3, 19)), "key_padding: attention_mask has shape [3, 19]"),
    "small canvas": (mods.neighborhood((4, 4), 3), "neighborhood: canvas is (4, 4)"),
    "large canvas": (mods.neighborhood((5, 5), 3), "neighborhood: canvas is (5, 5)"),
    "order": (
        mods.neighborhood((4, 4), 3, order=mods.morton_order((4, 4))),
        "neighborhood: canvas is (4, 4)",
    ),
    "tiles": (mods.sliding_tile((4, 4), 2, 1), "sliding_tile: canvas is (4, 4)"),
    "image": (mods.swin_window((4, 4), 2), "swin_window: canvas is (4, 4)"),
    "tree": (mods.token_tree([-1, 0]), "token_tree: parents has shape [2]"),
    "flags": (mods.longformer(2, LONGS(19)), "longformer: is_global has shape [19]"),
    "and": (and_masks(CAUSAL, mods.documents(LONGS(10))), "documents: ids"),
    "not": (mods.not_mask(mods.documents(LONGS(10))), "documents: ids"),
    "xor": (mods.xor_masks(CAUSAL, mods.documents(LONGS(10))), "documents: ids"),
    "offset": (mods.offset(mods.right_padding([3, 4]), 5), "right_padding: lengths"),
    "offsets": (mods.offset(CAUSAL, LONGS(2)), "offset: q_offset has shape [2]"),
    "offsets of keys": (mods.offset(CAUSAL, 1, LONGS(2)), "offset: kv_offset has shape [2]"),
    "images": (mods.flamingo(LONGS(19), 4), "flamingo: media_locations has shape [19]"),
    "places": (
        mods.logical_to_physical(CAUSAL, LONGS(19)),
        "logical_to_physical: q_positions has shape [19]",
    ),
}
SCORES: dict[str, tuple[Callable[..., Any], str]] = {
    "few slopes": (mods.alibi(2), "alibi: num_heads is 2"),
    "many slopes": (mods.alibi(8), "alibi: num_heads is 8"),
    "decay": (mods.distance_decay(8), "distance_decay: num_heads is 8"),
    "sandwich": (mods.sandwich(8, 20), "sandwich: num_heads is 8"),
    "transposed": (mods.t5_bias(ZEROS(4, 32)), "t5_bias: table has shape [4, 32]"),
    "relative": (mods.relative_bias(ZEROS(3, 7)), "relative_bias: table has shape [3, 7]"),
    "rows": (mods.additive_bias(ZEROS(19, 20)), "additive_bias: bias has shape [19, 20]"),
    "columns": (mods.additive_bias(ZEROS(4, 20, 19)), "additive_bias: bias has shape"),
    "batch": (mods.additive_bias(ZEROS(2, 1, 20, 20)), "additive_bias: bias has shape"),
    "head_bias": (mods.head_bias(ZEROS(3)), "head_bias: bias has shape [3]"),
    "pairs": (mods.pair_bias(ZEROS(20, 19)), "pair_bias: bias has shape [20, 19]"),
    "factor": (mods.pair_bias(ZEROS(20, 20), ZEROS(3)), "pair_bias: factor has shape [3]"),
    "temperature": (mods.head_temperature(ZEROS(3)), "head_temperature: temperature has shape"),
    "positions": (mods.position_temperature(ZEROS(19)), "position_temperature: scale has shape"),
    "graph": (
        mods.graphormer_spatial(LONGS(19, 19), ZEROS(2, 4)),
        "graphormer_spatial: distances has shape [19, 19]",
    ),
    "edges": (
        mods.graphormer_edge(LONGS(3, 20, 20, 2), ZEROS(2, 5, 3), ZEROS(2, 4, 3)),
        "graphormer_edge: features has shape [2, 5, 3]",
    ),
    "rope": (
        mods.latent_rope(ZEROS(3, 4, 20, 2), ZEROS(3, 19, 2), 1.0),
        "latent_rope: k_rope has shape [3, 19, 2]",
    ),
    "image": (mods.swin_bias((4, 4), 2, ZEROS(9, 4)), "swin_bias: canvas is (4, 4)"),
    "compose": (mods.compose(mods.softcap(3.0), mods.alibi(8)), "alibi: num_heads is 8"),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    mod, begin = MASKS[name]
    with pytest.raises(ShapeError, match="Make the mod for the sizes of the call") as caught:
        create_block_mask(mod, 3, 4, 20, 20)
    assert str(caught.value).startswith(begin)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, backend: str) -> None:
    mod, begin = SCORES[name]
    x = torch.zeros(3, 4, 20, 8)
    with pytest.raises(ShapeError) as caught:
        flex_attention(x, x, x, score_mod=mod, kernel_options={"backend": backend})  # type: ignore[arg-type]
    assert str(caught.value).startswith(begin)


FITTING = {
    "larger": mods.documents(LONGS(30)),
    "shared": mods.documents(LONGS(1, 20)),
    "canvas": mods.neighborhood((4, 5), 3),
    "canvas in documents": mods.on_documents(mods.neighborhood((2, 5), 2), cu_seqlens=[0, 10, 20]),
    "entries are documents": mods.on_documents(mods.prefix_lm([1, 2]), cu_seqlens=[0, 10, 20]),
    "packed into part of a row": mods.documents_from_cu_seqlens([0, 4, 10]),
    "a mod in part of a row": mods.on_documents(CAUSAL, cu_seqlens=[0, 4, 10]),
    "a prefix in part of a row": mods.shared_prefix(3, [0, 4, 10]),
    "part": mods.offset(mods.neighborhood((5, 5), 3), 5, 5),
}


@pytest.mark.parametrize("name", FITTING)
def test_what_fits_is_taken(name: str) -> None:
    assert create_block_mask(FITTING[name], 3, 4, 20, 20).shape == (3, 4, 20, 20)


def test_notes_survive_pickling_and_keep_the_trace() -> None:
    mask = create_block_mask(mods.longformer(2, LONGS(20)), None, None, 20, 20)
    copied = pickle.loads(pickle.dumps(mask))
    assert limits_of(copied.mask_mod) == limits_of(mask.mask_mod) != []
    assert dependencies(mods.alibi(4)) is not None
    assert dependencies(mods.documents(LONGS(20))) is not None


@pytest.mark.parametrize(
    "make",
    [
        mods.softcap,
        lambda scale: mods.latent_rope(
            *(
                torch.linspace(-1, 1, n * 20 * 2).view(*s, 20, 2)
                for n, s in ((2, (1, 2)), (1, (1,)))
            ),
            scale,
        ),
    ],
    ids=["softcap", "latent_rope"],
)
def test_learned_numbers_get_their_gradient(make: Callable[[Any], Any]) -> None:
    x = torch.randn(1, 2, 20, 8)
    found = []
    for backend in ("tiled", "reference"):
        number = torch.tensor([1.5], requires_grad=True)
        out = flex_attention(x, x, x, score_mod=make(number), kernel_options={"backend": backend})  # type: ignore[arg-type]
        (grad,) = torch.autograd.grad(out.square().sum(), number)
        assert grad.shape == (1,) and grad.abs() > 1e-4
        found.append(grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_function_of_any_arguments_is_of_either_kind() -> None:
    later = create_block_mask(mods.not_mask(lambda *a: a[2] >= a[3]), None, None, 20, 20).to_mask()
    assert torch.equal(later, ~create_block_mask(CAUSAL, None, None, 20, 20).to_mask())


@pytest.mark.parametrize("mod", [mods.causal_mask, mods.noop_mask, mods.prefix_lm([1, 2])])
def test_mods_of_the_library_are_recognised(mod: Callable[..., Any]) -> None:
    """A repeated call pays for looking at its mods; one that is not recognised is traced again."""
    assert dependencies(mod) is not None
    found = snapshots.take(mod)
    assert found is not None
    assert found[0].tensors(mod) is not None
    other = functools.partial(mod) if mod is mods.noop_mask else mods.sliding_window(1)
    assert found[0].tensors(other) is None
