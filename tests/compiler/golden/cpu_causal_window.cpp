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
    i64 n4;
};
struct MaskRow {
};
struct MaskColumn {
};

INLINE void mask_head_values(const ModArgs& M, i64 b, i64 h, MaskHead& H) {
    const i64 n4 = M.ints[0];
    H.n4 = n4;
}

INLINE void mask_row_values(const ModArgs& M, const MaskHead& H, i64 b, i64 h, i64 q, MaskRow& R) {
}

INLINE void mask_column_values(const ModArgs& M, const MaskHead& H, i64 b, i64 h, i64 k0, MaskColumn& C) {
}

INLINE vm mask_mod(const ModArgs& M, const MaskHead& H, const MaskRow& R, const MaskColumn& C, i64 b, i64 h, i64 q, i64 k, int x) {
    const vi n1 = splat<vi>(k) + lane_index<vi>();
    const vm n2 = v_ge(splat<vi>(q), n1);
    const vi n3 = splat<vi>((q - k)) - lane_index<vi>();
    const vm n5 = v_le(n3, splat<vi>(H.n4));
    const vm n6 = (n2 & n5);
    return n6;
}
