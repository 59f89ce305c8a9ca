#define HAS_SCORE 1
#define HAS_MASK 0
#define HAS_CAPTURED_GRAD 1

struct Head {
    float n5;
};
struct Row {
};
struct Column {
};

INLINE void head_values(const ModArgs& M, i64 b, i64 h, Head& H) {
    const float n5 = load_one<float>(M.tensors[0], h);
    H.n5 = n5;
}

INLINE void row_values(const ModArgs& M, const Head& H, i64 b, i64 h, i64 q, Row& R) {
}

INLINE void column_values(const ModArgs& M, const Head& H, i64 b, i64 h, i64 k0, Column& C) {
}

INLINE vf score_mod(const ModArgs& M, const Head& H, const Row& R, const Column& C, i64 b, i64 h, i64 q, i64 k, int x, vf score) {
    const v_f32 n7 = splat<v_f32>(((float)(k - q) * H.n5)) + lane_index<v_f32>() * splat<v_f32>(H.n5);
    const v_f32 n8 = (score + n7);
    return n8;
}
struct HeadGrad {
    vf g0;
};

INLINE void head_grad_begin(HeadGrad& G) {
    G.g0 = vf{};
}

INLINE void head_grad_flush(const ModArgs& M, const Head& H, HeadGrad& G, i64 b, i64 h) {
    add_one(M, 0, vf_hsum(G.g0), h);
    G.g0 = vf{};
}

INLINE vf score_grad(const ModArgs& M, const Head& H, const Row& R, const Column& C, HeadGrad& G, i64 b, i64 h, i64 q, i64 k, int x, vf score, vf dscore, vm live) {
    const v_f32 n6 = splat<v_f32>((float)(k - q)) + lane_index<v_f32>();
    const v_f32 n10 = (n6 * dscore);
    const vf d0 = select(live, n10, vf{});
    G.g0 += d0;
    return select(live, dscore, vf{});
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
