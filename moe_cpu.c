/* moe_cpu.c: every layer, forward and backward, in plain C. This is the reference: read it beside
   moe.h, which says what each operation takes, and model.h, which calls them in order.

   The same file makes two backends: real = float is the CPU trainer, and -Dreal=double with
   -Dbackend_cpu=backend_f64 is the reference that every test measures against.

   Order: embedding, norms, linear, rotary, attention, router, plan, experts, classifier,
   optimiser, memory. Matrix products and vector helpers live in gemm.h; here is the formula.

   Three rules make every result the same for any number of threads and any batch around a row:
   - work is split over outputs, never over a sum; a sum over many rows (a weight gradient, a loss)
     is cut into blocks of fixed size, and the blocks are added in order;
   - inside a row, sums run over a fixed number of lanes (dot, sum in gemm.h);
   - which thread does a piece, and how big the pieces of *outputs* are, cannot change a bit.

   Scratch belongs to the caller: each operation states its need at the bottom (scratch_bytes). */
#ifndef real
#define real float
#endif
#include "gemm.h"
#include "moe.h"

#include <math.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#define root __builtin_choose_expr(sizeof(real) == 8, sqrt, sqrtf) // IEEE: the same bits everywhere

enum {
    ROW_BLOCK = 256,   // rows whose part of a weight gradient is summed before it is added
    ROUTER_BLOCK = 64, // likewise for the router's means
    KEY_BLOCK = 64,    // attention walks the keys in blocks of this size, from key 0
    QUERY_BLOCK = 256, // queries that share a packed key block
    EXPERT_ROWS = 96,  // slots of an expert whose SwiGLU or output is in cache at a time
    TILE_ROWS = 64,    // a combine tile has at least so many source rows
    STRIP = 512,       // columns of a combine tile
    COPY_ROWS = 400,   // slots of an expert that pay a copy of a matrix that need not be turned
    PIECES = 16,       // a tensor is cut into this many pieces for the norm and the update
    COLUMNS = 32       // columns that one task of a column sum owns
};

// Whether a loop of so many elementary steps is worth waking the other threads (some microseconds).
// A build without OpenMP asks nowhere.
__attribute__((unused)) static inline int worth(size_t steps) { return steps > 50000; }

static inline int min_int(int a, int b) { return a < b ? a : b; }
static inline int max_int(int a, int b) { return a > b ? a : b; }
static inline int blocks_of(int n, int size) { return (n + size - 1) / size; }
static inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// The calling thread's part of a scratch area.
static inline void *my_part(void *scratch, size_t bytes_each) {
    return (char *)scratch + (size_t)thread_id() * round_up(bytes_each, ARENA_ALIGN);
}

// sum of a*b*c in a fixed order: blocks of ROW_BLOCK, each through dot
static inline real dot3(const real *a, const real *b, const real *c, int n) {
    real t[ROW_BLOCK], s = 0;
    for (int i = 0; i < n; i += ROW_BLOCK) {
        int m = min_int(ROW_BLOCK, n - i);
        for (int j = 0; j < m; j++) t[j] = a[i + j] * b[i + j];
        s += dot(t, c + i, m);
    }
    return s;
}

// -------------------------------------------------------------------------------------------------
// embedding

static void embedding_forward(act_t *out_, const int *tokens, Mat wte, int N) {
    real *out = out_;
    const real *w = wte.data;
    const size_t C = wte.cols;
#pragma omp parallel for if (worth(N * C))
    for (int n = 0; n < N; n++) memcpy(out + n * C, w + tokens[n] * wte.ld, C * sizeof(real));
}

// A task owns some columns and walks the tokens in order: two tokens with one id never race.
static void embedding_backward(
    grad_t *dwte_, const act_t *dout_, const int *tokens, int N, int V, int C, void *scratch) {
    real *dwte = dwte_;
    const real *dout = dout_;
    (void)V, (void)scratch;
#pragma omp parallel for if (worth((size_t)N * C))
    for (int c0 = 0; c0 < C; c0 += COLUMNS) {
        int c1 = min_int(c0 + COLUMNS, C);
        for (int n = 0; n < N; n++) {
            real *dw = dwte + (size_t)tokens[n] * C;
            const real *d = dout + (size_t)n * C;
            for (int c = c0; c < c1; c++) dw[c] += d[c];
        }
    }
}

// -------------------------------------------------------------------------------------------------
// RMSNorm

static inline real norm_row(real *out, const real *x, const real *weight, int C, double eps) {
    real r = 1 / root(dot(x, x, C) / C + (real)eps);
    for (int c = 0; c < C; c++) out[c] = x[c] * r * weight[c];
    return r;
}

static void rmsnorm_forward(act_t *out_, stat_t *rstd_, const act_t *inp_, const param_t *weight,
    int N, int C, double eps) {
    real *out = out_, *rstd = rstd_;
    const real *inp = inp_;
#pragma omp parallel for if (worth((size_t)N * C))
    for (int n = 0; n < N; n++)
        rstd[n] = norm_row(out + (size_t)n * C, inp + (size_t)n * C, weight, C, eps);
}

static void residual_rmsnorm_forward(act_t *sum_, act_t *out_, stat_t *rstd_, const act_t *inp_,
    const act_t *branch_, const param_t *weight, int N, int C, double eps) {
    real *sums = sum_, *out = out_, *rstd = rstd_;
    const real *inp = inp_, *branch = branch_;
#pragma omp parallel for if (worth((size_t)N * C))
    for (int n = 0; n < N; n++) {
        const size_t at = (size_t)n * C;
        for (int c = 0; c < C; c++) sums[at + c] = inp[at + c] + branch[at + c];
        rstd[n] = norm_row(out + at, sums + at, weight, C, eps);
    }
}

/* With xhat = x * rstd and dxhat = dout * weight:  dx = rstd * (dxhat - xhat * mean(dxhat * xhat)).
 */
static void rmsnorm_backward(act_t *dinp_, grad_t *dweight_, const act_t *dout_, const act_t *inp_,
    const stat_t *rstd_, const param_t *weight_, int N, int C, void *scratch) {
    real *dinp = dinp_, *dweight = dweight_;
    const real *dout = dout_, *inp = inp_, *rstd = rstd_, *weight = weight_;
    (void)scratch;
#pragma omp parallel for if (worth((size_t)N * C))
    for (int n = 0; n < N; n++) {
        real *dx = dinp + (size_t)n * C;
        const real *d = dout + (size_t)n * C, *x = inp + (size_t)n * C, r = rstd[n];
        real mean = dot3(d, weight, x, C) * r / C;
        for (int c = 0; c < C; c++) dx[c] += r * (d[c] * weight[c] - x[c] * r * mean);
    }
#pragma omp parallel for if (worth((size_t)N * C))
    for (int c0 = 0; c0 < C; c0 += COLUMNS) {
        int c1 = min_int(c0 + COLUMNS, C);
        for (int n0 = 0; n0 < N; n0 += ROW_BLOCK) {
            real acc[COLUMNS] = {0};
            for (int n = n0; n < min_int(n0 + ROW_BLOCK, N); n++)
                for (int c = c0; c < c1; c++)
                    acc[c - c0] += dout[(size_t)n * C + c] * (inp[(size_t)n * C + c] * rstd[n]);
            for (int c = c0; c < c1; c++) dweight[c] += acc[c - c0];
        }
    }
}

static void add(act_t *out_, const act_t *a_, const act_t *b_, size_t count) {
    real *out = out_;
    const real *a = a_, *b = b_;
#pragma omp parallel for if (worth(count))
    for (size_t i = 0; i < count; i++) out[i] = a[i] + b[i];
}

// -------------------------------------------------------------------------------------------------
// linear

static void linear_forward(act_t *out, const act_t *inp, Mat w, int N, void *scratch) {
    Gemm g = {{inp, w.cols, NULL, 0}, {w.data, w.ld, NULL, 1}, out, w.rows, N, w.rows, w.cols, 0};
    gemm_grouped(&g, 1, scratch);
}

static void linear_backward(act_t *dinp, grad_t *dweight, const act_t *dout, const act_t *inp,
    Mat w, int N, int accumulate, void *scratch) {
    if (dinp) {
        Gemm g = {{dout, w.rows, NULL, 0}, {w.data, w.ld, NULL, 0}, dinp, w.cols, N, w.cols, w.rows,
            accumulate};
        gemm_grouped(&g, 1, scratch);
    }
    Gemm g = {{dout, w.rows, NULL, 1}, {inp, w.cols, NULL, 0}, dweight, w.ld, w.rows, w.cols, N, 1};
    gemm_grouped(&g, 1, scratch);
}

// -------------------------------------------------------------------------------------------------
// rotary embedding with query and key norms

/* A row of qkv seen as groups that are normalised together: q and k have one group a head (per-head
   norm), one group in all (full norm), or no norm at all. */
typedef struct QkGroups {
    int heads, groups, width;
} QkGroups;
static inline QkGroups qk_groups(int heads, int head_dim, int qk_norm) {
    QkGroups g = {heads, qk_norm == QK_NORM_FULL ? 1 : heads,
        qk_norm == QK_NORM_FULL ? heads * head_dim : head_dim};
    return g;
}

/* One head: u * r * w (w NULL: u), then pairs (i, i + half) turned by their angles. rope: half cosines,
   half sines. */
static inline void rotate_head(
    real *out, const real *u, const real *w, real r, const real *rope, int half) {
    for (int i = 0; i < half; i += VL) {
        const int left = half - i;
        vreal lo = vload(u + i, left), hi = vload(u + half + i, left);
        const vreal c = vload(rope + i, left), s = vload(rope + half + i, left);
        if (w) {
            lo = lo * vset(r) * vload(w + i, left);
            hi = hi * vset(r) * vload(w + half + i, left);
        }
        vstore(out + i, lo * c - hi * s, left);
        vstore(out + half + i, hi * c + lo * s, left);
    }
}
// Turns a gradient back.
static inline void unrotate_head(real *dx, const real *d, const real *rope, int half) {
    for (int i = 0; i < half; i += VL) {
        const int left = half - i;
        const vreal lo = vload(d + i, left), hi = vload(d + half + i, left);
        const vreal c = vload(rope + i, left), s = vload(rope + half + i, left);
        vstore(dx + i, lo * c + hi * s, left);
        vstore(dx + half + i, hi * c - lo * s, left);
    }
}
/* The norm's backward pass in place: dw += dx * xhat, dx = r * (dx * w - xhat * mean), with xhat =
   x * r and mean = r * mean of dx * w * x. */
static inline void unnorm_group(real *dx, real *dw, const real *x, const real *w, real r, int n) {
    const real mean = dot3(dx, w, x, n) * r / n;
    for (int i = 0; i < n; i += VL) {
        const int left = n - i;
        const vreal d = vload(dx + i, left), xhat = vload(x + i, left) * vset(r);
        vstore(dw + i, vload(dw + i, left) + d * xhat, left);
        vstore(dx + i, vset(r) * (d * vload(w + i, left) - xhat * vset(mean)), left);
    }
}

static void qk_rope_forward(act_t *q_, act_t *k_, act_t *v_, stat_t *rstd_, const act_t *qkv_,
    const param_t *q_weight, const param_t *k_weight, const stat_t *rope_, Attn a) {
    const int hd = a.head_dim, half = hd / 2, N = a.B * a.T;
    const int stride = (a.n_heads + 2 * a.n_kv_heads) * hd;
    const real *qkv = qkv_, *rope = rope_;
    const QkGroups side[2] = {
        qk_groups(a.n_heads, hd, a.qk_norm), qk_groups(a.n_kv_heads, hd, a.qk_norm)};
#pragma omp parallel for if (worth((size_t)N * stride))
    for (int n = 0; n < N; n++) {
        const int b = n / a.T, t = n % a.T, pos = (a.start ? a.start[b] : 0) + t;
        const int padding = a.len && t >= a.len[b];
        const real *x = qkv + (size_t)n * stride;
        real *rstd = rstd_ ? (real *)rstd_ + (size_t)n * (side[0].groups + side[1].groups) : NULL;
        for (int is_k = 0; is_k < 2; is_k++) {
            const QkGroups s = side[is_k];
            const real *weight = is_k ? k_weight : q_weight;
            for (int g = 0; g < s.groups; g++, x += s.width) {
                real r = 1;
                if (a.qk_norm != QK_NORM_NONE) {
                    r = 1 / root(dot(x, x, s.width) / s.width + (real)a.eps);
                    if (rstd) *rstd++ = r;
                }
                for (int h = 0; h < s.width / hd; h++) {
                    const int head = g * (s.width / hd) + h;
                    const real *u = x + h * hd, *w = weight ? weight + h * hd : NULL;
                    real *out = is_k
                        ? (real *)k_ + (((size_t)b * a.n_kv_heads + head) * a.cache_len + pos) * hd
                        : (real *)q_ + (((size_t)b * a.n_heads + head) * a.T + t) * hd;
                    if (padding) { // a query of zeros; the cache is left alone
                        if (!is_k) memset(out, 0, hd * sizeof(real));
                        continue;
                    }
                    rotate_head(out, u, w, r, rope + (size_t)pos * hd, half);
                }
            }
        }
        for (int h = 0; h < a.n_kv_heads && !padding; h++)
            memcpy((real *)v_ + (((size_t)b * a.n_kv_heads + h) * a.cache_len + pos) * hd,
                x + h * hd, hd * sizeof(real));
    }
}

// Weight gradients: a partial sum for each block of ROW_BLOCK rows in scratch, then added in order.
static void qk_rope_backward(act_t *dqkv_, grad_t *dq_weight, grad_t *dk_weight, const act_t *dq,
    const act_t *dk, const act_t *dv_, const act_t *qkv_, const stat_t *rstd_,
    const param_t *q_weight, const param_t *k_weight, const stat_t *rope_, Attn a, void *scratch) {
    const int hd = a.head_dim, half = hd / 2, N = a.B * a.T;
    const int stride = (a.n_heads + 2 * a.n_kv_heads) * hd;
    const int normed = a.qk_norm != QK_NORM_NONE;
    const real *qkv = qkv_, *rope = rope_, *dv = dv_;
    const QkGroups side[2] = {
        qk_groups(a.n_heads, hd, a.qk_norm), qk_groups(a.n_kv_heads, hd, a.qk_norm)};
    const int width = side[0].width + side[1].width; // both weights, one after the other
    real *partial = scratch;
#pragma omp parallel for if (worth((size_t)N * stride))
    for (int n0 = 0; n0 < N; n0 += ROW_BLOCK) {
        real *acc = partial + (size_t)(n0 / ROW_BLOCK) * width;
        if (normed) memset(acc, 0, width * sizeof(real));
        for (int n = n0; n < min_int(n0 + ROW_BLOCK, N); n++) {
            const int b = n / a.T, t = n % a.T;
            const real *x = qkv + (size_t)n * stride;
            const real *rstd = (const real *)rstd_ + (size_t)n * (side[0].groups + side[1].groups);
            real *dx = (real *)dqkv_ + (size_t)n * stride;
            for (int is_k = 0; is_k < 2; is_k++) {
                const QkGroups s = side[is_k];
                const real *w = is_k ? k_weight : q_weight;
                real *dw = acc + (is_k ? side[0].width : 0);
                for (int g = 0; g < s.groups; g++, x += s.width, dx += s.width) {
                    for (int h = 0; h < s.width / hd; h++) { // rotate back
                        const int head = g * (s.width / hd) + h;
                        const real *d = is_k
                            ? (const real *)dk + (((size_t)b * a.n_kv_heads + head) * a.T + t) * hd
                            : (const real *)dq + (((size_t)b * a.n_heads + head) * a.T + t) * hd;
                        unrotate_head(dx + h * hd, d, rope + (size_t)t * hd, half);
                    }
                    if (normed) unnorm_group(dx, dw, x, w, *rstd++, s.width);
                }
            }
            for (int h = 0; h < a.n_kv_heads; h++)
                memcpy(dx + h * hd, dv + (((size_t)b * a.n_kv_heads + h) * a.T + t) * hd,
                    hd * sizeof(real));
        }
    }
    for (int n0 = 0; n0 < N && normed; n0 += ROW_BLOCK) {
        const real *acc = partial + (size_t)(n0 / ROW_BLOCK) * width;
        for (int i = 0; i < side[0].width; i++) ((real *)dq_weight)[i] += acc[i];
        for (int i = 0; i < side[1].width; i++) ((real *)dk_weight)[i] += acc[side[0].width + i];
    }
}

// -------------------------------------------------------------------------------------------------
// attention [Dao 2022, FlashAttention: online softmax over key blocks]

static int all_finite(const real *x, size_t n) {
    int bad = 0;
    for (size_t i = 0; i < n; i++) bad |= !isfinite(x[i]);
    return !bad;
}

// The mask of a block's keys that a row sees, the first `seen`: its vector v.
static inline vint seen_mask(int seen, int v) {
    static const lane_int ones[2 * KEY_BLOCK] = {[0 ... KEY_BLOCK - 1] = -1};
    return *(const vint *)(ones + KEY_BLOCK - seen + v * VL);
}

/* Turns a row of scores, of KEY_BLOCK keys of which it sees the first `seen`, into exp(scale s - m)
   and zeros, with m the largest of `top` and these; returns m, and the sum of the row in *total. */
static inline real softmax_block(real *s, int seen, real scale, real top, real *total) {
    enum { V = KEY_BLOCK / VL };
    vreal x[V], acc[LANE_VECTORS] = {0}, best = vset(-INFINITY);
    UNROLL for (int v = 0; v < V; v++) {
        x[v] = vload(s + v * VL, VL) * vset(scale);
        if (seen < KEY_BLOCK) x[v] = vselect(seen_mask(seen, v), x[v], vset(-INFINITY));
        best = vmax(best, x[v]);
    }
    const real here = largest_lane(best), m = here > top || here != here ? here : top;
    UNROLL for (int v = 0; v < V; v++) {
        x[v] = vexp(x[v] - vset(m));
        acc[v % LANE_VECTORS] += x[v];
        vstore(s + v * VL, x[v], VL);
    }
    *total = lanes_sum(acc);
    return m;
}

/* Key blocks are fixed from key 0 and a row skips what lies beyond its own position, so a row meets
   the same sums in training, in a batch of any size, and one token at a time with a cache. */
static void attention_forward(act_t *out_, stat_t *lse_, const act_t *q_, const act_t *k_,
    const act_t *v_, Attn a, void *scratch) {
    const int hd = a.head_dim, T = a.T, chunks = blocks_of(T, QUERY_BLOCK), ld = a.n_heads * hd;
    const real scale = 1 / root((real)hd);
    const size_t part =
        (size_t)(QUERY_BLOCK * (KEY_BLOCK + 2)) * sizeof(real) + gemm_serial_bytes();
#pragma omp parallel for schedule( \
    dynamic) if (worth((size_t)a.B * T * ld * ((a.start ? a.cache_len : T) / 2 + 1)))
    for (int task = 0; task < a.B * a.n_heads * chunks; task++) {
        // late chunks first: they walk the most keys
        const int b = task / (a.n_heads * chunks), h = task / chunks % a.n_heads,
                  t0 = (chunks - 1 - task % chunks) * QUERY_BLOCK;
        const int start = a.start ? a.start[b] : 0, len = a.len ? a.len[b] : T;
        const int rows = min_int(min_int(QUERY_BLOCK, T - t0), max_int(len - t0, 0)),
                  pos0 = start + t0;
        const size_t kv =
            ((size_t)b * a.n_kv_heads + h / (a.n_heads / a.n_kv_heads)) * a.cache_len * hd;
        const real *q = (const real *)q_ + (((size_t)b * a.n_heads + h) * T + t0) * hd;
        const real *k = (const real *)k_ + kv, *v = (const real *)v_ + kv;
        real *out = (real *)out_ + ((size_t)b * T + t0) * ld + h * hd;
        real *p = my_part(scratch, part), *m = p + QUERY_BLOCK * KEY_BLOCK, *l = m + QUERY_BLOCK;
        void *pack = l + QUERY_BLOCK;

        for (int i = 0; i < min_int(QUERY_BLOCK, T - t0); i++)
            memset(out + (size_t)i * ld, 0, hd * sizeof(real));
        for (int i = 0; i < rows; i++) m[i] = -INFINITY, l[i] = 0;
        for (int j0 = 0; j0 < pos0 + rows; j0 += KEY_BLOCK) {
            const int i0 = max_int(0, j0 - pos0); // first row that sees this block
            const int keys = min_int(KEY_BLOCK, pos0 + rows - j0);
            Gemm scores = {{q + (size_t)i0 * hd, hd, NULL, 0}, {k + (size_t)j0 * hd, hd, NULL, 1},
                p + i0 * KEY_BLOCK, KEY_BLOCK, rows - i0, keys, hd, 0};
            gemm_serial(&scores, pack);
            for (int i = i0; i < rows; i++) {
                real total,
                    top = softmax_block(
                        p + i * KEY_BLOCK, min_int(keys, pos0 + i - j0 + 1), scale, m[i], &total);
                const real fade = exp_real(m[i] - top);
                real *o = out + (size_t)i * ld;
                l[i] = l[i] * fade + total;
                m[i] = top;
                for (int d = 0; d < hd; d++) o[d] *= fade;
            }
            Gemm mix = {{p + i0 * KEY_BLOCK, KEY_BLOCK, NULL, 0},
                {v + (size_t)j0 * hd, hd, NULL, 0}, out + (size_t)i0 * ld, ld, rows - i0, hd, keys,
                1};
            // 0 times a value that is not finite is NaN: then a row must not meet later keys at all
            if (pos0 + i0 - j0 + 1 < keys && !all_finite(mix.b.p, (size_t)keys * hd)) {
                mix.m = 1;
                for (int i = i0; i < rows; i++) {
                    mix.a.p = p + i * KEY_BLOCK, mix.c = out + (size_t)i * ld;
                    mix.k = min_int(keys, pos0 + i - j0 + 1);
                    gemm_serial(&mix, pack);
                }
                continue;
            }
            gemm_serial(&mix, pack);
        }
        for (int i = 0; i < rows; i++) {
            const real inv = 1 / l[i];
            for (int d = 0; d < hd; d++) out[(size_t)i * ld + d] *= inv;
            if (lse_)
                ((real *)lse_)[((size_t)b * a.n_heads + h) * T + t0 + i] = m[i] + log_real(l[i]);
        }
    }
}

/* P = exp(scale q k^T - lse), D = <dout, out>:  dV = P^T dout,  dS = scale P (dout V^T - D),
   dQ = dS K,  dK = dS^T Q. One task owns a key-value head of a sequence and its query heads. */
static void attention_backward(act_t *dq_, act_t *dk_, act_t *dv_, const act_t *dout_,
    const act_t *out_, const stat_t *lse_, const act_t *q_, const act_t *k_, const act_t *v_,
    Attn a, void *scratch) {
    const int hd = a.head_dim, T = a.T, ld = a.n_heads * hd, group = a.n_heads / a.n_kv_heads;
    const real scale = 1 / root((real)hd);
    const size_t part = (size_t)(2 * QUERY_BLOCK * KEY_BLOCK) * sizeof(real) + gemm_serial_bytes();
    real *all_D = scratch; // (B, n_heads, T)
    scratch = (char *)scratch + round_up((size_t)a.B * a.n_heads * T * sizeof(real), ARENA_ALIGN);
#pragma omp parallel for schedule(dynamic) if (worth((size_t)a.B * T * ld * (T / 2 + 1)))
    for (int task = 0; task < a.B * a.n_kv_heads; task++) {
        const int b = task / a.n_kv_heads, hk = task % a.n_kv_heads;
        const size_t kv = ((size_t)b * a.n_kv_heads + hk) * T * hd;
        real *p = my_part(scratch, part), *ds = p + QUERY_BLOCK * KEY_BLOCK;
        void *pack = ds + QUERY_BLOCK * KEY_BLOCK;
        memset((real *)dk_ + kv, 0, (size_t)T * hd * sizeof(real));
        memset((real *)dv_ + kv, 0, (size_t)T * hd * sizeof(real));
        for (int h = hk * group; h < (hk + 1) * group; h++) {
            const size_t head = ((size_t)b * a.n_heads + h) * T, at = (size_t)b * T * ld + h * hd;
            const real *q = (const real *)q_ + head * hd, *lse = (const real *)lse_ + head;
            const real *out = (const real *)out_ + at, *dout = (const real *)dout_ + at;
            real *dq = (real *)dq_ + head * hd, *D = all_D + head;
            memset(dq, 0, (size_t)T * hd * sizeof(real));
            for (int t = 0; t < T; t++) D[t] = dot(dout + (size_t)t * ld, out + (size_t)t * ld, hd);
            for (int j0 = 0; j0 < T; j0 += KEY_BLOCK) {
                const int keys = min_int(KEY_BLOCK, T - j0);
                const Operand K = {(const real *)k_ + kv + (size_t)j0 * hd, hd, NULL, 0};
                const Operand Kt = {K.p, hd, NULL, 1},
                              Vt = {(const real *)v_ + kv + (size_t)j0 * hd, hd, NULL, 1};
                for (int i0 = j0; i0 < T; i0 += QUERY_BLOCK) {
                    const int rows = min_int(QUERY_BLOCK, T - i0);
                    const Operand Q = {q + (size_t)i0 * hd, hd, NULL, 0},
                                  dO = {dout + (size_t)i0 * ld, ld, NULL, 0};
                    Gemm scores = {Q, Kt, p, KEY_BLOCK, rows, keys, hd, 0};
                    Gemm dprob = {dO, Vt, ds, KEY_BLOCK, rows, keys, hd, 0};
                    gemm_serial(&scores, pack);
                    gemm_serial(&dprob, pack);
                    for (int i = 0; i < rows; i++) {
                        const size_t t = i0 + i;
                        const int seen = min_int(keys, i0 + i - j0 + 1);
                        real *pi = p + i * KEY_BLOCK, *dsi = ds + i * KEY_BLOCK;
                        for (int v = 0; v < KEY_BLOCK / VL; v++, pi += VL, dsi += VL) {
                            vreal prob = vexp(vload(pi, VL) * vset(scale) - vset(lse[t]));
                            vreal d = prob * (vload(dsi, VL) - vset(D[t])) * vset(scale);
                            if (seen < KEY_BLOCK) {
                                prob = (vreal)((vint)prob & seen_mask(seen, v));
                                d = (vreal)((vint)d & seen_mask(seen, v));
                            }
                            vstore(pi, prob, VL);
                            vstore(dsi, d, VL);
                        }
                    }
                    const Operand Pt = {p, KEY_BLOCK, NULL, 1}, dSt = {ds, KEY_BLOCK, NULL, 1};
                    const Operand dS = {ds, KEY_BLOCK, NULL, 0};
                    Gemm dv = {Pt, dO, (real *)dv_ + kv + (size_t)j0 * hd, hd, keys, hd, rows, 1};
                    Gemm dk = {dSt, Q, (real *)dk_ + kv + (size_t)j0 * hd, hd, keys, hd, rows, 1};
                    Gemm dqg = {dS, K, dq + (size_t)i0 * hd, hd, rows, hd, keys, 1};
                    gemm_serial(&dv, pack);
                    gemm_serial(&dk, pack);
                    gemm_serial(&dqg, pack);
                }
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------
// router

// Added to a sum of scores before it divides: sigmoids of logits below -88 are all 0. It changes no
// bit of a sum above 1e-12.
#define TINY ((real)1e-20)

// p = softmax(z), returns log-sum-exp
static inline real softmax_row(real *p, const real *z, int E) {
    const real m = max_of(z, E);
    for (int e = 0; e < E; e += VL) vstore(p + e, vexp(vload(z + e, E - e) - vset(m)), E - e);
    const real s = sum(p, E), inv = 1 / s;
    for (int e = 0; e < E; e++) p[e] *= inv;
    return m + log_real(s);
}

static inline vreal sigmoid(vreal x) { return vset(1) / (vset(1) + vexp(-x)); }
static inline void sigmoid_row(real *s, const real *z, int E) {
    for (int e = 0; e < E; e += VL) vstore(s + e, sigmoid(vload(z + e, E - e)), E - e);
}

/* Chooses on logits (softmax is monotone) or on sigmoid score + bias: the best, then the best of the
   others, and so on, ties to the lowest id. A search is a pass over vectors without a branch: a list
   of the best so far would guess wrong at every insertion. Ids are valid and distinct whatever the
   values are. The scores are spent. */
static void choose_topk(int *idx, real *score, int E, int K) {
    vint lane = {0};
    for (int i = 0; i < VL; i++) lane[i] = i;
    for (int k = 0; k < K; k++) {
        vreal best = vset(-(real)INFINITY);
        vint at = lane * 0 + E;
        for (int e = 0; e < E; e += VL) {
            const vreal x = vload(score + e, E - e);
            const vint better = (x > best) & (lane + e < E);
            best = vselect(better, x, best);
            at = (better & (lane + e)) | (~better & at);
        }
        const real top = largest_lane(best);
        int found = E;
        for (int i = 0; i < VL; i++) found = best[i] == top && at[i] < found ? (int)at[i] : found;
        if (found == E) { // nothing but -Inf, NaN and those taken
            int i = 0;
            for (found = 0; i < k; i++)
                if (idx[i] == found) found++, i = -1;
        }
        idx[k] = found;
        score[found] = (real)NAN;
    }
}

static int rows_of_all(Router r) { return r.all ? r.all : r.N; }

/* Switch's balance loss E sum_e f_e P_e, f_e the part of the choices that e got and P_e its mean
   probability, and the mean lse^2 of the z-loss. p (E), z2: sums over the r.all rows. */
static void add_balance(
    real *loss_sum, int *count_sum, const int *count, const real *p, real z2, Router r) {
    const int E = r.E, N = rows_of_all(r);
    real aux = 0;
    for (int e = 0; e < E && count_sum; e++) count_sum[e] += count[e];
    if (!loss_sum) return;
    for (int e = 0; e < E; e++) aux += (real)count[e] / ((real)N * r.K) * (p[e] / N);
    loss_sum[0] += E * aux;
    loss_sum[1] += z2 / N;
}

static void router_forward(stat_t *logits_, stat_t *lse_, int *idx, stat_t *weight_, int *count,
    stat_t *loss_sum_, int *count_sum, stat_t *sums_, const act_t *X, Mat Wr, const stat_t *bias_,
    Router r, int reuse, StepState *st, int layer, void *scratch) {
    real *logits = logits_, *lse = lse_, *weight = weight_, *loss_sum = loss_sum_, *sums = sums_;
    const real *bias = bias_;
    const int N = r.N, E = r.E, K = r.K, blocks = blocks_of(N, ROUTER_BLOCK);
    linear_forward(logits, X, Wr, N, scratch);

    real *mean_p = scratch;                     // (blocks, E) sums of probabilities
    real *mean_z = mean_p + (size_t)blocks * E; // (blocks) sums of lse^2
    real *rows = mean_z + blocks;               // a thread's scores and probabilities, 2*E
    int64_t first_bad = N;
#pragma omp parallel for reduction(min : first_bad) if (worth((size_t)N * E * K))
    for (int block = 0; block < blocks; block++) {
        real *score = rows + (size_t)thread_id() * 2 * E, *p = score + E,
             *sum_p = mean_p + (size_t)block * E;
        memset(sum_p, 0, E * sizeof(real));
        mean_z[block] = 0;
        for (int n = block * ROUTER_BLOCK; n < min_int((block + 1) * ROUTER_BLOCK, N); n++) {
            const real *z = logits + (size_t)n * E;
            int *id = idx + (size_t)n * K;
            real *w = weight + (size_t)n * K, total = 0;
            if (n < first_bad && !all_finite(z, E)) first_bad = n;
            lse[n] = softmax_row(p, z, E);
            if (r.kind == ROUTER_SIGMOID) {
                sigmoid_row(p, z, E);
                for (int e = 0; e < E; e++) score[e] = p[e] + (bias ? bias[e] : 0);
            }
            if (r.kind == ROUTER_SOFTMAX && !reuse) memcpy(score, z, E * sizeof(real));
            if (!reuse) choose_topk(id, score, E, K);
            for (int k = 0; k < K; k++) total += w[k] = p[id[k]];
            for (int k = 0; k < K && r.norm_topk; k++) w[k] /= total + TINY;
            const real inv = r.kind == ROUTER_SIGMOID ? 1 / (sum(p, E) + TINY) : 1;
            for (int e = 0; e < E; e++) sum_p[e] += p[e] * inv;
            mean_z[block] += lse[n] * lse[n];
        }
    }
    if (first_bad < N && !st->bad) {
        st->bad = BAD_ROUTER;
        st->bad_layer = layer;
        st->bad_index = first_bad;
    }
    memset(count, 0, E * sizeof(int));
    for (size_t i = 0; i < (size_t)N * K; i++) count[idx[i]]++;
    for (int block = 1; block < blocks; block++) {
        for (int e = 0; e < E; e++) mean_p[e] += mean_p[(size_t)block * E + e];
        mean_z[0] += mean_z[block];
    }
    if (sums) {
        memcpy(sums, mean_p, E * sizeof(real));
        sums[E] = mean_z[0];
    }
    add_balance(loss_sum, count_sum, count, mean_p, mean_z[0], r);
}

static void router_balance(
    stat_t *loss_sum, int *count_sum, const int *count, const stat_t *sums_, Router r) {
    const real *sums = sums_;
    add_balance(loss_sum, count_sum, count, sums, sums[r.E], r);
}

/* On the chosen set S, dS_k reaches the logits through the renormalised
   weights, or through p_k alone; a slot that the plan added beyond the top-K (token rounding)
   through its raw score; one that it dropped not at all. The balance loss adds aux_coef E f_e / N
   to dp_e, the z-loss z_coef 2 lse p_e / N to dz_e. */
static void router_backward(act_t *dX, grad_t *dWr, const stat_t *dS_, const Plan *plan,
    const stat_t *logits_, const stat_t *lse_, const int *idx, const stat_t *weight_,
    const int *count, const act_t *X, Mat Wr, Router r, void *scratch) {
    const real *dS = dS_, *logits = logits_, *lse = lse_, *weight = weight_;
    const int N = r.N, E = r.E, K = r.K;
    const double all = rows_of_all(r);
    real *dlogits = scratch, *rows = dlogits + (size_t)N * E;
    void *rest =
        (char *)scratch + round_up(((size_t)N + 3 * thread_max()) * E * sizeof(real), ARENA_ALIGN);
#pragma omp parallel for if (worth((size_t)N * E * K))
    for (int n = 0; n < N; n++) {
        real *p = rows + (size_t)thread_id() * 3 * E, *s = p + E,
             *ds = s + E; // ds: d loss / d score
        real *dz = dlogits + (size_t)n * E;
        const int *id = idx + (size_t)n * K;
        const real *w = weight + (size_t)n * K, *z = logits + (size_t)n * E;
        const int is_sigmoid = r.kind == ROUTER_SIGMOID;
        softmax_row(p, z, E);
        if (is_sigmoid)
            sigmoid_row(s, z, E);
        else
            memcpy(s, p, E * sizeof(real));
        memset(dz, 0, E * sizeof(real));
        memset(ds, 0, E * sizeof(real));
        for (int i = plan->row_begin[n]; i < plan->row_begin[n + 1]; i++)
            ds[plan->expert[plan->slot[i]]] = dS[plan->slot[i]];
        if (r.norm_topk) {
            real mean = 0;
            for (int k = 0; k < K; k++) mean += w[k] * ds[id[k]];
            for (int k = 0; k < K; k++) {
                real d = w[k] * (ds[id[k]] - mean);
                dz[id[k]] = is_sigmoid ? d * (1 - s[id[k]]) : d;
            }
            for (int k = 0; k < K; k++) ds[id[k]] = 0;
        }
        // the balance loss: P_e is the mean of p (softmax), or of s / sum s (sigmoid)
        const real aux = (real)(r.aux_coef * E / (all * all * K));
        if (is_sigmoid) {
            const real total = sum(s, E) + TINY;
            real mean = 0;
            for (int e = 0; e < E; e++) mean += s[e] / total * (aux * count[e]);
            for (int e = 0; e < E; e++) ds[e] += (aux * count[e] - mean) / total;
            for (int e = 0; e < E; e++) dz[e] += ds[e] * s[e] * (1 - s[e]);
        } else {
            for (int e = 0; e < E; e++) ds[e] += aux * count[e];
            const real mean = dot(p, ds, E);
            for (int e = 0; e < E; e++) dz[e] += p[e] * (ds[e] - mean);
        }
        const real zl = (real)(r.z_coef * 2 / all) * lse[n];
        for (int e = 0; e < E; e++) dz[e] += zl * p[e];
    }
    linear_backward(dX, dWr, dlogits, X, Wr, N, 1, rest);
}

// -------------------------------------------------------------------------------------------------
// plan

static void plan_topk(Plan *p, const int *idx, const stat_t *weight_, const int *count, int N,
    int K, int E, void *scratch) {
    const real *weight = weight_;
    real *slot_weight = p->weight;
    (void)scratch;
    p->offsets[0] = 0;
    for (int e = 0; e < E; e++) p->offsets[e + 1] = p->offsets[e] + count[e];
    for (int n = 0; n < N; n++) { // offsets[e] serves as the cursor of expert e ...
        int *mine = p->slot + (size_t)n * K;
        p->row_begin[n] = n * K;
        for (int k = 0; k < K; k++) {
            const int e = idx[(size_t)n * K + k], s = p->offsets[e]++;
            p->row[s] = n;
            p->expert[s] = e;
            slot_weight[s] = weight[(size_t)n * K + k];
            int at = k; // slots are numbered by expert: sorted by number = sorted by expert
            for (; at > 0 && mine[at - 1] > s; at--) mine[at] = mine[at - 1];
            mine[at] = s;
        }
    }
    p->row_begin[N] = N * K;
    for (int e = E; e > 0; e--)
        p->offsets[e] = p->offsets[e - 1]; // ... and is the start of e+1 by now
    p->offsets[0] = 0;
}

/* A row that an expert may take. Better: the larger combine weight (0 where the row chose others),
   then the larger probability, then the earlier row: never a draw, so the best n are always the same
   n, also among NaN, which come last. (A bad router has stopped the step by then; the plan must be
   sound all the same.) */
typedef struct Candidate {
    real weight, rank;
    int row;
} Candidate;
static inline Candidate candidate(real weight, real rank, int row) {
    Candidate c = {isnan(weight) ? -INFINITY : weight, isnan(rank) ? -INFINITY : rank, row};
    return c;
}
static inline int better(Candidate a, Candidate b) {
    return a.weight != b.weight ? a.weight > b.weight
        : a.rank != b.rank      ? a.rank > b.rank
                                : a.row < b.row;
}

// The last of the n best, 1 <= n <= count; the list is reordered [quickselect, Hoare 1961].
static Candidate nth_best(Candidate *list, int count, int n) {
    for (int lo = 0, hi = count - 1; lo < hi;) {
        const int mid = lo + (hi - lo) / 2;
        const Candidate a = list[lo], b = list[mid], c = list[hi];
        const int pivot = better(a, b) ? (better(b, c)          ? mid
                                                 : better(a, c) ? hi
                                                                : lo)
            : better(a, c)             ? lo
            : better(b, c)             ? hi
                                       : mid;
        const Candidate p = list[pivot];
        int at = lo;
        list[pivot] = list[hi];
        for (int i = lo; i < hi; i++) {
            if (!better(list[i], p)) continue;
            const Candidate t = list[i];
            list[i] = list[at];
            list[at++] = t;
        }
        list[hi] = list[at];
        list[at] = p;
        if (at == n - 1) break;
        if (at < n - 1)
            lo = at + 1;
        else
            hi = at - 1;
    }
    return list[n - 1];
}

// How many slots an expert gets of which `count` rows chose it.
static int selected_count(int count, Router r) {
    if (!r.tile) return min_int(count, r.limit);
    int tiles = count / r.tile;
    const int rest = count % r.tile;
    tiles += 2 * rest > r.tile || (2 * rest == r.tile && tiles % 2);
    return min_int(tiles, r.N / r.tile) * r.tile;
}

/* The rows of expert e, `want` of them, in order. p holds those that chose it. Rows are ranked by
   their probability, or rather by a logarithm of it up to what all rows of e share. An expert that
   shrinks chooses among its own, one that grows keeps them and chooses among the others. */
static void select_rows(int *out, int want, const Plan *p, int e, const real *logits,
    const real *lse, Router r, Candidate *list) {
    const real *weight = (const real *)p->weight + p->offsets[e];
    const int *own = p->row + p->offsets[e];
    const int have = p->offsets[e + 1] - p->offsets[e], grows = want > have;
    Candidate last = {0, 0, 0};
    if (want == have) memcpy(out, own, have * sizeof(int));
    if (want == have || want == 0) return;
    for (int choosing = 1; choosing >= 0; choosing--) { // list the candidates, then take the best
        int n = 0, i = 0;                               // i: of own
        for (int k = 0; k < (grows ? r.N : have); k++) {
            const int row = grows ? k : own[k], mine = grows && i < have && own[i] == row;
            const real z = logits[(size_t)row * r.E + e];
            const Candidate c =
                candidate(grows ? 0 : weight[k], r.kind == ROUTER_SIGMOID ? z : z - lse[row], row);
            i += mine;
            if (choosing && !mine)
                list[n++] = c;
            else if (!choosing && (mine || !better(last, c)))
                *out++ = row;
        }
        if (choosing) last = nth_best(list, n, grows ? want - have : want);
    }
}

// What follows from a plan's offsets and row: expert, row_begin and slot.
static void plan_index(Plan *p) {
    const int R = p->rows, S = p->offsets[p->E];
    memset(p->row_begin, 0, (R + 1) * sizeof(int));
    for (int e = 0; e < p->E; e++)
        for (int s = p->offsets[e]; s < p->offsets[e + 1]; s++) {
            p->expert[s] = e;
            p->row_begin[p->row[s] + 1]++;
        }
    for (int n = 0; n < R; n++) p->row_begin[n + 1] += p->row_begin[n];
    for (int s = 0; s < S; s++) p->slot[p->row_begin[p->row[s]]++] = s; // by now a cursor
    for (int n = R; n > 0; n--) p->row_begin[n] = p->row_begin[n - 1];
    p->row_begin[0] = 0;
}

static void plan_select(Plan *p, int *moved, const int *idx, const stat_t *weight_,
    const int *count, const stat_t *logits_, const stat_t *lse_, Router r, int reuse,
    void *scratch) {
    const real *weight = weight_, *logits = logits_, *lse = lse_;
    const int N = r.N, E = r.E, K = r.K;
    if (!reuse) {
        int *begin = scratch, *row = begin + E + 1; // (E+1), (S)
        Candidate *lists = (Candidate *)((char *)scratch +
            round_up(((size_t)E + 1 + p->S_max) * sizeof(int), ARENA_ALIGN));
        plan_topk(p, idx, weight, count, N, K, E, NULL);
        begin[0] = 0;
        for (int e = 0; e < E; e++) {
            const int want = selected_count(count[e], r);
            begin[e + 1] = begin[e] + want;
            if (moved) moved[want > count[e]] += abs(want - count[e]);
        }
#pragma omp parallel for schedule(dynamic) if (worth((size_t)N * E))
        for (int e = 0; e < E; e++)
            select_rows(row + begin[e], begin[e + 1] - begin[e], p, e, logits, lse, r,
                lists + (size_t)thread_id() * N);
        memcpy(p->offsets, begin, (E + 1) * sizeof(int));
        memcpy(p->row, row, begin[E] * sizeof(int));
        plan_index(p);
    }
    real *slot_weight = p->weight;
#pragma omp parallel for if (worth((size_t)N * K * 8))
    for (int s = 0; s < p->offsets[E]; s++) {
        const size_t n = p->row[s];
        const int e = p->expert[s];
        int k = 0;
        while (k < K && idx[n * K + k] != e) k++;
        const real z = logits[n * E + e];
        slot_weight[s] = k < K         ? weight[n * K + k]
            : r.kind == ROUTER_SIGMOID ? (real)(1 / (1 + exp_d(-z)))
                                       : (real)exp_d(z - lse[n]);
    }
}

// -------------------------------------------------------------------------------------------------
// between ranks

// slots of expert e whose source row lies in [r0, r1): contiguous, since an expert's slots are
// sorted by row
static inline int first_slot(const Plan *p, int e, int row) {
    int lo = p->offsets[e], hi = p->offsets[e + 1];
    if (!p->row) return min_int(row, hi);
    while (lo < hi) {
        const int mid = lo + (hi - lo) / 2;
        if (p->row[mid] < row)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static void plan_part(
    Plan *p, int *from, const Plan *all, const int *order, int first, void *scratch) {
    const real *weight = all->weight;
    real *own = p->weight;
    int s = 0;
    (void)scratch;
    for (int q = 0; q < p->E; q++) {
        const int e = order ? order[q] : q, end = first_slot(all, e, first + p->rows);
        p->offsets[q] = s;
        for (int i = first_slot(all, e, first); i < end; i++, s++) {
            p->row[s] = all->row[i] - first;
            own[s] = weight[i];
            from[s] = i;
        }
    }
    p->offsets[p->E] = s;
    plan_index(p);
}

static void plan_items(int *item, int *item_row, int *item_begin, int *item_at, int *count,
    const Plan *p, int parts, void *scratch) {
    const int each = p->E / parts;
    int *next = scratch, n = 0; // (parts): where a group's next item goes in the list
    memset(count, 0, parts * sizeof(int));
    for (int fill = 0; fill < 2; fill++) {
        for (int g = 0, at = 0; g < parts && fill; g++) {
            next[g] = at;
            at += count[g];
            count[g] = 0;
        }
        for (int r = 0; r < p->rows; r++) {
            if (fill) item_begin[r] = n;
            for (int i = p->row_begin[r], last = -1; i < p->row_begin[r + 1]; i++) {
                const int s = p->slot[i], g = p->expert[s] / each, repeats = g == last;
                if (fill) item[s] = repeats ? ~(count[g] - 1) : count[g];
                if (fill && !repeats) {
                    item_row[next[g]] = r;
                    item_at[n++] = next[g]++;
                }
                count[g] += !repeats;
                last = g;
            }
        }
    }
    item_begin[p->rows] = n;
}

static void plan_merge(Plan *p, const int *item, const stat_t *weight_, const int *offsets,
    const int *start, const int *base, const int *which, int n, int ld, void *scratch) {
    const real *weight = weight_;
    real *own = p->weight;
    int s = 0;
    (void)scratch;
    for (int e = 0; e < p->E; e++) {
        const int q = which ? which[e] : e;
        p->offsets[e] = s;
        for (int i = 0; i < n; i++)
            for (int k = offsets[i * ld + q]; k < offsets[i * ld + q + 1]; k++, s++) {
                const int x = item ? item[start[i] + k] : k;
                p->row[s] = base[i] + (x < 0 ? ~x : x);
                own[s] = weight[start[i] + k];
            }
    }
    p->offsets[p->E] = s;
    plan_index(p);
}

static void plan_unmerge(stat_t *out_, const stat_t *values_, const Plan *p, const int *offsets,
    const int *start, const int *which, int n, int ld) {
    const real *values = values_;
    real *out = out_;
    int s = 0;
    for (int e = 0; e < p->E; e++) {
        const int q = which ? which[e] : e;
        for (int i = 0; i < n; i++)
            for (int k = offsets[i * ld + q]; k < offsets[i * ld + q + 1]; k++)
                out[start[i] + k] = values[s++];
    }
}

static void scatter(stat_t *out_, const stat_t *values_, const int *index, const Plan *p) {
    const real *values = values_;
    real *out = out_;
    for (int s = 0; s < p->offsets[p->E]; s++) out[index[s]] = values[s];
}

static void copy_rows(void *out, DType out_type, const int *to, const void *in, DType in_type,
    const int *from, int n, int C) {
    const size_t out_size = dtype_size(out_type), in_size = dtype_size(in_type);
#pragma omp parallel for if (worth((size_t)n * C))
    for (int i = 0; i < n; i++) {
        const int source = !from ? i : from[i] < 0 ? ~from[i] : from[i];
        if (to && to[i] < 0) continue;
        char *x = (char *)out + (size_t)(to ? to[i] : i) * C * out_size;
        const char *y = (const char *)in + (size_t)source * C * in_size;
        if (out_type == in_type)
            memcpy(x, y, C * in_size);
        else if (out_type == BF16)
            for (int c = 0; c < C; c++) ((uint16_t *)x)[c] = bf16_of((float)((const real *)y)[c]);
        else
            for (int c = 0; c < C; c++)
                ((real *)x)[c] = (real)float_of_bf16(((const uint16_t *)y)[c]);
    }
}

static void sum_rows(act_t *out_, const void *in, DType in_type, const int *begin, const int *at,
    int parts, int R, int C) {
    real *out = out_;
    const int rounded = in_type == BF16;
#pragma omp parallel for if (worth((size_t)R * C))
    for (int r = 0; r < R; r++) {
        real *sum = out + (size_t)r * C;
        const int first = begin ? begin[r] : 0, end = begin ? begin[r + 1] : parts;
        memset(sum, 0, C * sizeof(real));
        for (int i = first; i < end; i++) {
            const size_t row = begin ? (size_t)at[i] : (size_t)i * R + r;
            const real *x = (const real *)in + row * C;
            const uint16_t *h = (const uint16_t *)in + row * C;
            if (rounded)
                for (int c = 0; c < C; c++) sum[c] += (real)float_of_bf16(h[c]);
            else
                for (int c = 0; c < C; c++) sum[c] += x[c];
        }
    }
}

// -------------------------------------------------------------------------------------------------
// experts

static inline const int *plan_rows(const Plan *p, int slot) {
    return p->row ? p->row + slot : NULL;
}

// a = silu(g) * u
static inline void swiglu(real *a, const real *g, const real *u, int I) {
    for (int i = 0; i < I; i += VL) {
        vreal gate = vload(g + i, I - i);
        vstore(a + i, gate * sigmoid(gate) * vload(u + i, I - i), I - i);
    }
}

// One product for every expert; the list is laid at the start of scratch. Returns how many.
static Gemm *expert_list(void **scratch, int E) {
    Gemm *list = *scratch;
    *scratch = (char *)*scratch + round_up(E * sizeof(Gemm), ARENA_ALIGN);
    return list;
}

static void expert_up_forward(
    act_t *H, act_t *A, const act_t *X, Mat W1, const Plan *p, void *scratch) {
    Gemm *list = expert_list(&scratch, p->E);
    for (int e = 0; e < p->E; e++) {
        const int s0 = p->offsets[e];
        Gemm g = {{X, W1.cols, plan_rows(p, s0), 0},
            {(const real *)W1.data + e * W1.stride, W1.ld, NULL, 1},
            (real *)H + (size_t)s0 * W1.rows, W1.rows, p->offsets[e + 1] - s0, W1.rows, W1.cols, 0};
        list[e] = g;
    }
    gemm_grouped(list, p->E, scratch);
    if (!A) return;
    const int S = p->offsets[p->E], I = W1.rows / 2;
#pragma omp parallel for if (worth((size_t)S * I * 8))
    for (int s = 0; s < S; s++) {
        const real *h = (const real *)H + (size_t)s * 2 * I;
        swiglu((real *)A + (size_t)s * I, h, h + I, I);
    }
}

/* The tile of a combine: source rows [r0, r1) times columns [c0, c1). A task owns it and walks the
   experts in id order, so a row adds its slots in that order and nobody else writes there. */
typedef struct CombineTile {
    int r0, r1, c0, c1;
} CombineTile;

/* Rows of a tile: enough tiles for all threads, else as many as can be; and more where an expert, whose
   weights every tile reads, would have fewer than TILE_ROWS slots in it. */
static inline int combine_rows(const Plan *p, int C) {
    const int R = p->rows, strips = blocks_of(C, STRIP), want = 4 * thread_max();
    const int per = blocks_of(R, max_int(1, blocks_of(want, strips)));
    const size_t slots = max_int(1, p->offsets[p->E]), full = (size_t)TILE_ROWS * p->E * R / slots;
    const int most = blocks_of(R, thread_max());
    return max_int(
        max_int(TILE_ROWS, min_int(per, 16 * TILE_ROWS)), full < (size_t)most ? (int)full : most);
}
static inline CombineTile combine_tile(int task, int rows, int R, int C) {
    const int strips = blocks_of(C, STRIP);
    CombineTile t = {task / strips * rows, min_int(task / strips * rows + rows, R),
        task % strips * STRIP, min_int(task % strips * STRIP + STRIP, C)};
    return t;
}
static inline void clear_tile(real *out, CombineTile t, int C) {
    for (int r = t.r0; r < t.r1; r++)
        memset(out + (size_t)r * C + t.c0, 0, (t.c1 - t.c0) * sizeof(real));
}

/* The weights of all experts as a side of products, w^T where `trans`: packed once for all tiles of
   an operation, each of which would pack them anew for its few rows; or, where the rows are few,
   where they lie. Strips of at most `strip` columns, so that a tile finds its own. */
typedef struct Panels {
    Mat w;
    int trans, k, n, strip;
    real *packed; // NULL: they are not
} Panels;

static inline int shares_panels(int rows) { return rows > TILE_ROWS; }
static inline int pays_copy(int trans, int slots, int E) { return trans || slots / E > COPY_ROWS; }
static inline size_t panels_size(int k, int n, int strip) { // of one expert, in reals
    const int whole = n / strip;
    return (size_t)whole * gemm_packed(k, strip) + gemm_packed(k, n % strip);
}
static inline real *packed_at(const Panels *x, int e, int c0) {
    return x->packed + (size_t)e * panels_size(x->k, x->n, x->strip) +
        (size_t)(c0 / x->strip) * gemm_packed(x->k, x->strip);
}
static inline Operand stored_at(const Panels *x, int e, int c0) {
    const Mat w = x->w;
    const size_t at = e * w.stride + (x->trans ? c0 * w.ld : (size_t)c0);
    const Operand o = {(const real *)w.data + at, w.ld, NULL, x->trans};
    return o;
}
static inline Operand columns_of(const Panels *x, int e, int c0) { // of expert e, from c0 on
    if (!x->packed) return stored_at(x, e, c0);
    const Operand o = {
        packed_at(x, e, c0), gemm_columns(min_int(x->strip, x->n - c0)), NULL, GEMM_PACKED};
    return o;
}

// Packs them for p's slots, at the start of *scratch, which moves behind them.
static Panels expert_panels(void **scratch, Mat w, int trans, int strip, const Plan *p) {
    const int k = trans ? w.cols : w.rows, n = trans ? w.rows : w.cols, E = p->E;
    const int strips = blocks_of(n, strip), pays = pays_copy(trans, p->offsets[E], E);
    const Panels x = {w, trans, k, n, strip, shares_panels(p->rows) && pays ? *scratch : NULL};
    if (!x.packed) return x;
    *scratch =
        (char *)*scratch + round_up(E * panels_size(k, n, strip) * sizeof(real), ARENA_ALIGN);
#pragma omp parallel for schedule(dynamic) if (worth((size_t)E * k * n))
    for (int task = 0; task < E * strips; task++) {
        const int e = task / strips, c0 = task % strips * strip;
        const Operand b = stored_at(&x, e, c0);
        gemm_pack(packed_at(&x, e, c0), &b, k, min_int(strip, n - c0));
    }
    return x;
}

/* out (R,C) = or += the weighted sum over a row's slots of x W, W an expert's (k,C), transposed where
   `trans`; x (S,k) is SwiGLU of H (S,2k), where that is not NULL. weight NULL: 1. */
static void expert_combine(real *out, const real *x, const real *H, Mat W, int trans,
    const real *weight, const Plan *p, int accumulate, void *scratch) {
    const int k = trans ? W.cols : W.rows, C = trans ? W.rows : W.cols, rows = combine_rows(p, C);
    const int tiles = blocks_of(p->rows, rows) * blocks_of(C, STRIP);
    const size_t part =
        (size_t)EXPERT_ROWS * ((H ? k : 0) + STRIP) * sizeof(real) + gemm_serial_bytes();
    const Panels panels = expert_panels(&scratch, W, trans, STRIP, p);
#pragma omp parallel for schedule(dynamic) if (worth((size_t)p->rows * C * k))
    for (int task = 0; task < tiles; task++) {
        const CombineTile t = combine_tile(task, rows, p->rows, C);
        const int ld = t.c1 - t.c0;
        real *y = my_part(scratch, part), *a = y + (size_t)EXPERT_ROWS * STRIP;
        void *pack = H ? a + (size_t)EXPERT_ROWS * k : a;
        if (!accumulate) clear_tile(out, t, C);
        for (int e = 0; e < p->E; e++) {
            const int end = first_slot(p, e, t.r1);
            for (int s0 = first_slot(p, e, t.r0); s0 < end; s0 += EXPERT_ROWS) {
                const int n = min_int(EXPERT_ROWS, end - s0);
                for (int i = 0; i < n && H; i++) {
                    const real *h = H + (size_t)(s0 + i) * 2 * k;
                    swiglu(a + (size_t)i * k, h, h + k, k);
                }
                Gemm g = {{H ? a : x + (size_t)s0 * k, k, NULL, 0}, columns_of(&panels, e, t.c0), y,
                    ld, n, ld, k, 0};
                gemm_serial(&g, pack);
                for (int i = 0; i < n; i++) {
                    const real w = weight ? weight[s0 + i] : 1, *yi = y + (size_t)i * ld;
                    real *o = out + (size_t)(p->row ? p->row[s0 + i] : s0 + i) * C + t.c0;
                    if (p->row && i + 2 < n) // rows that the hardware does not foresee
                        for (int c = 0; c < ld; c += GEMM_LINE)
                            __builtin_prefetch(out + (size_t)p->row[s0 + i + 2] * C + t.c0 + c, 1);
                    for (int c = 0; c < ld; c++) o[c] += w * yi[c];
                }
            }
        }
    }
}

static void expert_down_forward(act_t *out, const act_t *H, const act_t *A, Mat W2, const Plan *p,
    int accumulate, void *scratch) {
    expert_combine(out, A, A ? NULL : H, W2, 1, p->weight, p, accumulate, scratch);
}

/* One row of the SwiGLU backward. da' is scaled by the combine weight w; returns dS = <da', a>.
     da = w da',  dg = da u (sig + silu(g) (1 - sig)),  du = da silu(g),  sa = w a */
static inline real swiglu_backward(
    real *dh, real *sa, const real *da, const real *h, real weight, int I) {
    vreal dS[LANES * sizeof(real) / GEMM_VBYTES]; // in the lanes of dot
    memset(dS, 0, sizeof dS);
    for (int i0 = 0; i0 < I; i0 += LANES)
        for (int v = 0; v < LANES / VL; v++) {
            const int i = i0 + v * VL, left = I - i;
            const vreal g = vload(h + i, left), u = vload(h + I + i, left), w = vset(weight);
            const vreal d0 = vload(da + i, left), d = d0 * w, sig = sigmoid(g), silu = g * sig;
            dS[v] = vfma(d0, silu * u, dS[v]);
            vstore(sa + i, w * (silu * u), left);
            vstore(dh + i, d * u * (sig + silu * (vset(1) - sig)), left);
            vstore(dh + I + i, d * silu, left);
        }
    return lanes_sum(dS);
}

static void expert_down_backward(act_t *dH_, act_t *sA_, stat_t *dS_, grad_t *dW2,
    const act_t *dout, const act_t *H_, Mat W2, const Plan *p, int fresh, void *scratch) {
    real *dH = dH_, *sA = sA_, *dS = dS_;
    const real *H = H_, *weight = p->weight;
    const int C = W2.rows, I = W2.cols, E = p->E;
    const size_t part = (size_t)EXPERT_ROWS * I * sizeof(real) + gemm_serial_bytes() + ARENA_ALIGN;
    const int tasks =
        blocks_of(p->offsets[E], EXPERT_ROWS) + E; // an expert's last block may be short
    void *rest = scratch;
    const Panels panels = expert_panels(&scratch, W2, 0, I, p);
#pragma omp parallel for schedule(dynamic) if (worth((size_t)p->rows * C * I))
    for (int task = 0; task < tasks; task++) {
        int e = 0, block = task; // find the expert: blocks are dealt expert by expert
        for (; e < E; e++) {
            const int n = blocks_of(p->offsets[e + 1] - p->offsets[e], EXPERT_ROWS);
            if (block < n) break;
            block -= n;
        }
        if (e == E) continue;
        const int s0 = p->offsets[e] + block * EXPERT_ROWS,
                  n = min_int(EXPERT_ROWS, p->offsets[e + 1] - s0);
        char *mine = my_part(scratch, part);
        real *da = (real *)(mine + gemm_serial_bytes());
        Gemm g = {{p->row ? (const real *)dout : (const real *)dout + (size_t)s0 * C, C,
                      plan_rows(p, s0), 0},
            columns_of(&panels, e, 0), da, I, n, I, C, 0};
        gemm_serial(&g, mine);
        for (int i = 0; i < n; i++) {
            const size_t s = s0 + i;
            const real ds = swiglu_backward(dH + s * 2 * I, sA + s * I, da + (size_t)i * I,
                H + s * 2 * I, weight ? weight[s] : 1, I);
            if (dS) dS[s] = ds;
        }
    }
    Gemm *list = expert_list(&rest, E);
    for (int e = 0; e < E; e++) {
        const int s0 = p->offsets[e];
        Gemm g = {{dout, C, plan_rows(p, s0), 1}, {sA + (size_t)s0 * I, I, NULL, 0},
            (real *)dW2 + e * W2.stride, W2.ld, C, I, p->offsets[e + 1] - s0, !fresh};
        list[e] = g;
    }
    gemm_grouped(list, E, rest);
}

static void expert_up_backward(act_t *dX, grad_t *dW1, const act_t *dH_, const act_t *X, Mat W1,
    const Plan *p, int accumulate, int fresh, void *scratch) {
    const real *dH = dH_;
    const int C = W1.cols, I2 = W1.rows, E = p->E;
    void *rest = scratch;
    expert_combine(dX, dH, NULL, W1, 0, NULL, p, accumulate, scratch);
    Gemm *list = expert_list(&rest, E);
    for (int e = 0; e < E; e++) {
        const int s0 = p->offsets[e];
        Gemm g = {{dH + (size_t)s0 * I2, I2, NULL, 1}, {X, C, plan_rows(p, s0), 0},
            (real *)dW1 + e * W1.stride, W1.ld, I2, C, p->offsets[e + 1] - s0, !fresh};
        list[e] = g;
    }
    gemm_grouped(list, E, rest);
}

// -------------------------------------------------------------------------------------------------
// classifier and loss

// rows of logits that exist at a time: fixed by V alone, a multiple of ROW_BLOCK
static inline int classifier_chunk(int V) {
    return max_int(ROW_BLOCK, min_int(4096, (1 << 20) / V / ROW_BLOCK * ROW_BLOCK));
}

static void classifier(stat_t *losses_, act_t *dinp, grad_t *dw, const act_t *inp, Mat w,
    const int *targets, int N, double scale, void *scratch) {
    real *losses = losses_, *logits = scratch;
    const int V = w.rows, C = w.cols, chunk = min_int(classifier_chunk(V), N);
    void *rest = (char *)scratch + round_up((size_t)chunk * V * sizeof(real), ARENA_ALIGN);
    for (int n0 = 0; n0 < N; n0 += chunk) {
        const int rows = min_int(chunk, N - n0);
        const real *x = (const real *)inp + (size_t)n0 * C;
        linear_forward(logits, x, w, rows, rest);
#pragma omp parallel for if (worth((size_t)rows * V))
        for (int i = 0; i < rows; i++) {
            real *z = logits + (size_t)i * V;
            const int target = targets[n0 + i];
            if (target < 0) { // ignored: no loss, and a gradient of literal zeros
                losses[n0 + i] = 0;
                memset(z, 0, V * sizeof(real));
                continue;
            }
            const real z_target = z[target], lse = softmax_row(z, z, V);
            losses[n0 + i] = lse - z_target;
            if (!dinp) continue;
            z[target] -= 1;
            for (int v = 0; v < V; v++) z[v] *= (real)scale;
        }
        if (dinp) linear_backward((real *)dinp + (size_t)n0 * C, dw, logits, x, w, rows, 0, rest);
    }
}

static void reduce_loss(StepState *st, const stat_t *losses_, int N, double scale) {
    const real *losses = losses_;
    double total = 0;
    for (int n = 0; n < N; n++) {
        total += losses[n];
        if (!isfinite(losses[n]) && !st->bad) {
            st->bad = BAD_LOSS;
            st->bad_index = n;
        }
    }
    st->loss += total * scale;
}

// -------------------------------------------------------------------------------------------------
// gradient norm and optimisers

// piece i of PIECES of a segment: cut by its size alone, at multiples of LANES
static inline void piece_of(const Segment *s, int i, size_t *begin, size_t *end) {
    const size_t each = round_up((s->count + PIECES - 1) / PIECES, LANES);
    *begin = (size_t)i * each < s->count ? (size_t)i * each : s->count;
    *end = *begin + each < s->count ? *begin + each : s->count;
}

static void set_clip(StepState *st, double square, double max_norm) {
    st->grad_norm = sqrt(square);
    st->clip = max_norm > 0 && st->grad_norm > max_norm ? max_norm / st->grad_norm : 1;
}

static void grad_norm(StepState *st, const grad_t *grads_, const Segment *seg, int nseg,
    double max_norm, void *scratch) {
    const real *grads = grads_;
    double *partial = scratch, total = 0;
#pragma omp parallel for schedule(dynamic, PIECES) if (worth((size_t)nseg * PIECES * 1024))
    for (int i = 0; i < nseg * PIECES; i++) {
        size_t begin, end;
        piece_of(&seg[i / PIECES], i % PIECES, &begin, &end);
        const real *g = grads + seg[i / PIECES].offset;
        double lane[LANES] = {0}, s = 0;
        for (size_t j = begin; j < end; j += LANES) {
            const int n = min_int(LANES, (int)(end - j < LANES ? end - j : LANES));
            if (n == LANES)
                for (int k = 0; k < LANES; k++) lane[k] += (double)g[j + k] * g[j + k];
            else
                for (int k = 0; k < n; k++) lane[k] += (double)g[j + k] * g[j + k];
        }
        for (int k = 0; k < LANES; k++) s += lane[k];
        partial[i] = s;
    }
    for (int i = 0; i < nseg * PIECES; i++) {
        total += partial[i];
        if (!isfinite(partial[i]) && !st->bad) {
            st->bad = BAD_GRADIENT;
            st->bad_index = i / PIECES;
        }
    }
    st->square = st->bad ? (double)NAN : total;
    set_clip(st, total, max_norm);
}

static void clip_norm(StepState *st, double max_norm) {
    if (!isfinite(st->square) && !st->bad) st->bad = BAD_ELSEWHERE;
    set_clip(st, st->square, max_norm);
}

/* AdamW [Loshchilov & Hutter 2019]: m and v are the moving means of g and g^2, corrected for their
   start at zero; p -= lr (mhat / (sqrt(vhat) + eps) + decay p). SGD: p -= lr (g + decay p), m and v
   unused. */
static void update(param_t *params, const grad_t *grads, grad_t *m_, grad_t *v_, const Segment *seg,
    int nseg, const StepState *st, OptimConfig o) {
    if (st->bad) return;
    const real lr = (real)st->lr, clip = (real)st->clip, b1 = (real)o.beta1, b2 = (real)o.beta2;
    const real c1 = (real)(1 / st->beta1_correction), c2 = (real)(1 / st->beta2_correction),
               eps = (real)o.eps;
#pragma omp parallel for schedule(dynamic, PIECES) if (worth((size_t)nseg * PIECES * 1024))
    for (int i = 0; i < nseg * PIECES; i++) {
        const Segment *s = &seg[i / PIECES];
        const real decay = s->decay ? (real)o.weight_decay : 0;
        size_t begin, end;
        piece_of(s, i % PIECES, &begin, &end);
        real *p = (real *)params + s->offset;
        const real *grad = (const real *)grads + s->offset;
        if (o.sgd) {
            for (size_t j = begin; j < end; j++) p[j] -= lr * (grad[j] * clip + decay * p[j]);
            continue;
        }
        real *m = (real *)m_ + s->moment, *v = (real *)v_ + s->moment;
        for (size_t j = begin; j < end; j++) {
            const real g = grad[j] * clip;
            m[j] = b1 * m[j] + (1 - b1) * g;
            v[j] = b2 * v[j] + (1 - b2) * (g * g);
            p[j] -= lr * (m[j] * c1 / (root(v[j] * c2) + eps) + decay * p[j]);
        }
    }
}

static void update_bias(
    stat_t *bias_, const int *count_sum, int E, double rate, const StepState *st) {
    real *bias = bias_;
    int64_t total = 0;
    if (st->bad) return;
    for (int e = 0; e < E; e++) total += count_sum[e];
    for (int e = 0; e < E; e++) { // the sign of mean - load, in whole numbers
        const int64_t d = total - (int64_t)count_sum[e] * E;
        bias[e] += (real)(rate * ((d > 0) - (d < 0)));
    }
}

// -------------------------------------------------------------------------------------------------
// memory

// Big arenas lie on huge pages where the kernel has them: fewer TLB misses.
static void *arena_alloc(size_t bytes) {
    const size_t huge = (size_t)2 << 20, align = bytes >= 2 * huge ? huge : ARENA_ALIGN;
    void *p = NULL;
    if (bytes > SIZE_MAX - huge || posix_memalign(&p, align, round_up(bytes + !bytes, align)))
        return NULL;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (align == huge) madvise(p, round_up(bytes, huge), MADV_HUGEPAGE);
#endif
    return p;
}

static void host_copy(void *dst, const void *src, size_t bytes) { memcpy(dst, src, bytes); }

static void zero(void *p, size_t bytes) {
    const size_t each = (size_t)1 << 20;
#pragma omp parallel for if (worth(bytes / 64))
    for (size_t at = 0; at < bytes; at += each)
        memset((char *)p + at, 0, bytes - at < each ? bytes - at : each);
}

static void nothing(void) {}

static double peak(double seconds) { return fma_peak(thread_max(), seconds); }

static inline size_t largest(size_t a, size_t b) { return a > b ? a : b; }

// Most reals of panels that an expert operation packs: of all experts, of a dense or a shared MLP.
static size_t panels_reals(const Config *c, const ScratchShape *s, int N) {
    const struct {
        int E, I, slots;
    } mlp[] = {{s->experts ? s->experts : c->n_experts, c->d_expert, s->S_max}, {1, c->d_shared, N},
        {1, c->dense_layers ? c->d_dense : 0, N}};
    size_t most = 0;
    for (size_t i = 0; i < sizeof mlp / sizeof *mlp && shares_panels(N); i++) {
        const int C = c->d_model, I = mlp[i].I, E = mlp[i].E;
        if (!I) continue;
        size_t each = panels_size(I, C, STRIP); // expert_down_forward
        if (s->backward && pays_copy(0, mlp[i].slots, E))
            each = largest(each, largest(panels_size(2 * I, C, STRIP), panels_size(C, I, I)));
        most = largest(most, (size_t)E * each);
    }
    return most;
}

// What each operation takes from the scratch arena, in its own order; the hungriest decides.
static size_t scratch_bytes(const Config *c, const ScratchShape *s) {
    const size_t N = (size_t)s->B * s->T, R = largest(N, (size_t)s->rows), E = c->n_experts,
                 threads = thread_max(), r = sizeof(real);
    const size_t width = largest(
        largest(c->d_expert, c->d_shared), c->n_experts > 1 && c->dense_layers ? c->d_dense : 0);
    const size_t gemm = gemm_scratch_bytes((int)threads), serial = gemm_serial_bytes();
    const size_t list = round_up(E * sizeof(Gemm), ARENA_ALIGN);
    size_t need = gemm;
#define EACH_THREAD(bytes) (threads * round_up(bytes, ARENA_ALIGN))
    need =
        largest(need, ((N + ROW_BLOCK - 1) / ROW_BLOCK) * 2 * qkv_rows(c) * r); // qk_rope_backward
    need =
        largest(need, EACH_THREAD(QUERY_BLOCK * (KEY_BLOCK + 2) * r + serial)); // attention_forward
    need = largest(need,
        round_up(N * c->n_heads * r, ARENA_ALIGN) +
            EACH_THREAD(2 * QUERY_BLOCK * KEY_BLOCK * r + serial)); // attention_backward
    need =
        largest(need, (N / ROUTER_BLOCK + 1) * (E + 1) * r + 2 * threads * E * r); // router_forward
    need =
        largest(need, round_up((N + 3 * threads) * E * r, ARENA_ALIGN) + gemm); // router_backward
    need = largest(need,
        round_up((E + 1 + s->S_max) * sizeof(int), ARENA_ALIGN) +
            threads * R * sizeof(Candidate)); // plan_select
    need = largest(need, E * sizeof(int));    // plan_items
    need = largest(need, list + gemm);        // expert products
    const size_t panels = round_up(panels_reals(c, s, (int)R) * r, ARENA_ALIGN);
    need =
        largest(need, panels + EACH_THREAD(EXPERT_ROWS * (width + STRIP) * r + serial)); // combine
    need = largest(need,
        panels +
            EACH_THREAD(EXPERT_ROWS * width * r + serial + ARENA_ALIGN)); // expert_down_backward
    need = largest(need,
        round_up((size_t)min_int(classifier_chunk(c->vocab_size), (int)N) * c->vocab_size * r,
            ARENA_ALIGN) +
            gemm); // classifier
    need = largest(need,
        (size_t)(c->n_layers + 1) * (TENSOR_ROWS + 2 * E) * PIECES * sizeof(double)); // grad_norm
#undef EACH_THREAD
    return round_up(need, ARENA_ALIGN);
}

#if defined(__clang__)
#pragma clang diagnostic ignored "-Wmissing-prototypes"
#endif
extern const Backend *backend_cpu(void);
const Backend *backend_cpu(void) {
    static const Backend b = {
        sizeof(real) == 8 ? "cpu (double)" : "cpu",
        sizeof(real) == 8 ? F64 : F32,
        sizeof(real) == 8 ? F64 : F32,
        sizeof(real) == 8 ? F64 : F32,
        sizeof(real) == 8 ? F64 : F32,
        sizeof(real),
        sizeof(real),
        sizeof(real),
        sizeof(real),
        sizeof(real) == 8 ? F64 : F32,
        sizeof(real),
        0,
        0,
        NULL,
        arena_alloc,
        free,
        host_copy,
        host_copy,
        zero,
        nothing,
        NULL,
        peak,
        scratch_bytes,
        NULL,
        embedding_forward,
        embedding_backward,
        rmsnorm_forward,
        residual_rmsnorm_forward,
        rmsnorm_backward,
        add,
        linear_forward,
        linear_backward,
        qk_rope_forward,
        qk_rope_backward,
        attention_forward,
        attention_backward,
        router_forward,
        router_balance,
        router_backward,
        plan_topk,
        plan_select,
        plan_part,
        plan_items,
        plan_merge,
        plan_unmerge,
        scatter,
        copy_rows,
        sum_rows,
        expert_up_forward,
        expert_down_forward,
        expert_down_backward,
        expert_up_backward,
        classifier,
        reduce_loss,
        grad_norm,
        clip_norm,
        update,
        update_bias,
    };
    return &b;
}
