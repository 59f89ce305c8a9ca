#define HAS_SCORE 1
#define HAS_MASK 0
#define HAS_CAPTURED_GRAD 0

struct Head {
    float n2;
    float n5;
};
struct Row {
};
struct Column {
};

INLINE void head_values(const ModArgs& M, i64 b, i64 h, Head& H) {
    const float n1 = (float)M.reals[0];
    const float n2 = v_reciprocal(n1);
    H.n2 = n2;
    const float n5 = (float)M.reals[1];
    H.n5 = n5;
}

INLINE void row_values(const ModArgs& M, const Head& H, i64 b, i64 h, i64 q, Row& R) {
}

INLINE void column_values(const ModArgs& M, const Head& H, i64 b, i64 h, i64 k0, Column& C) {
}

INLINE vf score_mod(const ModArgs& M, const Head& H, const Row& R, const Column& C, i64 b, i64 h, i64 q, i64 k, int x, vf score) {
    const v_f32 n3 = (score * splat<v_f32>(H.n2));
    const v_f32 n4 = v_tanh(n3);
    const v_f32 n6 = (n4 * splat<v_f32>(H.n5));
    return n6;
}
struct HeadGrad {
};

INLINE void head_grad_begin(HeadGrad& G) {
}

INLINE void head_grad_flush(const ModArgs& M, const Head& H, HeadGrad& G, i64 b, i64 h) {
}

INLINE vf score_grad(const ModArgs& M, const Head& H, const Row& R, const Column& C, HeadGrad& G, i64 b, i64 h, i64 q, i64 k, int x, vf score, vf dscore, vm live) {
    const v_f32 n3 = (score * splat<v_f32>(H.n2));
    const v_f32 n4 = v_tanh(n3);
    const v_f32 n8 = (splat<v_f32>(H.n5) * dscore);
    const v_f32 n9 = (n4 * n4);
    const v_f32 n11 = (splat<v_f32>((0x1.0000000000000p+0f)) - n9);
    const v_f32 n12 = (n8 * n11);
    const v_f32 n13 = (splat<v_f32>(H.n2) * n12);
    return select(live, n13, vf{});
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
