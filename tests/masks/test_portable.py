"""Masks across borders: pickle, worker processes, devices, pytrees, copies."""

from __future__ import annotations

import copy
import functools
import io
import multiprocessing
import pickle
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch.utils import _pytree as pytree

from attnloom.api.masks import and_masks, create_block_mask, or_masks
from attnloom.block_mask import BlockMask
from attnloom.errors import ModError
from attnloom.masking.captures import captured_tensors, map_captures
from attnloom.masking.pickling import dump_mod, load_mod

TABLE = torch.arange(64) % 5


def importable(b, h, q, kv):
    return TABLE[q] == TABLE[kv]


def closure(ids):
    return lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv)


def nested(ids):
    inner = closure(ids)
    width = 7

    def mod(b, h, q, kv, *, extra=ids):
        return inner(b, h, q, kv) | ((q - kv).abs() < width) | (extra[kv] == 0)

    return mod


@dataclass
class Windows:
    widths: torch.Tensor

    def __call__(self, b, h, q, kv):
        return (q - kv).abs() < self.widths[h]

    def method(self, b, h, q, kv):
        return self(b, h, q, kv) & (q >= kv)


def recursive():
    def mod(b, h, q, kv, depth=2):
        return (q >= kv) if depth == 0 else mod(b, h, q, kv, depth - 1) & (q - kv != depth)

    return mod


IDS = torch.arange(64) // 9
MODS = {
    "importable": importable,
    "closure": closure(IDS),
    "nested": nested(IDS),
    "global": lambda b, h, q, kv: TABLE[q] >= TABLE[kv],
    "module": lambda b, h, q, kv: torch.logical_and(q >= kv, kv > 2),
    "partial": functools.partial(lambda t, b, h, q, kv: t[q] != t[kv], IDS),
    "object": Windows(torch.tensor([3, 30])),
    "method": Windows(torch.tensor([3, 30])).method,
    "combined": or_masks(and_masks(closure(IDS), importable), lambda b, h, q, kv: kv == 0),
    "recursive": recursive(),
    "container": (lambda pair: lambda b, h, q, kv: pair["a"][0][q] == pair["a"][0][kv])(
        {"a": [IDS]}
    ),
}
CONSTRUCTED = {
    "dense": lambda: BlockMask.from_dense(torch.ones(64, 64, dtype=torch.bool).tril(3), 16),
    "packed": lambda: BlockMask.from_cu_seqlens(
        torch.tensor([0, 20, 64]), mask_mod=lambda b, h, q, kv: q >= kv, BLOCK_SIZE=16
    ),
    "rows": lambda: create_block_mask(closure(IDS), 2, 2, 64, 64, BLOCK_SIZE=16).rows(5, 40),
    "slice": lambda: create_block_mask(MODS["object"], 2, 2, 64, 64, BLOCK_SIZE=16)[1, 1:, [2, 0]],
}


def build(name: str) -> BlockMask:
    if name in CONSTRUCTED:
        return CONSTRUCTED[name]()
    return create_block_mask(MODS[name], 1, 2, 64, 64, device="cpu", BLOCK_SIZE=16)


EVERY = pytest.mark.parametrize("name", [*MODS, *CONSTRUCTED])


def assert_equal(a: BlockMask, b: BlockMask) -> None:
    assert a.shape == b.shape
    assert a.BLOCK_SIZE == b.BLOCK_SIZE
    assert torch.equal(a.lists().entries, b.lists().entries)
    assert torch.equal(a.lists().row_offsets, b.lists().row_offsets)
    assert torch.equal(a.to_mask(), b.to_mask())


@EVERY
def test_pickle(name):
    mask = build(name)
    assert_equal(pickle.loads(pickle.dumps(mask)), mask)


@EVERY
def test_torch_save_and_deepcopy(name):
    mask = build(name)
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    assert_equal(torch.load(file, weights_only=False), mask)
    assert_equal(copy.deepcopy(mask), mask)


class Masks(torch.utils.data.Dataset):
    """Builds a mask with a lambda inside the worker."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        ids = torch.arange(64) // (index + 5)
        return create_block_mask(lambda b, h, q, kv: ids[q] == ids[kv], 1, 1, 64, 64, BLOCK_SIZE=16)


def test_masks_come_out_of_dataloader_workers():
    loader = torch.utils.data.DataLoader(
        Masks(), batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    for index, mask in enumerate(loader):
        assert_equal(mask, Masks()[index])


def test_lambda_reaches_a_spawned_process():
    """A new interpreter, where nothing but importable modules is known."""
    mask = build("nested")
    code = (
        "import pickle, sys, torch\n"
        "mask = pickle.load(sys.stdin.buffer)\n"
        "sys.stdout.write(str(int(mask.to_mask().sum())))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(mask), capture_output=True, check=False
    )
    assert ran.returncode == 0, ran.stderr.decode()
    assert int(ran.stdout) == int(mask.to_mask().sum())


def test_importable_mods_pickle_by_name():
    code, tensors = dump_mod(importable)
    assert len(code) < 200
    assert load_mod(code, tensors) is importable


def test_shared_tensor_is_pickled_once():
    _, tensors = dump_mod(MODS["nested"])
    assert len(tensors) == 1
    assert tensors[0] is IDS


def test_unpicklable_capture_names_the_mod():
    lock = multiprocessing.Lock()

    def guarded(b, h, q, kv):
        return q >= kv if lock else q < kv

    mask = build("closure")
    mask.mask_mod = guarded
    with pytest.raises(ModError, match=r"mask_mod '.*guarded' cannot be pickled"):
        pickle.dumps(mask)


def test_pickle_of_another_python_is_refused(monkeypatch):
    code, tensors = dump_mod(MODS["closure"])
    monkeypatch.setattr("attnloom.masking.pickling._PYTHON", (2, 7))
    with pytest.raises(ModError, match=r"pickled by Python 3\.\d+ and is read by 2\.7"):
        load_mod(code, tensors)


@EVERY
def test_to_moves_lists_and_captures(name):
    mask = build(name)
    moved = mask.to("meta")
    assert moved.device.type == "meta"
    assert all(t.device.type == "meta" for t in captured_tensors(moved.mask_mod))
    assert len(captured_tensors(moved.mask_mod)) == len(captured_tensors(mask.mask_mod))
    assert mask.device.type == "cpu"
    assert all(t.device.type == "cpu" for t in captured_tensors(mask.mask_mod))
    assert_equal(mask.to("cpu"), mask)


def test_to_the_same_device_keeps_the_mod():
    mask = build("nested")
    assert mask.to("cpu").mask_mod is mask.mask_mod


def test_to_leaves_modules_to_their_owner():
    module = torch.nn.Linear(2, 2)
    mod = lambda b, h, q, kv: module.weight[0, 0] > 0
    assert map_captures(mod, torch.Tensor, lambda t: t.to("meta")) is mod


@EVERY
def test_pytree_round_trip(name):
    mask = build(name)
    leaves, spec = pytree.tree_flatten(mask)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert_equal(pytree.tree_unflatten(leaves, spec), mask)
    doubled = pytree.tree_map(torch.clone, {"mask": [mask]})["mask"][0]
    assert_equal(doubled, mask)
    assert doubled.lists().entries is not mask.lists().entries


def test_pytree_leaves_hold_the_captured_tensors():
    leaves, _ = pytree.tree_flatten(build("nested"))
    assert sum(leaf is IDS for leaf in leaves) == 1


def test_pytree_structure_compares_by_value():
    specs = [
        pytree.tree_flatten(create_block_mask(closure(ids), 1, 1, 64, 64, BLOCK_SIZE=16))[1]
        for ids in (IDS, IDS.clone())
    ]
    assert specs[0] == specs[1]
    other = pytree.tree_flatten(create_block_mask(nested(IDS), 1, 1, 64, 64, BLOCK_SIZE=16))[1]
    shorter = pytree.tree_flatten(create_block_mask(closure(IDS), 1, 1, 60, 64, BLOCK_SIZE=16))[1]
    assert specs[0] != other
    assert specs[0] != shorter


def test_pytree_keys_are_named():
    named, _ = pytree.tree_flatten_with_path(build("closure"))
    names = [str(path[-1]) for path, _ in named]
    assert names == [".row_offsets", ".entries", ".captured_0"]


def test_write_order_travels():
    mask = create_block_mask(closure(IDS), 1, 2, 64, 64, BLOCK_SIZE=16, compute_dq_write_order=True)
    for other in (
        pickle.loads(pickle.dumps(mask)),
        pytree.tree_unflatten(*pytree.tree_flatten(mask)),
        mask.to("cpu"),
    ):
        assert torch.equal(other.dq_write_order, mask.dq_write_order)
        assert torch.equal(other.dq_write_order_full, mask.dq_write_order_full)
        assert other.dq_kv_order_spt is True
