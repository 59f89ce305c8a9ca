"""How the producer of the backward tells the others which tile comes next; PERSISTENT.

A job stays where it is until its readers are done with the tile, so that what a consumer asks only
at the end of a tile takes no registers in between. It is given back with the place of the tile's
keys and values. Glossary: backward_shared.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def give_job(mem, num, tile, b_kv, h_kv, steps):
    """What the num-th tile is; tile -1: there is none."""
    slot = num & 1
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    i = gl.arange(0, 4, LAYOUT)
    mbarrier.wait(mem.job_empty.index(slot), ((num >> 1) & 1) ^ 1)
    where = gl.where(i == 1, b_kv, gl.where(i == 2, h_kv, steps))
    mem.jobs.index(slot).store(gl.where(i == 0, tile, where))
    mbarrier.arrive(mem.job_full.index(slot), count=1)


@gluon.jit
def job_of(mem, num):
    """(tile, b_kv, h_kv, steps) of the num-th tile."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    i = gl.arange(0, 4, LAYOUT)
    job = mem.jobs.index(num & 1).load(LAYOUT)
    tile = gl.sum(gl.where(i == 0, job, 0), 0)
    b_kv = gl.sum(gl.where(i == 1, job, 0), 0)
    h_kv = gl.sum(gl.where(i == 2, job, 0), 0)
    steps = gl.sum(gl.where(i == 3, job, 0), 0)
    return tile, b_kv, h_kv, steps


@gluon.jit
def wait_for_job(mem, num):
    mbarrier.wait(mem.job_full.index(num & 1), (num >> 1) & 1)


@gluon.jit
def done_with_job(mem, num):
    mbarrier.arrive(mem.job_empty.index(num & 1))
