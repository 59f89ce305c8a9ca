"""Users' mistakes with pages; texts are pinned."""

from __future__ import annotations

import pytest
import torch

from attnloom import (
    OutOfPagesError,
    PagedKV,
    PagedKVCache,
    PageTable,
    create_block_mask,
    flex_attention,
)
from attnloom.errors import DeviceError, DtypeError, OptionError, ShapeError
from attnloom.paged import PageAllocator
from tests.harness.pinned import Pinned, assert_says
from tests.paged.draw import causal

H, D = 2, 8


def cache_of(*lengths: int, num_pages: int = 4, num_layers: int = 1) -> PagedKVCache:
    """A cache with sequences 0, 1, ... of these lengths, in pages of 16 tokens."""
    cache = PagedKVCache(num_pages, 16, H, D, num_layers=num_layers)
    for length in lengths:
        cache.grow([cache.new()], [length])
    return cache


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def table(device: str = "cpu") -> PageTable:
    return PageTable(int32(9).to(device), None, int32(0)[None].to(device), 16, 9)


def attend(length: int, page: int) -> torch.Tensor:
    """To one sequence, in one page of four."""
    given = PageTable(int32(length), None, int32(page)[None], 16, 16)
    return flex_attention(zeros(1, H, 1, D), PagedKV(zeros(4, H, 16, D), zeros(4, H, 16, D), given))


def dropped() -> PagedKVCache:
    cache = cache_of(40)
    cache.drop_before(0, 35)
    return cache


def of_inference() -> object:
    with torch.inference_mode():
        cache = cache_of(3)
    return cache.extend([0], 1)


def stale() -> object:
    cache = cache_of(3)
    batch = cache.batch([0])
    cache.free(0)
    return batch.layer()


def appended(key: object) -> object:
    return cache_of(3).append([0], key, zeros(1, H, 1, D))  # type: ignore[arg-type]


def moved_into_a_fork() -> None:
    cache = cache_of(3)
    cache.fork(0)
    cache.move_tokens([(0, 2, 1)])


ERRORS: dict[str, Pinned] = {
    "stale batch": (
        stale,
        OptionError,
        "this batch still has the old pages of sequence 0, which was freed, cut, moved, or given "
        "copies of shared pages since; they may be another's now. Make a new batch, or `update` "
        "this one.",
    ),
    "a batch in place of its layer": (
        lambda: flex_attention(torch.zeros(1, H, 1, D), cache_of(3).batch([0])),  # type: ignore
        OptionError,
        "key is a PagedBatch, which has keys and values of every layer; pass those of one, "
        "flex_attention(query, batch.layer(i), ...).",
    ),
    "a flag for a length": (
        lambda: cache_of(3).reserve(0, True),
        OptionError,
        "length is True; it must be an int.",
    ),
    "room for less than nothing": (
        lambda: cache_of(3).reserve(0, -1),
        ShapeError,
        "length is -1; a sequence has 0 tokens or more.",
    ),
    "no state": (
        lambda: cache_of(3).load_state_dict({}),
        OptionError,
        "state is not what state_dict of a cache gives: a dict of book, used, keys and values.",
    ),
    "state of another dtype": (
        lambda: PagedKVCache(4, 16, H, D, dtype=torch.float16).load_state_dict(
            cache_of(3).state_dict()
        ),
        DtypeError,
        "the state holds torch.float32, this cache torch.float16. Make it with the dtype of the "
        "one that was saved.",
    ),
    "counts that are no ints": (
        lambda: cache_of(3).extend([0], [1.5]),  # type: ignore[list-item]
        OptionError,
        "counts is [1.5]; it must be an int, or an int for each sequence.",
    ),
    "a length that is no int": (
        lambda: cache_of(3).truncate(0, 1.5),  # type: ignore[arg-type]
        OptionError,
        "length is 1.5; it must be an int.",
    ),
    "fewer rows than tokens": (
        lambda: cache_of(3).extend([0], 4, q_len=2),
        ShapeError,
        "q_len is 2, but a sequence has 4 new tokens: each needs a row of query.",
    ),
    "made under inference mode": (
        of_inference,
        OptionError,
        "the cache was made under torch.inference_mode() and can only be written there. Make it "
        "outside: then it can be written in both.",
    ),
    "no tensor": (
        lambda: appended(None),
        OptionError,
        "key is of type NoneType; a cache takes tensors.",
    ),
    "complex keys": (
        lambda: appended(zeros(1, H, 1, D).to(torch.complex64)),
        DtypeError,
        "key is torch.complex64; a cache of torch.float32 converts other floating dtypes alone.",
    ),
    "keys on another device": (
        lambda: appended(zeros(1, H, 1, D).to("meta")),
        DeviceError,
        "key is on meta, its cache on cpu.",
    ),
    "keys of three dimensions": (
        lambda: appended(zeros(H, 1, D)),
        ShapeError,
        "key is [2, 1, 8]; append takes 4 dimensions, [B, Hkv, n, D].",
    ),
    "negative pool": (
        lambda: PageAllocator(-1),
        OptionError,
        "num_pages is -1; it must be 0 or more.",
    ),
    "out of pages": (
        lambda: cache_of(40, 40),
        OutOfPagesError,
        "3 pages are needed and 1 of 4 are free. Free a sequence, or make the cache with more "
        "pages; nothing was changed.",
    ),
    "more than the batch": (
        lambda: cache_of(3, 4).empty_batch(1, 64).update([0, 1], [1, 1]),
        ShapeError,
        "2 sequences and 2 counts for a batch of 1; one count each, and no more sequences than "
        "that.",
    ),
    "more queries than the batch": (
        lambda: cache_of(20).empty_batch(1, 64).update([0], [2]),
        ShapeError,
        "sequence 0 has 20 tokens, 2 of them queries; this batch takes 1 query and 64 tokens a "
        "sequence.",
    ),
    "rows to write": (
        lambda: cache_of(20).batch([0]).write(zeros(1, H, 2, D), zeros(1, H, 2, D)),
        ShapeError,
        "key is [1, 2, 2, 8], but this step writes [1, 2, 1, 8]: [B, Hkv, Q_LEN, D] with a row "
        "for every query row of the batch, padding included.",
    ),
    "history": (
        lambda: (
            cache_of(20).batch([0]).write(zeros(1, H, 1, D).requires_grad_(), zeros(1, H, 1, D))
        ),
        OptionError,
        "key requires grad; a cache keeps no history. Run the model under torch.no_grad() or "
        "torch.inference_mode().",
    ),
    "twice": (
        lambda: cache_of(3).extend([0, 0], 1),
        OptionError,
        "sequences [0, 0] names one twice; give each once.",
    ),
    "fewer than none": (
        lambda: cache_of(3).extend([0], [-1]),
        ShapeError,
        "sequence 0 is extended by -1; 0 tokens or more.",
    ),
    "fork beyond the end": (
        lambda: cache_of(3).fork(0, 4),
        ShapeError,
        "sequence 0 has 3 tokens; a fork of its first 4 does not exist.",
    ),
    "cut beyond the end": (
        lambda: cache_of(3).truncate(0, 4),
        ShapeError,
        "sequence 0 has 3 tokens; it cannot be cut to 4.",
    ),
    "drop beyond the end": (
        lambda: cache_of(3).drop_before(0, 4),
        ShapeError,
        "sequence 0 has 3 tokens; position 4 is not one of them.",
    ),
    "no such sequence": (
        lambda: cache_of(3).length(7),
        OptionError,
        "there is no sequence 7: it was freed, or never made here. Live ones are named by "
        "`sequences`; there are 1.",
    ),
    "cut into what was dropped": (
        lambda: dropped().truncate(0, 20),
        ShapeError,
        "sequence 0 dropped the page of token 19; it cannot go on from its first 20 tokens. "
        "Drop pages only as far back as it may be cut.",
    ),
    "no heads": (
        lambda: PagedKVCache(4, 16, 0, D),
        OptionError,
        "num_kv_heads is 0; it must be an int of 1 or more.",
    ),
    "layer": (
        lambda: cache_of(3).batch().layer(1),
        OptionError,
        "layer is 1; this cache has layers 0 to 0.",
    ),
    "append to layers": (
        lambda: cache_of(3, num_layers=2).append([0], zeros(1, H, 1, D), zeros(1, H, 1, D)),
        OptionError,
        "append writes one layer, this cache has 2: use batch = extend(sequences, counts), then "
        "batch.write(key, value, layer) in every layer.",
    ),
    "key of another size": (
        lambda: cache_of(3).append([0], zeros(1, H, 1, D + 1), zeros(1, H, 1, D)),
        ShapeError,
        "key is [1, 2, 1, 9]; for 1 sequence of this cache it must be [1, 2, 1, 8].",
    ),
    "state of another size": (
        lambda: cache_of(3).load_state_dict(cache_of(3, num_pages=9).state_dict()),
        ShapeError,
        "the state has 9 pages of 16 tokens and 1 layer of keys [2, 16, 8] and values [2, 16, 8]; "
        "this cache 4 of 16 and 1 of [2, 16, 8] and [2, 16, 8].",
    ),
    "a sequence in place of a list": (
        lambda: cache_of(3).extend(0, 1),  # type: ignore[arg-type]
        OptionError,
        "sequences is 0; it must be a list of the ints that name them: [0].",
    ),
    "a name of another kind": (
        lambda: cache_of(3).extend(["0"], 1),  # type: ignore[list-item]
        OptionError,
        "a sequence is named by an int that `new` or `fork` gave, not by '0'.",
    ),
    "a flag for a count": (
        lambda: cache_of(3).extend([0], True),
        OptionError,
        "counts is True; it must be an int, or an int for each sequence.",
    ),
    "more queries than tokens": (
        lambda: flex_attention(torch.zeros(1, H, 5, D), cache_of(3)),
        ShapeError,
        "sequence 0 has 3 tokens, so that its newest 5 cannot be queries. Ask for fewer, or make a "
        "batch without it.",
    ),
    "a layer by name": (
        lambda: cache_of(3).batch([0]).layer("0"),  # type: ignore[arg-type]
        OptionError,
        "layer is '0'; this cache has layers 0 to 0.",
    ),
    "a negative count of queries": (
        lambda: cache_of(3).batch([0], -1),
        ShapeError,
        "sequence 0 is given -1 queries; 0 or more.",
    ),
    "more pages than have names": (
        lambda: PagedKVCache(2**40, 16, H, D),
        OptionError,
        "num_pages is 1099511627776; a table names up to 2147483645.",
    ),
    "a count beyond the tokens": (
        lambda: cache_of(3).append([0], zeros(1, H, 4, D), zeros(1, H, 4, D), counts=[5]),
        ShapeError,
        "counts goes up to 5, but key has 4 tokens of a sequence.",
    ),
    "a batch of very long sequences": (
        lambda: cache_of(3).empty_batch(2, 10**15),
        ShapeError,
        "max_length is 1000000000000000; kernels count to 2147483645 in a batch.",
    ),
    "half a move": (
        lambda: cache_of(3).move_tokens([(0, 1)]),  # type: ignore[list-item]
        OptionError,
        "a move is (0, 1); it must be (sequence, position to write, position to read).",
    ),
    "two moves to one place": (
        lambda: cache_of(3).move_tokens([(0, 0, 1), (0, 0, 2)]),
        OptionError,
        "two moves write token 0 of sequence 0; give one for each place.",
    ),
    "a move to 0.0": (
        lambda: cache_of(3).move_tokens([(0, 0.0, 1)]),  # type: ignore[list-item]
        OptionError,
        "position is 0.0; it must be an int.",
    ),
    "sequence 0.0": (
        lambda: cache_of(3).length(0.0),  # type: ignore[arg-type]
        OptionError,
        "a sequence is named by an int that `new` or `fork` gave, not by 0.0.",
    ),
    "sequence False": (
        lambda: cache_of(3).fork(False),
        OptionError,
        "a sequence is named by an int that `new` or `fork` gave, not by False.",
    ),
    "no sequence to free": (
        lambda: cache_of(3).free(None),  # type: ignore[arg-type]
        OptionError,
        "a sequence is named by an int that `new` or `fork` gave, not by None.",
    ),
    "fewer tokens than queries": (
        lambda: flex_attention(
            torch.zeros(1, H, 3, D),
            PagedKV(
                zeros(3, H, 16, D),
                zeros(3, H, 16, D),
                PageTable(int32(2), None, int32(0)[None], 16, 5),
            ),
        ),
        ShapeError,
        "lengths[0] is 2, but without counts all 3 rows of query are the newest of its tokens. "
        "Give counts, which say how many there are of each sequence; further rows are padding.",
    ),
    "a part of a mask": (
        lambda: flex_attention(
            torch.zeros(1, H, 1, D),
            cache_of(3),
            block_mask=create_block_mask(causal, None, None, 64, 64).rows(16, 64),
        ),
        ShapeError,
        "block_mask begins at query 16 of another, by `rows` or by indexing. Over a cache it is "
        "looked up where each query stands in its sequence, and would be moved twice: pass the "
        "mask of whole sequences.",
    ),
    "a token that moves to a page of two": (
        moved_into_a_fork,
        OptionError,
        "token 2 of sequence 0 lies in a page that another sequence shares, which would get it "
        "too. Only tokens that came after a fork are moved.",
    ),
    "a damaged state": (
        lambda: cache_of(3).load_state_dict({**cache_of(3).state_dict(), "used": [1]}),
        OptionError,
        "state is not what state_dict of a cache gave: its numbers or tensors were changed, or are "
        "damaged. Nothing was loaded.",
    ),
    "a token that moves from nowhere": (
        lambda: cache_of(3).move_tokens([(0, 2, 3)]),
        ShapeError,
        "sequence 0 has 3 tokens; 3 is the position of none.",
    ),
    "counts": (
        lambda: cache_of(3).extend([0], [1, 2]),
        ShapeError,
        "1 sequence, but 2 counts; one each.",
    ),
    "too long for the pages": (
        lambda: PageTable(int32(1), None, int32(1)[None], 16, 17),
        ShapeError,
        "max_length is 17, but 16 tokens fit into 1 page of 16. Give pages more columns.",
    ),
    "table without pages": (
        lambda: PagedKV(
            zeros(3, H, 16, D), zeros(3, H, 16, D), PageTable(int32(1), None, None, 0, 5)
        ),
        OptionError,
        "PagedKV needs a PageTable with pages.",
    ),
    "pages of another size": (
        lambda: PagedKV(zeros(3, H, 32, D), zeros(3, H, 32, D), table()),
        ShapeError,
        "key is [3, 2, 32, 8]; pages of 16 tokens are [num_pages, Hkv, 16, D].",
    ),
    "table on another device": (
        lambda: PagedKV(zeros(3, H, 16, D), zeros(3, H, 16, D), table("meta")),
        DeviceError,
        "key is on cpu, its table on meta; both must be on one device.",
    ),
    "page size": (
        lambda: PagedKVCache(4, 24, H, D),
        OptionError,
        "page_size is 24; it must be a power of two from 16, so that tiles and pages do not "
        "straddle. Use 16, 32, 64, 128 or 256.",
    ),
    "lengths of another dtype": (
        lambda: PageTable(zeros(1), None, None, 0, 5),
        DtypeError,
        "lengths is torch.float32; a PageTable holds int32. Use lengths.int().",
    ),
    "counts of another length": (
        lambda: PageTable(int32(1), int32(1, 2), None, 0, 5),
        ShapeError,
        "counts is [2], lengths [1]; they must be [B] and [B].",
    ),
    "strided pages": (
        lambda: PageTable(int32(1, 2), None, int32(1, 2, 3, 4).view(2, 2).T, 16, 5),
        ShapeError,
        "pages is not contiguous; kernels read it as it lies in memory.",
    ),
    "counts on another device": (
        lambda: PageTable(int32(1), int32(1).to("meta"), None, 0, 5),
        DeviceError,
        "counts is on meta, lengths on cpu; a PageTable lies on one device.",
    ),
    "dtype of a cache": (
        lambda: PagedKVCache(4, 16, H, D, dtype=torch.int8),
        DtypeError,
        "dtype is torch.int8; keys and values are torch.float32, torch.float64, torch.float16, "
        "torch.bfloat16, torch.float8_e4m3fn or torch.float8_e5m2.",
    ),
    "no dtype": (
        lambda: PagedKVCache(4, 16, H, D, dtype="bfloat16"),  # type: ignore[arg-type]
        DtypeError,
        "dtype is 'bfloat16'; keys and values are torch.float32, torch.float64, torch.float16, "
        "torch.bfloat16, torch.float8_e4m3fn or torch.float8_e5m2.",
    ),
    "batch of less than nothing": (
        lambda: cache_of(3).empty_batch(-1, 16),
        ShapeError,
        "size is -1; a batch has room for 0 or more.",
    ),
    "batch of negative length": (
        lambda: cache_of(3).empty_batch(1, -16),
        ShapeError,
        "max_length is -16; a batch has room for 0 or more.",
    ),
    "batch of half a query": (
        lambda: cache_of(3).empty_batch(1, 16, 0.5),  # type: ignore[arg-type]
        OptionError,
        "q_len is 0.5; it must be an int.",
    ),
    "page out of range": (
        lambda: attend(9, 7),
        ShapeError,
        "pages[0, 0] is 7, but key has 4 pages, 0 to 3; tokens 0 to 8 of sequence 0 would lie "
        "there. Entries past the end of a sequence may hold anything.",
    ),
    "length out of range": (
        lambda: attend(17, 3),
        ShapeError,
        "lengths[0] is 17; it must be 0 to 16 (max_length of the table). Kernels read the table "
        "as it is when they run: correct it, or give it a larger bound.",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    assert_says(ERRORS[name])
