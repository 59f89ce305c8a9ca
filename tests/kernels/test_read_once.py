"""Hints to the second-level cache: which calls give them, and that every copy has one."""

from __future__ import annotations

import re
from dataclasses import replace
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
from tests.kernels.cross_compile import Compiled, compile_for, device_is

BF16 = torch.bfloat16
LONG = 32768  # 64 MiB of keys and as many of values, of 8 heads of 128
COPY = re.compile(r"cp\.async\.bulk\.tensor\.[^;]*;")


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
    hinted = (call, decode_call(batch=4))
    assert [hint(one) for one in hinted] == [HINT] * len(hinted)


def test_what_several_programs_read_stays_in_the_cache() -> None:
    shared = decode_call(batch=4)
    shared = replace(shared, key=shared.key[:1], value=shared.value[:1])
    calls = (shared, decode_call(group=16, q_len=8))
    assert [hint(one) for one in calls] == [""] * len(calls)


def test_what_fits_the_cache_stays_there() -> None:
    assert hint(decode_call(kv_len=8192)) == ""


def test_caches_go_without() -> None:
    """Pages of 16 and 32 tokens are gathered by copies of rows, which died of their hint (an
    illegal instruction on an H200). Of the others nothing was timed with one."""
    calls = (of_one_tensor(decode_call()), *(paged_call(size) for size in (16, 32, 64, 256)))
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


def test_every_copy_has_the_hint() -> None:
    """And the assembler takes it. Without it the kernel is the same but for that."""
    call = decode_call()
    tensors = Tensors.of(call, False)
    with device_is("sm_90"), mock.patch.object(launch_decode, "Launcher", _CompiledTwice):
        ready = launch_decode._prepare(call, tensors, launch_decode._tiles(call)[0])
        launch_decode._launch(ready, call, tensors)
    hinted, plain = _CompiledTwice.made[HINT], _CompiledTwice.made[""]
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


def test_copies_of_rows_stay_as_they_are() -> None:
    copy = "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10;"
    text = f".visible .entry f(\n)\n{{\n{copy}\n}}\n"
    assert mark(text) == text
