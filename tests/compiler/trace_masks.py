"""mask_mods of the table."""

from __future__ import annotations

import functools

import torch

from tests.compiler.trace_table import KV_LEN, Q_LEN, B, ints, mask


@mask
def causal():
    return lambda b, h, q, kv: q >= kv


@mask
def everything():
    return lambda b, h, q, kv: True


@mask
def nothing():
    return lambda b, h, q, kv: False


@mask
def integer_truth():
    return lambda b, h, q, kv: 1


@mask
def window():
    W = 2
    return lambda b, h, q, kv: (q - kv).abs() <= W


@mask
def causal_window():
    W = 2
    return lambda b, h, q, kv: (q >= kv) & (q - kv < W)


@mask
def prefix_python_or():
    P = 3
    return lambda b, h, q, kv: kv < P or q >= kv


@mask
def prefix_named():
    lengths = torch.tensor([2, 4])

    def mod(b, h, q, kv):
        is_prefix = kv < lengths[b]
        is_causal = q >= kv
        return is_prefix or is_causal

    return mod


@mask
def python_and_not():
    return lambda b, h, q, kv: q >= kv and not (kv > 2)


@mask
def chained_comparison():
    return lambda b, h, q, kv: 0 <= q - kv < 3


@mask
def if_return_bools():
    def mod(b, h, q, kv):
        if q < 2:
            return True
        if kv > 4:
            return False
        return q > kv

    return mod


@mask
def document():
    doc = torch.tensor([0, 0, 1, 1, 2, 2])
    return lambda b, h, q, kv: doc[q] == doc[kv]


@mask
def document_batch():
    doc = ints(B, KV_LEN, high=3)
    return lambda b, h, q, kv: (doc[b, q] == doc[b, kv]) & (q >= kv)


@mask
def document_chained():
    doc = ints(B, KV_LEN, high=3)
    return lambda b, h, q, kv: doc[b][q] == doc[b][kv]


@mask
def dense_bool_table():
    table = ints(B, Q_LEN, KV_LEN, high=2).bool()
    return lambda b, h, q, kv: table[b, q, kv]


@mask
def uint8_flags_with_or():
    flags = ints(KV_LEN, high=2).to(torch.uint8)
    return lambda b, h, q, kv: flags[kv] or q == kv


@mask
def padding():
    lengths = torch.tensor([3, 6], dtype=torch.int32)
    return lambda b, h, q, kv: (kv < lengths[b]) & (q < lengths[b])


@mask
def dilated():
    step = 2
    return lambda b, h, q, kv: ((q - kv) % step == 0) & (q >= kv)


@mask
def natten_2d():
    width, reach = 3, 1

    def mod(b, h, q, kv):
        q_row, q_col = q // width, q % width
        kv_row, kv_col = kv // width, kv % width
        center = q_col.clamp(reach, width - 1 - reach)
        return ((center - kv_col).abs() <= reach) & ((q_row - kv_row).abs() <= reach)

    return mod


@mask
def sink_and_window():
    sinks, W = 1, 2
    return lambda b, h, q, kv: ((kv < sinks) | (q - kv <= W)) & (q >= kv)


@mask
def logical_functions():
    return lambda b, h, q, kv: torch.logical_or(
        torch.logical_and(q >= kv, h == 0), torch.logical_not(torch.logical_xor(q, kv))
    )


@mask
def bit_operations():
    bits = 5
    return lambda b, h, q, kv: (((q ^ kv) | (kv & bits)) >> 1 << 1) != (1 << h)


@mask
def membership():
    return lambda b, h, q, kv: kv in (1, 3) or q == kv


@mask
def per_head_by_if():
    def mod(b, h, q, kv):
        reach = 1 if h == 0 else 3
        return (q - kv).abs() <= reach

    return mod


@mask
def while_loop():
    def mod(b, h, q, kv):
        steps = 0
        while kv >= 2 and steps < 3:
            kv = kv - 2
            steps += 1
        return kv + steps <= q

    return mod


@mask
def helper_functions():
    def near(a, b, reach=1):
        return (a - b).abs() <= reach

    return lambda b, h, q, kv: near(q, kv) | near(q, kv + 3, reach=0)


@mask
def partial():
    def mod(W, b, h, q, kv, *, left=True):
        return (q - kv <= W) & (q >= kv) if left else q <= kv

    return functools.partial(mod, 3, left=True)


class _Sparse:
    def __init__(self) -> None:
        self.blocks = torch.tensor([[True, False, True], [False, True, True]])
        self.size = 2

    def keep(self, b, h, q, kv):
        return self.blocks[h, kv // self.size]

    __call__ = keep


@mask
def bound_method():
    return _Sparse().keep


@mask
def callable_object():
    return _Sparse()


@mask
def any_over_row():
    allowed = ints(KV_LEN, 3, high=5)
    return lambda b, h, q, kv: (allowed[kv] == q).any()


@mask
def all_over_row():
    need = ints(Q_LEN, 3, high=2).bool()
    return lambda b, h, q, kv: need[q].all() | (q == kv)


@mask
def list_of_tensors():
    rows = [torch.tensor([0, 1, 2, 3, 4, 5]), torch.tensor([5, 4, 3, 2, 1, 0])]
    return lambda b, h, q, kv: rows[0][q] > rows[1][kv]


@mask
def host_read():
    limit = torch.tensor(3)
    return lambda b, h, q, kv: kv < limit.item()
