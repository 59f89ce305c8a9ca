"""Every argument of every public function, given what it cannot be: an error of attnloom names the
argument, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import attnloom
from attnloom import BlockMask
from attnloom.errors import AttnloomError, DeviceError, OptionError, ShapeError, UnsupportedError
from tests.api.mods import causal

INT = torch.int32
Q = torch.zeros(1, 2, 32, 16)
OBJECTS: tuple[Any, ...] = ("x", 2.5, [1], {}, object())
TENSORS: tuple[Any, ...] = (torch.zeros(2, 2), torch.zeros(3, dtype=torch.complex64), np.zeros(3))

# Kind of argument -> what it cannot be.
WRONG: dict[str, tuple[Any, ...]] = {
    "tensor": (None, 3, True, *OBJECTS, torch.zeros(1, 2, 32, 16, dtype=torch.complex64)),
    "optional tensor": (3, True, *OBJECTS),
    "int": (*OBJECTS, *TENSORS, -1, -7),
    "required int": (None, *OBJECTS, *TENSORS, -1, -7),
    "seed": (*OBJECTS, *TENSORS, None),
    "flag": (*OBJECTS, *TENSORS, None, 7),
    "device": (3, True, *OBJECTS, *TENSORS, "cuda:99", "meta"),
    "mod": (3, True, "x", 2.5, [1], {}, object(), np.zeros(3)),
    "pair": (3, True, "x", 2.5, [1], {}, object(), np.zeros(3), (1,), (-1, 5), ("a", 1), (1.5, 2)),
    "block": (None, 0, -16, 48, 8, (16,), (16, 16, 16), (16.0, 16), *OBJECTS, *TENSORS),
    "options": (
        3,
        True,
        "x",
        [1],
        object(),
        *TENSORS,
        {"backnd": "cpu"},
        {1: 2},
        *({name: Q} for name in ("backend", "exact_math", "fp32_precision", "BACKEND")),
    ),
    "aux": (3, True, *OBJECTS, *TENSORS, (True, False)),
    "scale": (True, *OBJECTS[:1], *OBJECTS[2:], *TENSORS, float("nan"), 1j),
    "dtype": (3, *OBJECTS, *TENSORS, torch.int8, "int8"),
}
LIVE = torch.ones(2, 2, dtype=torch.bool)
IDS = torch.zeros(32, dtype=torch.int64)
CU = torch.tensor([0, 16, 32])
KINDS = {
    attnloom.flex_attention: (
        {"query": Q, "key": Q, "value": Q},
        {"query": "tensor", "key": "tensor", "value": "tensor", "score_mod": "mod",
         "block_mask": "mod", "scale": "scale", "enable_gqa": "flag", "return_lse": "flag",
         "kernel_options": "options", "return_aux": "aux"},
    ),
    attnloom.create_block_mask: (
        {"mask_mod": causal, "B": 1, "H": 1, "Q_LEN": 32, "KV_LEN": 32},
        {"mask_mod": "mod", "B": "int", "H": "int", "Q_LEN": "required int",
         "KV_LEN": "required int", "device": "device", "BLOCK_SIZE": "block",
         "separate_full_blocks": "flag", "compute_dq_write_order": "flag", "dq_kv_order": "flag"},
    ),
    attnloom.create_mask: (
        {"mod_fn": causal, "B": 1, "H": 1, "Q_LEN": 8, "KV_LEN": 8},
        {"mod_fn": "mod", "B": "int", "H": "int", "Q_LEN": "required int",
         "KV_LEN": "required int"},
    ),
    BlockMask.from_dense: (
        {"mask": torch.ones(32, 32, dtype=torch.bool)}, {"mask": "tensor", "BLOCK_SIZE": "block"},
    ),
    BlockMask.from_block_bool: (
        {"live": LIVE, "full": LIVE, "BLOCK_SIZE": 16},
        {"live": "tensor", "full": "optional tensor", "BLOCK_SIZE": "block", "mask_mod": "mod",
         "seq_lengths": "pair"},
    ),
    BlockMask.from_key_ranges: (
        {"start": IDS, "stop": IDS, "kv_len": 32},
        {"start": "tensor", "stop": "tensor", "kv_len": "required int", "BLOCK_SIZE": "block"},
    ),
    BlockMask.from_cu_seqlens: (
        {"cu_q": CU, "cu_kv": CU},
        {"cu_q": "tensor", "cu_kv": "optional tensor", "causal": "flag", "mask_mod": "mod",
         "q_len": "int", "kv_len": "int", "BLOCK_SIZE": "block"},
    ),
    BlockMask.from_document_ids: (
        {"ids_q": IDS, "ids_kv": IDS},
        {"ids_q": "tensor", "ids_kv": "optional tensor", "mask_mod": "mod", "BLOCK_SIZE": "block"},
    ),
    BlockMask.from_kv_blocks: (
        {"kv_num_blocks": torch.ones(1, 1, 2, dtype=INT), "BLOCK_SIZE": 16,
         "kv_indices": torch.zeros(1, 1, 2, 2, dtype=INT)},
        {"kv_num_blocks": "tensor", "kv_indices": "tensor", "BLOCK_SIZE": "block",
         "mask_mod": "mod", "seq_lengths": "pair"},
    ),
    attnloom.explain: (
        {"mask_mod": causal, "measure": False},
        {"score_mod": "mod", "mask_mod": "mod", "q_len": "int", "kv_len": "int",
         "batch": "int", "heads": "int", "kv_heads": "int",
         "head_dim": "required int", "dtype": "dtype", "block_size": "block", "device": "device",
         "kernel_options": "options", "measure": "flag"},
    ),
    attnloom.check_mod: ({"mask_mod": causal, "q_len": 16}, {"seed": "seed", "dtype": "dtype"}),
}  # fmt: skip
# Where the text calls the argument by another name than its own.
CALLED = {"mod_fn": "mask_mod", "block_size": "BLOCK_SIZE"}
CASES = [
    pytest.param(function, base, argument, kind, id=f"{function.__name__}-{argument}")
    for function, (base, arguments) in KINDS.items()
    for argument, kind in arguments.items()
]


@pytest.mark.parametrize(("function", "base", "argument", "kind"), CASES)
def test_misuse(
    function: Callable[..., Any], base: dict[str, Any], argument: str, kind: str
) -> None:
    for wrong in WRONG[kind]:
        with pytest.raises(AttnloomError) as caught:
            function(**{**base, argument: wrong})
        text = str(caught.value)
        assert CALLED.get(argument, argument) in text, (wrong, text)
        assert "\n" not in text, text


MASK = attnloom.create_block_mask(causal, 1, 2, 64, 64, device="cpu", BLOCK_SIZE=16)


def reference(score_mod):
    return attnloom.flex_attention(Q, Q, Q, score_mod, kernel_options={"backend": "reference"})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: MASK.rows(None, 3), "start is None; it must be an int."),
        (lambda: MASK.rows(0, 2.5), "stop is 2.5; it must be an int."),
        (lambda: MASK.crop("a", 3), "q_len is 'a'; it must be an int."),
        (lambda: MASK.crop(3, 3.0), "kv_len is 3.0; it must be an int."),
        (lambda: MASK.to("gpu"), "device is 'gpu', which torch does not know"),
        (lambda: MASK.to(3), "device is 3, which torch does not know"),
        (lambda: MASK.to_string(grid_size=2.5), "grid_size is 2.5 and limit 4"),
        (lambda: MASK.to_string(grid_size=(1, 2, 3)), "grid_size is (1, 2, 3)"),
        (lambda: MASK.to_string(grid_size=0), "grid_size is 0"),
        (lambda: MASK.to_string(limit="x"), "limit 'x'"),
        (lambda: setattr(MASK, "seq_lengths", 32), "seq_lengths is 32; it must be a pair"),
        (lambda: attnloom.and_masks(3), "argument 0 is 3; every argument must be a mask_mod"),
        (lambda: attnloom.or_masks(causal, Q), "argument 1 is a tensor of shape [1, 2, 32, 16]"),
        (lambda: attnloom.and_masks(lambda s, b, h, q, kv: s), "takes 5 arguments, which makes it"),
        (lambda: attnloom.or_masks(causal, lambda q, kv: q), "takes 2 arguments; a mask_mod takes"),
        (lambda: reference(lambda s, b, h, q, kv: None), "a NoneType. Did you forget `return`?"),
        (lambda: reference(lambda s, b, h, q, kv: torch.ones(3)), "but returned shape [3]."),
        (lambda: reference(3), "score_mod is a int; it must be a function"),
    ],
)  # fmt: skip
def test_misuse_of_a_mask(call, said):
    with pytest.raises(AttnloomError) as caught:
        call()
    assert said in str(caught.value)


def test_texts():
    cases: list[tuple[type[AttnloomError], Callable[[], Any], str]] = [
        (UnsupportedError, lambda: attnloom.flex_attention(Q.to_sparse(), Q, Q),
         "query has the layout torch.sparse_coo; flex_attention takes plain strided tensors. Use "
         "query.to_dense(), and a block_mask for what is absent."),
        (OptionError, lambda: attnloom.flex_attention(Q, Q, Q, return_aux=True),
         "return_aux is True; it must be an AuxRequest, for example attnloom.AuxRequest(lse=True, "
         "max_scores=False), or None."),
        (OptionError, lambda: attnloom.flex_attention(Q, Q, Q, enable_gqa="yes"),
         "enable_gqa is 'yes'; it must be True or False."),
        (OptionError, lambda: BlockMask.from_dense([[True]]),
         "mask is [[True]]; it must be a torch.Tensor."),
        (ShapeError, lambda: BlockMask.from_key_ranges(IDS, IDS, -1),
         "kv_len is -1; lengths are 0 or more."),
        (ShapeError, lambda: BlockMask.from_block_bool(LIVE, BLOCK_SIZE=16, seq_lengths=(32,)),
         "seq_lengths is (32,); it must be a pair (Q_LEN, KV_LEN) of ints, 0 or more."),
        (DeviceError, lambda: attnloom.create_block_mask(causal, 1, 1, 8, 8, device="meta"),
         "device is 'meta', whose tensors have no values; what a mask keeps follows from them. "
         "Build it with device='cpu', then move it with .to('meta')."),
    ]  # fmt: skip
    for error, call, text in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value) == text


def test_torchs_own_aux_request_is_taken():
    from torch.nn.attention.flex_attention import AuxRequest

    aux = attnloom.flex_attention(Q, Q, Q, return_aux=AuxRequest(lse=True))[1]
    assert aux.lse is not None
    assert aux.max_scores is None


def test_ints_and_numpy_bools_are_flags():
    for flag in (0, 1, np.True_):
        assert attnloom.flex_attention(Q, Q, Q, enable_gqa=flag).shape == Q.shape


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_a_mask_for_a_gpu_that_is_not_there():
    with pytest.raises(DeviceError, match=r"device is 'cuda', but torch sees 0 CUDA devices here"):
        attnloom.create_block_mask(causal, 1, 1, 8, 8, device="cuda")
