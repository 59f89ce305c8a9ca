"""Products of products_96.py by the rules of wgmma's descriptors, on an image of shared memory: PTX
ISA, "Asynchronous warpgroup-level matrix shared memory layout"."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton")

from attnloom.backends.gluon import products_96

Array = np.ndarray
operand = getattr(products_96.operand, "fn", products_96.operand)
DRAW = np.random.default_rng(0)


def swizzled(address: int, width: int) -> int:
    """Rows of 128 bytes are swizzled over 1024, of 64 over 512."""
    rows = {64: 7, 32: 3}[width]
    return address ^ (((address >> 7) & rows) << 4)


def put(memory: Array, address: int, tile: Array) -> None:
    """[rows, width] of 16 bits."""
    width = tile.shape[1]
    for row in range(tile.shape[0]):
        for column in range(width):
            at = address + (row * width + column) * 2
            memory[swizzled(at, width) // 2] = tile[row, column]


def fetch(memory: Array, start: int, made: tuple, turned: bool, count: int, step: int) -> Array:
    """[count, 16] that an instruction's operand is: of rows, or turned of columns."""
    low, high, steps = made
    leading, stride = (low >> 16 & 0x3FFF) * 16, (high & 0x3FFF) * 16
    width = {1: 64, 2: 32}[high >> 30]
    start += steps[step]
    found = np.zeros((count, 16))
    for i in range(count):
        for k in range(16):
            if turned:
                at = (i // width) * leading + (k // 8) * stride + (k % 8) * 2 * width
                at += (i % width) * 2
            else:
                at = (i // 8) * stride + (i % 8) * 2 * width + k * 2
            found[i, k] = memory[swizzled(start + at, width) // 2]
    return found


def product(memory: Array, left: tuple, right: tuple) -> Array:
    """(address, operand, turned) of each."""
    (a, A, a_turned), (b, B, b_turned) = left, right
    assert len(A[2]) == len(B[2])
    found = np.zeros((64, 96))
    for i in range(len(A[2])):
        found += fetch(memory, a, A, a_turned, 64, i) @ fetch(memory, b, B, b_turned, 96, i).T
    return found


def image() -> tuple[Array, dict[str, Array]]:
    """Shared memory as roles_shared.py lays it out, in part."""
    memory = DRAW.normal(size=232448 // 2)
    sizes = {"q": (64, 192), "do": (64, 192), "k": (96, 192), "v": (96, 192), "p": (64, 96)}
    x = {name: DRAW.normal(size=size) for name, size in sizes.items()}
    for i in range(3):
        columns = slice(64 * i, 64 * i + 64)
        put(memory, AT["q"] + i * 8192, x["q"][:, columns])
        put(memory, AT["do"] + i * 8192, x["do"][:, columns])
        put(memory, AT["p"] + i * 4096, x["p"][:, 32 * i : 32 * i + 32])
        for g in range(3):
            rows = slice(32 * g, 32 * g + 32)
            put(memory, AT["v"] + (i * 3 + g) * 4096, x["v"][rows, columns])
            for half in range(2):
                part = x["k"][rows, 64 * i + 32 * half : 64 * i + 32 * half + 32]
                put(memory, AT["k"] + ((2 * i + half) * 3 + g) * 2048, part)
    return memory, x


AT = {"q": 24576, "do": 73728, "k": 98304, "v": 135168, "p": 196608}


def test_each_product_of_a_step() -> None:
    memory, x = image()
    found = {
        "scores": product(
            memory,
            (AT["q"], operand(64, 192, 64, False), False),
            (AT["k"], operand(96, 192, 32, False), False),
        ),
        "dp": product(
            memory,
            (AT["do"], operand(64, 192, 64, False), False),
            (AT["v"], operand(96, 192, 64, False), False),
        ),
    }
    wanted = {"scores": x["q"] @ x["k"].T, "dp": x["do"] @ x["v"].T}
    turned = operand(64, 64, 64, True), operand(64, 96, 32, True)
    for i in range(3):
        found[f"sum {i}"] = product(
            memory, (AT["do"] + i * 8192, turned[0], True), (AT["p"], turned[1], True)
        )
        wanted[f"sum {i}"] = x["do"][:, 64 * i : 64 * i + 64].T @ x["p"]
    for half in range(2):
        found[f"dq {half}"] = product(
            memory,
            (AT["p"], operand(64, 96, 32, False), False),
            (AT["k"] + half * 96 * 96 * 2, operand(96, 96, 32, True), True),
        )
        wanted[f"dq {half}"] = x["p"] @ x["k"][:, 96 * half : 96 * half + 96]
    for name, value in wanted.items():
        assert np.abs(found[name] - value).max() < 1e-9, name


def test_lanes_store_where_products_read() -> None:
    """A lane of an stmatrix gives the address of a row of one of four matrices of 8 x 8: rows 0 to
    7 and 8 to 15 of a warp's, then the same of the next eight columns; `lane_place` and the text of
    the stores have this place by this formula."""
    for warp in range(4):
        for lane in range(32):
            row, chunk = warp * 16 + lane % 16, lane // 16
            place = row * 64 + ((chunk ^ (row // 2 % 4)) * 16)
            for i in range(2):
                matrix = lane // 8
                r = warp * 16 + matrix % 2 * 8 + lane % 8
                column = 16 * i + matrix // 2 * 8
                assert place ^ (32 * i) == swizzled((r * 32 + column) * 2, 32)
