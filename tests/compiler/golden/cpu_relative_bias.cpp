#define HAS_SCORE 1
#define HAS_MASK 0
#define HAS_CAPTURED_GRAD 1

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
    const v_f32 n7 = load_line<float>(M.tensors[0], Line{h, 0}, Line{((q - k) + (4ll)), -1});
    const v_f32 n8 = (score + n7);
    return n8;
}
struct HeadGrad {
};

INLINE void head_grad_begin(HeadGrad& G) {
}

INLINE void head_grad_flush(const ModArgs& M, const Head& H, HeadGrad& G, i64 b, i64 h) {
}

INLINE vf score_grad(const ModArgs& M, const Head& H, const Row& R, const Column& C, HeadGrad& G, i64 b, i64 h, i64 q, i64 k, int x, vf score, vf dscore, vm live) {
    const vf d0 = select(live, dscore, vf{});
    add_line(M, 0, d0, Line{h, 0}, Line{((q - k) + (4ll)), -1});
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
