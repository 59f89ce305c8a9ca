#define HAS_SCORE 1
#define HAS_MASK 0
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
    v_f32 n5 = splat<v_f32>((0x0.0p+0f));
    for (i64 r0 = 0; r0 < M.tensors[0].size[1]; r0++) {
        const float n3 = load_one<float>(M.tensors[0], h, r0);
        const v_f32 n4 = (score * splat<v_f32>(n3));
        n5 = (n5 + n4);
    }
    const v_f32 n6 = (score * n5);
    return n6;
}
struct MaskHead {
};
struct MaskRow {
};
struct MaskColumn {
};

INLINE void mask_head_values(const ModArgs& M, i64 b, i64 h, MaskHead& H) {
}

INLINE void mask_row_values(const ModArgs& M, const MaskHead& H, i64 b, i64 h, i64 q, MaskRow& R) {
}

INLINE void mask_column_values(const ModArgs& M, const MaskHead& H, i64 b, i64 h, i64 k0, MaskColumn& C) {
}

INLINE vm mask_mod(const ModArgs& M, const MaskHead& H, const MaskRow& R, const MaskColumn& C, i64 b, i64 h, i64 q, i64 k, int x) {
    return vm_set(true);
}
