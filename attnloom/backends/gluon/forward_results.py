"""How results of a consumer of the forward leave: output by way of shared memory and TMA, which
leaves out rows that do not exist, lse and maxima straight to memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from attnloom.backends.gluon import builtins as bi
from attnloom.backends.gluon.forward_math import log_sums, rescaled
from attnloom.backends.gluon.rings import box


@gluon.jit
def _space(mem, at, cfg: gl.constexpr):
    """Where a panel of results leaves from."""
    if cfg.OUT_IN_Q:
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        return bi.reinterpret(mem.out.index(at), cfg.OPERAND, [cfg.ROWS, cfg.DV], LAYOUT)
    else:
        return mem.out.index(at)


@gluon.jit
def _leave_in_turn(out_desc, mem, at, result, b, h, row, cfg: gl.constexpr):
    """Panels of results by way of two spaces."""
    for i in gl.static_range(cfg.PANELS):
        if i > 1:
            tma.store_wait(1)
        space = mem.out.index(at + i % 2)
        space.store(result[i].to(cfg.OPERAND))
        fence_async_shared()
        bi.async_store(out_desc, [b, h, row, i * cfg.DV], box(space, cfg.ROWS, cfg.DV, cfg))


@gluon.jit
def store_results(
    out_desc, outs, mem, at, acc, m_i, l_i, place, base, OUT: gl.constexpr, cfg: gl.constexpr
):
    """Of a consumer's rows, from its panel `at` of `out`. place = (b, h, unit, first row, queries,
    Q_LEN)."""
    b, h, unit, row, queries, q_len = place
    lse, max_scores = outs
    inverse = 1.0 / gl.where(l_i == 0, 1.0, l_i)
    result = rescaled(acc, inverse, OUT, cfg)
    tma.store_wait(0)
    if cfg.OUT_RING:
        _leave_in_turn(out_desc, mem, at, result, b, h, row, cfg)
    elif cfg.PANELS == 3:
        for i in gl.static_range(3):
            _space(mem, at + i, cfg).store(result[i].to(cfg.OPERAND))
    elif cfg.PARTS == 3:
        for i in gl.static_range(3):
            part = _space(mem, at, cfg).slice(i * cfg.PART, cfg.PART, 1)
            part.store(result[i].to(cfg.OPERAND))
    else:
        _space(mem, at, cfg).store(result.to(cfg.OPERAND))
    if not cfg.OUT_RING:
        fence_async_shared()
        for i in gl.static_range(cfg.PANELS):
            panel = box(_space(mem, at + i, cfg), cfg.ROWS, cfg.DV, cfg)
            bi.async_store(out_desc, [b, h, row, i * cfg.DV], panel)
    log_sum, natural = log_sums(m_i, l_i, base, cfg)
    at = unit.to(gl.int64) * q_len + queries
    gl.store(lse + at, log_sum, mask=queries < q_len)
    if cfg.WANT_MAX:
        gl.store(max_scores + at, natural, mask=queries < q_len)
