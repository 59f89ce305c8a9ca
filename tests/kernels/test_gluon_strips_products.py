"""Products of forward_strips.py by the rules of wgmma's descriptors, on an image of shared memory:
PTX ISA, "Asynchronous warpgroup-level matrix shared memory layout"."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from attnloom.backends.gluon import forward_strips
from tests.kernels.test_gluon_products_96 import Array, fetch, put

KEYS, BOX, PANEL = 96, 32, 64
AT = {"q": 8192, "k": 65536, "v": 131072}
DRAW = np.random.default_rng(0)


def text_of(name: str, *args: Any) -> str:
    function = getattr(forward_strips, name)
    return getattr(function, "fn", function)(*args)


def image(queries: int = 64) -> tuple[Array, dict[str, Array]]:
    """A step as forward_boxes.py has it copied: panels of 64 columns, each of three boxes."""
    memory = DRAW.normal(size=232448 // 2)
    x = {name: DRAW.normal(size=(KEYS, 192)) for name in ("k", "v")}
    x["q"] = DRAW.normal(size=(queries, 192))
    for i in range(3):
        columns = slice(PANEL * i, PANEL * (i + 1))
        put(memory, AT["q"] + i * queries * 128, x["q"][:, columns])
        for name in ("k", "v"):
            for j in range(3):
                rows = slice(BOX * j, BOX * (j + 1))
                at = AT[name] + (i * 3 + j) * BOX * 128
                put(memory, at, x[name][rows, columns])
    return memory, x


def descriptor(text: str, address: str) -> tuple[int, int]:
    """(low, high) of what begins at operand `address`, but for the address."""
    low = re.search(rf"shr\.u32 low, \${address}, 4; or\.b32 low, low, (\d+);", text)
    assert low is not None
    high = re.search(r"mov\.b64 \w+, \{low, (\d+)\};", text[low.end() :])
    assert high is not None
    return int(low[1]), int(high[1])


@pytest.mark.parametrize("depth", [176, 192])
@pytest.mark.parametrize(("queries", "first"), [(64, 0), (128, 0), (128, 64)])
def test_scores(queries: int, first: int, depth: int) -> None:
    """first: row of the warps that multiply, of those that a consumer has."""
    memory, x = image(queries)
    text = text_of("_scores_text", KEYS, depth, "bf16", queries)
    count = KEYS // 2
    steps = [
        (int(left) * 16, int(right) * 16)
        for left, right in re.findall(r"add\.s64 at, a, (\d+); add\.s64 bt, b, (\d+);", text)
    ]
    sides = [
        (AT[name] + start * 128, (*descriptor(text, str(at)), [step[side] for step in steps]), rows)
        for side, (name, at, rows, start) in enumerate(
            (("q", count, 64, first), ("k", count + 8, KEYS, 0))
        )
    ]
    found = np.zeros((64, KEYS))
    for i in range(len(steps)):
        left, right = (fetch(memory, at, made, False, rows, i) for at, made, rows in sides)
        found += left @ right.T
    q, k = x["q"][first : first + 64, :depth], x["k"][:, :depth]
    np.testing.assert_allclose(found, q @ k.T, rtol=1e-9)
    products = re.findall(r"wgmma\S+ \{([^}]*)\}, at, bt, (\d), 1, 1, 0, 0;", text)
    assert [sums for _, sums in products] == ["0"] + ["1"] * (depth // 16 - 1)
    assert {result for result, _ in products} == {", ".join(f"${i}" for i in range(count))}


def test_output() -> None:
    memory, x = image()
    p = DRAW.normal(size=(64, KEYS))
    text = text_of("_output_text", KEYS, 192, "f16")
    low, high = descriptor(text, "96")
    moves = [int(step) * 16 for step in re.findall(r"add\.u64 from, from, (\d+);", text)]
    steps = [sum(moves[:i]) for i in range(len(moves) + 1)]
    assert len(steps) == KEYS // 16
    found = np.zeros((64, 192))
    for i in range(len(steps)):
        values = fetch(memory, AT["v"], (low, high, steps), True, 192, i)
        found += p[:, 16 * i : 16 * i + 16] @ values.T
    np.testing.assert_allclose(found, p @ x["v"], rtol=1e-9)
    weights = re.findall(r"\{(\$\d+, \$\d+, \$\d+, \$\d+)\}, from, 1, 1, 1, 1;", text)
    first = 96 + 8  # behind the accumulator and the eight that are the address
    wanted = [", ".join(f"${first + 4 * i + j}" for j in range(4)) for i in range(len(steps))]
    assert weights == wanted
