"""Hints to the second-level cache: which calls give them, and that every copy has one."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from attnloom import PageTable
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton import launch_decode, launch_paged
from attnloom.backends.triton.config import value_of
from attnloom.backends.triton.fields import Tensors
from attnloom.backends.triton.read_once import HINT, compiled_with, mark
from attnloom.plan.problem import KernelOptions
from tests.kernels.cross_compile import Compiled, assembly, compile_for, device_is

BF16 = torch.bfloat16
LONG = 32768  # 64 MiB of keys and as many of values, of 8 heads of 128
COPY = re.compile(r"cp\.async\.(?:bulk\.tensor|cg)\.[^;]*;")


def decode_call(kv_len: int = LONG, batch: int = 1, group: int = 4, q_len: int = 1):
    query = torch.empty(batch, 8 * group, q_len, 128, dtype=BF16)
    key = torch.empty(batch, 8, kv_len, 128, dtype=BF16)
    return AttentionCall(query, key, key, None, None, None, 0.125, KernelOptions())


def paged_call(page_size: int, batch: int = 1, num_pages: int = 0, q_len: int = 1):
    """num_pages: stored; as many as all sequences have room for unless given."""
    columns = LONG // page_size
    pages = torch.zeros(batch, columns, dtype=torch.int32)
    lengths = torch.full((batch,), LONG, dtype=torch.int32)
    stored = torch.empty(num_pages or batch * columns, 8, page_size, 128, dtype=BF16)
    table = PageTable(lengths, None, pages, page_size, LONG)
    call = decode_call(batch=batch, q_len=q_len)
    return replace(call, key=stored, value=stored, table=table)


def of_one_tensor(call: AttentionCall) -> AttentionCall:
    """A batch over a cache without pages."""
    lengths = torch.full((call.query.size(0),), LONG, dtype=torch.int32)
    return replace(call, table=PageTable(lengths, None, None, 0, LONG))


def launcher(call: AttentionCall, target: str = "sm_90"):
    module = launch_decode if call.table is None else launch_paged
    with device_is(target):
        return module._prepare(call, Tensors.of(call, False), module._tiles(call)[0]).launch


def hint(call: AttentionCall, target: str = "sm_90") -> str:
    return value_of(launcher(call, target).config, "HINT")


def test_large_caches_that_are_read_once_are_hinted() -> None:
    call = decode_call()
    pages = [paged_call(size) for size in (16, 32, 64, 256)]
    hinted = [call, decode_call(batch=4), of_one_tensor(call), *pages]
    assert [hint(one) for one in hinted] == [HINT] * len(hinted)


def test_what_several_programs_read_stays_in_the_cache() -> None:
    shared = decode_call(batch=4)
    shared = replace(shared, key=shared.key[:1], value=shared.value[:1])
    calls = (shared, of_one_tensor(shared), decode_call(group=16, q_len=8))
    assert [hint(one) for one in calls] == [""] * len(calls)


def test_what_fits_the_cache_stays_there() -> None:
    """Of pages that a batch shares, no more than there are is read."""
    calls = (decode_call(kv_len=8192), paged_call(64, batch=8, num_pages=128))
    assert [hint(one) for one in calls] == [""] * len(calls)


def test_other_devices_are_not_hinted() -> None:
    assert hint(decode_call(), "sm_80") == hint(decode_call(), "gfx942") == ""


class _CompiledTwice:
    """In place of launcher.Launcher: compiles the first kernel, with the hint and without."""

    made: dict[str, Compiled] = {}
    spills = 0
    takes_tensors = False

    def __init__(self, kernel, config, grid, options, operands=0) -> None:
        self.kernel, self.config, self.options = kernel, config, options

    def __call__(self, aligned, *args) -> None:
        if not hasattr(self.config, "HINT"):
            return
        for hint in (HINT, ""):
            with compiled_with(hint):
                config = replace(self.config, HINT=hint)
                self.made[hint] = compile_for("sm_90", self.kernel, (*args, config), self.options)


@functools.cache
def compiled(page_size: int) -> tuple[Compiled, Compiled]:
    """A kernel with the hint and without."""
    call = paged_call(page_size) if page_size else decode_call()
    module: Any = launch_paged if page_size else launch_decode
    tensors = Tensors.of(call, False)
    with device_is("sm_90"), mock.patch.object(module, "Launcher", _CompiledTwice):
        ready = module._prepare(call, tensors, module._tiles(call)[0])
        module._launch(ready, call, tensors)
    return _CompiledTwice.made[HINT], _CompiledTwice.made[""]


@pytest.mark.parametrize("page_size", [0, 16, 64, 256])
def test_every_copy_has_the_hint(page_size: int) -> None:
    """And the assembler takes it. Without it the kernel is the same but for that."""
    hinted, plain = compiled(page_size)
    copies = COPY.findall(hinted.text)
    assert len(copies) >= 4
    assert all("L2::cache_hint" in copy for copy in copies)
    assert hinted.text.count("createpolicy") == 1
    assert hinted.spills == 0
    assert "cache_hint" not in plain.text
    assert body(mark(plain.text)) == body(hinted.text)


def body(ptx: str) -> str:
    """Without the kernel's name, comments and places in the source."""
    inside = ptx[ptx.index("{") : ptx.index("\n}")]
    return re.sub(r"//.*|\$L__\w+|\t\.loc.*", "", inside)


def test_text_without_known_copies_stays_as_it_is() -> None:
    text = ".visible .entry f(\n)\n{\nld.global.b32 %r1, [%rd1];\nret;\n}\n"
    assert mark(text) == text


def test_copies_of_rows_died_of_their_hint() -> None:
    """Pages of 16 and 32 tokens are gathered so: an illegal instruction on an H200. ptxas names
    uniform registers in such a copy that nothing has written if its address has a part that is the
    same in all lanes."""
    hinted, _ = compiled(16)
    copies = [line for line in assembly(hinted.text).splitlines() if "LDGSTS" in line]
    assert len(copies) >= 4
    for copy in copies:
        address, descriptor = re.findall(r"\[(R[^\]]*)\], desc\[UR(\d+)\]", copy)[0]
        assert "UR" not in address
        assert int(descriptor) % 2 == 0, copy
