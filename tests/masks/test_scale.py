"""Masks of a million tokens: time and memory stay near those of their live tiles."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from attnloom.api.masks import create_block_mask
from attnloom.block_mask import BlockMask

MEGA = 1 << 20

_SCRIPT = """
import json, resource, time
import torch
from attnloom.api.masks import create_block_mask
N = 1 << 20

def packed(b, h, q, kv):
    return (doc[q] == doc[kv]) & (q >= kv)

g = torch.Generator().manual_seed(0)
inner = torch.randperm(N - 1, generator=g)[:999].sort().values + 1
cuts = torch.cat([torch.tensor([0]), inner, torch.tensor([N])])
doc = torch.repeat_interleave(torch.arange(1000), cuts.diff())
mods = {
    "window": lambda b, h, q, kv: (q >= kv) & (q - kv <= 1024),
    "documents": packed,
    "causal": lambda b, h, q, kv: q >= kv,
}
for mod in mods.values():
    create_block_mask(mod, None, None, 256, 256)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = {}
for name, mod in mods.items():
    start = time.perf_counter()
    lists = create_block_mask(mod, None, None, N, N).lists()
    seconds = time.perf_counter() - start
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    partial = int((lists.entries & 1).sum())
    found[name] = [seconds, peak, lists.entries.numel() - partial, partial]
print(json.dumps(found))
"""


def test_a_million_tokens():
    """In a process whose memory nobody else used. Time is bounded loosely, against quadratic work;
    memory is the requirement itself."""
    ran = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    for name, (seconds, peak_bytes, _, _) in found.items():
        assert peak_bytes < 1 << 30, name
        assert seconds < 20, name
    assert found["window"][2:] == [8192 * 7 - sum(range(1, 8)), 2 * 8192 - 8]
    assert found["causal"][2:] == [8192 * 8191 // 2, 8192]


def test_documents_of_a_million_tokens_directly():
    lengths = torch.randint(1, 2200, (900,), generator=torch.Generator().manual_seed(0))
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    length = int(cu[-1])
    direct = BlockMask.from_cu_seqlens(cu, causal=True)
    ids = torch.repeat_interleave(torch.arange(900), lengths)
    built = create_block_mask(
        lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv), None, None, length, length
    )
    assert torch.equal(direct.lists().entries, built.lists().entries)
    assert torch.equal(direct.lists().row_offsets, built.lists().row_offsets)


def test_a_million_tokens_in_one_picture():
    mask = create_block_mask(lambda b, h, q, kv: q - kv == 0, None, None, MEGA, MEGA)
    lines = mask.to_string().splitlines()
    assert len(lines) == 1 + 20
    assert all(len(line) == 40 for line in lines[1:])
    assert "░" in lines[1]
    assert mask.rows(MEGA - 5, MEGA).lists().entries.numel() == 1


def test_shuffled_ids_stay_within_bounded_memory():
    """Intervals decide nothing here: every tile is sampled, a bounded number at a time."""
    ids = torch.randint(0, 50, (8192,), generator=torch.Generator().manual_seed(0))
    lists = create_block_mask(lambda b, h, q, kv: ids[q] == ids[kv], None, None, 8192, 8192).lists()
    assert lists.entries.numel() == 64 * 64
    assert (lists.entries & 1).all()
