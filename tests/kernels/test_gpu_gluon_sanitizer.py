"""The Gluon forward under compute-sanitizer's memcheck; `pytest -m gpu`.

racecheck is of no use here: it does not follow an order that goes from a barrier of warps to an
mbarrier and on, and reports every buffer that is handed from warp to warp, Triton's own included.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
_PLACES = ("/usr/local/cuda/bin/compute-sanitizer",)
_PROGRAM = """
import torch
from attnloom import create_block_mask, flex_attention

documents = (torch.arange(300, device="cuda") // 170).int()
slopes = torch.ones(2, device="cuda")
keep = lambda b, h, q, kv: (q >= kv) & (documents[q] == documents[kv])
bias = lambda score, b, h, q, kv: score - slopes[h] * (q - kv)
mask = create_block_mask(keep, None, None, 300, 300, device="cuda")
for width in (64, 128):
    q, k, v = (torch.randn(1, 2, 300, width, device="cuda").half() for _ in range(3))
    out = flex_attention(q, k, v, bias, mask, kernel_options={"backend": "gluon"})
    assert out.isfinite().all()
"""


def test_memcheck() -> None:
    tool = shutil.which("compute-sanitizer") or next((p for p in _PLACES if Path(p).exists()), None)
    if tool is None:
        pytest.skip("needs compute-sanitizer")
    options = ["--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    done = subprocess.run(
        [tool, *options, sys.executable, "-c", _PROGRAM],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout
