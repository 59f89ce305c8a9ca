"""Rows of PUBLISHED that change scores, and those of mods made of score_mods.

Most lie under a mask with empty rows; those whose papers attend to everything have none.
"""

from __future__ import annotations

import torch

from attnloom import mods
from tests.harness.draw import Draw, Sizes
from tests.harness.published import canvas_of, pair, score
from tests.harness.table import Captures

score("alibi", lambda c, s: mods.alibi(s.Hq))
pair("alibi/symmetric", lambda c, s: (mods.alibi(s.Hq, symmetric=True), None))
pair(
    "t5_bias",
    lambda c, s: (mods.t5_bias(c["table"]), None),
    lambda s, d: {"table": d.normal(32, s.Hq)},
    ("table",),
)
score(
    "t5_bias/decoder",
    lambda c, s: mods.t5_bias(c["table"], bidirectional=False, max_distance=20),
    lambda s, d: {"table": d.normal(12, s.Hq)},
    ("table",),
)
score(
    "relative_bias",
    lambda c, s: mods.relative_bias(c["table"]),
    lambda s, d: {"table": d.normal(s.Hq, 2 * 30 + 1)},
    ("table",),
)
pair(
    "additive_bias",
    lambda c, s: (mods.additive_bias(c["bias"]), None),
    lambda s, d: {"bias": d.normal(s.B, s.Hq, s.Q_LEN, s.KV_LEN)},
    ("bias",),
)
score(
    "pair_bias",
    lambda c, s: mods.pair_bias(c["bias"], c["factor"]),
    lambda s, d: {"bias": d.normal(s.B, s.Q_LEN, s.KV_LEN), "factor": d.uniform(0.5, 2.0, s.Hq)},
    ("bias", "factor"),
)
score(
    "head_bias",
    lambda c, s: mods.head_bias(c["bias"]),
    lambda s, d: {"bias": d.normal(s.Hq)},
    ("bias",),
)


def _swin(c: Captures, s: Sizes):
    return mods.swin_bias(canvas_of(s), 3, c["table"]), mods.swin_window(canvas_of(s), 3)


pair(
    "swin_bias",
    _swin,
    lambda s, d: {"table": d.normal((2 * 3 - 1) ** 2, s.Hq)},
    ("table",),
    square=True,
)
score("sandwich", lambda c, s: mods.sandwich(s.Hq, s.reach - 1))
score("distance_decay", lambda c, s: mods.distance_decay(s.Hq))
pair(
    "graphormer_spatial",
    lambda c, s: (mods.graphormer_spatial(c["distances"], c["table"]), None),
    lambda s, d: {
        "distances": d.integers(0, 6, s.B, s.Q_LEN, s.KV_LEN),
        "table": d.normal(6, s.Hq),
    },
    ("table",),
)


def _paths(s: Sizes, d: Draw) -> Captures:
    """Paths of 0 to 3 of 7 edges, with features of length 4."""
    paths = d.integers(0, 7, s.B, s.Q_LEN, s.KV_LEN, 3)
    ends = d.integers(0, 4, s.B, s.Q_LEN, s.KV_LEN, 1)
    return {
        "paths": paths.masked_fill(torch.arange(3) >= ends, -1),
        "features": d.normal(s.B, 7, 4),
        "weight": d.normal(3, s.Hq, 4),
    }


pair(
    "graphormer_edge",
    lambda c, s: (mods.graphormer_edge(c["paths"], c["features"], c["weight"]), None),
    _paths,
    ("features", "weight"),
)
score("softcap", lambda c, s: mods.softcap(2.0))
score(
    "softcap/learned",
    lambda c, s: mods.softcap(c["cap"]),
    lambda s, d: {"cap": d.uniform(1.5, 2.5, 1)},
    ("cap",),
)
score(
    "head_temperature",
    lambda c, s: mods.head_temperature(c["temperature"]),
    lambda s, d: {"temperature": d.uniform(0.7, 2.0, s.Hq)},
    ("temperature",),
)
score(
    "position_temperature",
    lambda c, s: mods.position_temperature(c["scale"]),
    lambda s, d: {"scale": d.uniform(0.5, 2.0, s.Hq, s.Q_LEN)},
    ("scale",),
)
score(
    "latent_rope",
    lambda c, s: mods.latent_rope(c["q_rope"], c["k_rope"], c["scale"]),
    lambda s, d: {
        "q_rope": d.normal(s.B, s.Hq, s.Q_LEN, 6),
        "k_rope": d.normal(s.B, s.KV_LEN, 6),
        "scale": d.uniform(0.2, 0.4, 1),
    },
    ("q_rope", "k_rope", "scale"),
)

# score_mods from score_mods
score("compose", lambda c, s: mods.compose(mods.alibi(s.Hq), mods.softcap(2.0)))
score(
    "per_head/scores",
    lambda c, s: mods.per_head(
        mods.softcap(1.5),
        mods.head_temperature(c["temperature"]),
        heads=[h % 2 for h in range(s.Hq)],
    ),
    lambda s, d: {"temperature": d.uniform(0.7, 2.0, s.Hq)},
    ("temperature",),
)
score(
    "offset/scores",
    lambda c, s: mods.offset(mods.relative_bias(c["table"]), 7, 2),
    lambda s, d: {"table": d.normal(s.Hq, 2 * 20 + 1)},
    ("table",),
)


def _learned_by_place(s: Sizes, d: Draw) -> Captures:
    return {"ids": d.integers(0, 3, s.reach), "table": d.normal(s.Hq, 2 * 10 + 1)}


pair(
    "on_documents/scores",
    lambda c, s: (
        mods.on_documents(mods.relative_bias(c["table"]), ids=c["ids"]),
        mods.documents(c["ids"]),
    ),
    _learned_by_place,
    ("table",),
)
score(
    "logical_to_physical/scores",
    lambda c, s: mods.logical_to_physical(mods.relative_bias(c["table"]), c["place"]),
    lambda s, d: {
        "place": d.uniform(0.0, 1.0, s.reach).argsort(),
        "table": d.normal(s.Hq, 2 * 40 + 1),
    },
    ("table",),
)
