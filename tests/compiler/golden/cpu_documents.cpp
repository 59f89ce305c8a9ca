#define HAS_SCORE 0
#define HAS_MASK 1
#define HAS_CAPTURED_GRAD 0

struct Head {
};
struct Row {
};
struct Column {
};

INLINE void head_values(const ModArgs& M, i64 b, i64 h, Head& H) {
}

INLINE void row_values(const ModArgs& M, const Head& H, i64 b, i64 h, i64 q, Row& R) {
}

INLINE void column_values(const ModArgs& M, const Head& H, i64 b, i64 h, i64 k0, Column& C) {
}

INLINE vf score_mod(const ModArgs& M, const Head& H, const Row& R, const Column& C, i64 b, i64 h, i64 q, i64 k, int x, vf score) {
    return score;
}
struct MaskHead {
};
struct MaskRow {
    i64 n3;
};
struct MaskColumn {
    alignas(64) ilane n4[TILE_N];
};

INLINE void mask_head_values(const ModArgs& M, i64 b, i64 h, MaskHead& H) {
}

INLINE void mask_row_values(const ModArgs& M, const MaskHead& H, i64 b, i64 h, i64 q, MaskRow& R) {
    const i64 n3 = load_one<i64>(M.tensors[0], b, q);
    R.n3 = n3;
}

INLINE void mask_column_values(const ModArgs& M, const MaskHead& H, i64 b, i64 h, i64 k0, MaskColumn& C) {
    for (int x = 0; x < TILE_N; x += W) {
        const i64 k = k0 + x;
        const vi n4 = load_line<i64>(M.tensors[0], Line{b, 0}, Line{k, 1});
        store_as(C.n4 + x, n4);
    }
}

INLINE vm mask_mod(const ModArgs& M, const MaskHead& H, const MaskRow& R, const MaskColumn& C, i64 b, i64 h, i64 q, i64 k, int x) {
    const vm n5 = v_eq(splat<vi>(R.n3), load_as<vi>(C.n4 + x));
    return n5;
}
