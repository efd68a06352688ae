// Attention by blocks of query rows: scores of one block live in scratch and are never kept.
//
// Forward: whole rows of scores at a time, two passes. Backward (FlashAttention-2, arXiv
// 2307.08691): blocks of keys outside, blocks of queries inside; the probabilities come from the
// scores again. One task is one head of one sample, so that every sum has one order.
#include <omp.h>

#include <cfloat>
#include <cmath>

#include "math.h"
#include "random.h"
#include "tile.h"

using namespace onward;

namespace {

constexpr int64_t QUERIES = 64, KEYS = 256;  // rows of a block; native/attention.py knows them too

struct Sizes {
    int64_t batch, heads, queries, keys, width, values, causal;
};

// A tensor [B,H,rows,cols] in place, read or written through its strides.
template <class T> struct Strided {
    T* data;
    const int64_t* strides;

    T* head(int64_t b, int64_t h) const { return data + b * strides[0] + h * strides[1]; }
    int64_t row() const { return strides[2]; }
    int64_t col() const { return strides[3]; }
};

// What restricts and thins the scores: at most one of the masks is given.
struct Filter {
    Strided<const uint8_t> allowed;
    Strided<const float> added;
    const int64_t *seed, *offset;
    int64_t site, threshold, sample_dim;
    float scale;  // 1 / (1 - ratio); 1 without dropout

    bool drops() const { return seed != nullptr; }

    RowKey key(int64_t b, int64_t h, int64_t q) const {
        const uint32_t first = offset ? uint32_t(*offset) : 0u;
        return RowKey::start(seed, site)
            .at(uint32_t(b) + (sample_dim == 0 ? first : 0u))
            .at(uint32_t(h) + (sample_dim == 1 ? first : 0u))
            .at(uint32_t(q) + (sample_dim == 2 ? first : 0u));
    }

    // Masks scores s[n] of query q against keys k, k+1, ...
    void mask(int64_t b, int64_t h, int64_t q, int64_t k, int64_t n, float* s) const {
        if (allowed.data) {
            const int64_t step = allowed.col();
            const uint8_t* m = allowed.head(b, h) + q * allowed.row() + k * step;
            if (step == 1)
                for (int64_t j = 0; j < n; ++j) s[j] = m[j] ? s[j] : -FLT_MAX;
            else
                for (int64_t j = 0; j < n; ++j) s[j] = m[j * step] ? s[j] : -FLT_MAX;
        } else if (added.data) {
            const int64_t step = added.col();
            const float* m = added.head(b, h) + q * added.row() + k * step;
            if (step == 1)
                for (int64_t j = 0; j < n; ++j) s[j] += m[j];
            else
                for (int64_t j = 0; j < n; ++j) s[j] += m[j * step];
        }
    }

    // Whether a row with this highest score has nothing to attend to.
    bool nothing(float peak) const { return allowed.data && peak == -FLT_MAX; }
};

// The largest of n numbers; n is a multiple of COLS.
inline float highest(const float* s, int64_t n) {
    Lanes m = *(const Lanes*)s;
    for (int64_t j = LANES; j < n; j += LANES) {
        const Lanes x = *(const Lanes*)(s + j);
        m = x > m ? x : m;
    }
    float most = m[0];
    for (int64_t l = 1; l < LANES; ++l) most = m[l] > most ? m[l] : most;
    return most;
}

// s := exp(s - peak), 0 where dropped (the rest not scaled); the sum before dropping. n is a
// multiple of COLS. Counters of 32 bits, as the generator's words.
OUTLINED float exponentials(float* s, int32_t n, float peak) {
    float sum = 0.0f;
    #pragma omp simd reduction(+ : sum)
    for (int32_t j = 0; j < n; ++j) {
        const float e = math::exp(s[j] - peak);
        sum += e;
        s[j] = e;
    }
    return sum;
}

OUTLINED float exponentials(float* s, int32_t n, float peak, RowKey key, uint32_t threshold) {
    float sum = 0.0f;
    #pragma omp simd reduction(+ : sum)
    for (int32_t j = 0; j < n; ++j) {
        const float e = math::exp(s[j] - peak);
        sum += e;
        s[j] = key.word(uint32_t(j)) >= threshold ? e : 0.0f;
    }
    return sum;
}

// From scores s and t = dy v^T: s := the probabilities as dropped, t := the scores' gradient.
OUTLINED void probabilities(float* s, float* t, int32_t n, float peak, float inverse, float delta)
{
    #pragma omp simd
    for (int32_t j = 0; j < n; ++j) {
        const float p = math::exp(s[j] - peak) * inverse;
        s[j] = p;
        t[j] = p * (t[j] - delta);
    }
}

OUTLINED void probabilities(float* s, float* t, int32_t n, float peak, float inverse, float delta,
                            RowKey key, uint32_t first, uint32_t threshold, float scale)
{
    #pragma omp simd
    for (int32_t j = 0; j < n; ++j) {
        const float kept = key.word(first + uint32_t(j)) >= threshold ? scale : 0.0f;
        const float p = math::exp(s[j] - peak) * inverse;
        s[j] = p * kept;
        t[j] = p * (t[j] * kept - delta);
    }
}

// The same where the row is whole: delta is the sum of p * t itself, as in softmax's own gradient.
// Then the rounding of a few keys' t cancels as it does there, which that of dy * y would not; and
// divided by the sum of p, which is 1 but for rounding, so that the result sums to 0.
OUTLINED void whole_row(float* s, float* t, int32_t n, float peak, float inverse)
{
    float sum = 0.0f, mass = 0.0f;
    #pragma omp simd reduction(+ : sum, mass)
    for (int32_t j = 0; j < n; ++j) {
        const float p = math::exp(s[j] - peak) * inverse;
        s[j] = p;
        sum += p * t[j];
        mass += p;
    }
    const float delta = mass > 0.0f ? sum / mass : sum;
    #pragma omp simd
    for (int32_t j = 0; j < n; ++j) t[j] = s[j] * (t[j] - delta);
}

OUTLINED void whole_row(float* s, float* t, int32_t n, float peak, float inverse, RowKey key,
                        uint32_t threshold, float scale)
{
    float sum = 0.0f, mass = 0.0f;
    #pragma omp simd reduction(+ : sum, mass)
    for (int32_t j = 0; j < n; ++j) {
        const bool kept = key.word(uint32_t(j)) >= threshold;
        const float p = math::exp(s[j] - peak) * inverse, g = kept ? t[j] * scale : 0.0f;
        s[j] = kept ? p : -p;  // the sign says it until the second loop
        t[j] = g;
        sum += p * g;
        mass += p;
    }
    const float delta = mass > 0.0f ? sum / mass : sum;
    #pragma omp simd
    for (int32_t j = 0; j < n; ++j) {
        const float p = s[j];
        t[j] = (p < 0.0f ? -p : p) * (t[j] - delta);
        s[j] = p > 0.0f ? p * scale : 0.0f;
    }
}

inline float dot(const float* x, int64_t xs, const float* y, int64_t ys, int64_t n) {
    float sum = 0.0f;
    if (xs == 1 && ys == 1) {
        #pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < n; ++j) sum += x[j] * y[j];
    } else {
        for (int64_t j = 0; j < n; ++j) sum += x[j * xs] * y[j * ys];
    }
    return sum;
}

inline void fill(float* x, int64_t first, int64_t end, float number) {
    for (int64_t j = first; j < end; ++j) x[j] = number;
}

// Consecutive parts of one thread's scratch.
struct Room {
    float* next;

    float* take(int64_t n) {
        float* part = next;
        next += (n + 15) / 16 * 16;
        return part;
    }
};

inline void write(const float* x, int64_t n, float scale, float* y) {
    #pragma omp simd
    for (int64_t j = 0; j < n; ++j) y[j] = x[j] * scale;
}

}  // namespace

// y[B,H,Q,E], peak[B,H,Q], total[B,H,Q] from q[B,H,Q,K], k[B,H,S,K], v[B,H,S,E].
// sizes: B, H, Q, S, K, E, is_causal. scratch: f32[threads, room].
extern "C" void onward_attention(
    const float* q, const int64_t* q_strides, const float* k, const int64_t* k_strides,
    const float* v, const int64_t* v_strides, const uint8_t* allowed, const float* added,
    const int64_t* mask_strides, const int64_t* seed, const int64_t* offset, int64_t site,
    int64_t threshold, int64_t sample_dim, float keep_scale, float scale, float* y,
    const int64_t* y_strides, float* peaks, float* totals, const int64_t* sizes, float* scratch,
    int64_t threads, int64_t room)
{
    const Sizes n{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]};
    const Strided<const float> Q{q, q_strides}, K{k, k_strides}, V{v, v_strides};
    const Strided<float> Y{y, y_strides};
    const Filter filter{{allowed, mask_strides}, {added, mask_strides}, seed, offset,
                        site, threshold, sample_dim, keep_scale};
    const int64_t lds = padded(n.keys), ldo = padded(n.values);
    const int64_t most = std::min(QUERIES, n.queries);
    const int64_t blocks = (n.queries + QUERIES - 1) / QUERIES, heads = n.batch * n.heads;
    const int used = int(std::min(threads, int64_t(omp_get_max_threads())));
    // Few heads: the blocks of one are shared out too, and each part packs keys and values anew.
    const int64_t parts =
        used == 1 || heads >= 2 * used ? 1 : std::min(blocks, (2 * used + heads - 1) / heads);
    #pragma omp parallel for schedule(dynamic) num_threads(used)
    for (int64_t task = 0; task < heads * parts; ++task) {
        const int64_t head = task / parts, part = task % parts;
        const int64_t b = head / n.heads, h = head % n.heads;
        Room rest{scratch + omp_get_thread_num() * room};
        float* turned = rest.take(n.width * lds);  // k^T in panels
        float* panels = rest.take(n.keys * ldo);   // v in panels
        float* rows = rest.take(most * n.width);
        float* s = rest.take(most * lds);
        float* o = rest.take(most * ldo);
        float factor[QUERIES];
        const int64_t last = std::min(n.queries, (part + 1) * blocks / parts * QUERIES);
        const int64_t seen = n.causal ? std::min(n.keys, last) : n.keys;
        pack_panels(K.head(b, h), K.col(), K.row(), n.width, seen, turned);
        pack_panels(V.head(b, h), V.row(), V.col(), seen, n.values, panels);
        for (int64_t q0 = part * blocks / parts * QUERIES; q0 < last; q0 += QUERIES) {
            const int64_t m = std::min(QUERIES, n.queries - q0);
            const int64_t cols = n.causal ? std::min(seen, q0 + m) : seen;
            const int64_t diagonal = n.causal ? q0 : UNBOUNDED;
            pack_rows(Q.head(b, h) + q0 * Q.row(), Q.row(), Q.col(), m, n.width, scale, rows);
            product_below(m, cols, n.width, rows, n.width, turned, s, lds, diagonal);
            for (int64_t i = 0; i < m; ++i) {
                const int64_t count = n.causal ? std::min(cols, q0 + i + 1) : cols;
                const int64_t whole = padded(count), row = head * n.queries + q0 + i;
                float* si = s + i * lds;
                filter.mask(b, h, q0 + i, 0, count, si);
                fill(si, count, whole, -INFINITY);
                const float peak = highest(si, whole);
                peaks[row] = peak;
                if (filter.nothing(peak)) {
                    fill(si, 0, cols, 0.0f);
                    totals[row] = float(n.keys);
                    factor[i] = 0.0f;
                    continue;
                }
                const float total =
                    filter.drops() ? exponentials(si, int32_t(whole), peak,
                                                  filter.key(b, h, q0 + i), uint32_t(threshold))
                                   : exponentials(si, int32_t(whole), peak);
                fill(si, whole, cols, 0.0f);
                totals[row] = total;
                factor[i] = keep_scale / total;
            }
            fill(o, 0, m * ldo, 0.0f);
            add_product(m, n.values, cols, s, lds, panels, seen, o, ldo, diagonal);
            for (int64_t i = 0; i < m; ++i)
                write(o + i * ldo, n.values, factor[i], Y.head(b, h) + (q0 + i) * Y.row());
        }
    }
}

// dq, dk, dv from dy and what forward had and made.
extern "C" void onward_attention_grad(
    const float* dy, const int64_t* dy_strides, const float* q, const int64_t* q_strides,
    const float* k, const int64_t* k_strides, const float* v, const int64_t* v_strides,
    const uint8_t* allowed, const float* added, const int64_t* mask_strides, const int64_t* seed,
    const int64_t* offset, int64_t site, int64_t threshold, int64_t sample_dim, float keep_scale,
    float scale, const float* y, const int64_t* y_strides, const float* peaks, const float* totals,
    float* dq, const int64_t* dq_strides, float* dk, const int64_t* dk_strides, float* dv,
    const int64_t* dv_strides, const int64_t* sizes, float* scratch, int64_t threads, int64_t room)
{
    const Sizes n{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]};
    const Strided<const float> DY{dy, dy_strides}, Y{y, y_strides};
    const Strided<const float> Q{q, q_strides}, K{k, k_strides}, V{v, v_strides};
    const Strided<float> DQ{dq, dq_strides}, DK{dk, dk_strides}, DV{dv, dv_strides};
    const Filter filter{{allowed, mask_strides}, {added, mask_strides}, seed, offset,
                        site, threshold, sample_dim, keep_scale};
    const int64_t ldk = padded(n.width), ldv = padded(n.values);
    const int64_t block = std::min(KEYS, n.keys), lds = padded(block);
    const int64_t most = std::min(QUERIES, n.queries);
    const int used = int(std::min(threads, int64_t(omp_get_max_threads())));
    #pragma omp parallel for schedule(dynamic) num_threads(used)
    for (int64_t head = 0; head < n.batch * n.heads; ++head) {
        const int64_t b = head / n.heads, h = head % n.heads;
        Room rest{scratch + omp_get_thread_num() * room};
        float* k_turned = rest.take(n.width * lds);
        float* v_turned = rest.take(n.values * lds);
        float* k_panels = rest.take(block * ldk);
        float* q_rows = rest.take(most * n.width);
        float* q_panels = rest.take(most * ldk);
        float* dy_rows = rest.take(most * n.values);
        float* dy_panels = rest.take(most * ldv);
        float* s = rest.take(most * lds);
        float* t = rest.take(most * lds);
        float* k_sum = rest.take(block * ldk);
        float* v_sum = rest.take(block * ldv);
        float* q_sum = rest.take(n.queries * ldk);
        float* delta = rest.take(n.queries);  // sum of dy * y: of the probabilities' gradient
        const bool one_block = block == n.keys;
        for (int64_t i = 0; i < n.queries && !one_block; ++i) {
            delta[i] = dot(DY.head(b, h) + i * DY.row(), DY.col(),
                           Y.head(b, h) + i * Y.row(), Y.col(), n.values);
        }
        fill(q_sum, 0, n.queries * ldk, 0.0f);
        for (int64_t k0 = 0; k0 < n.keys; k0 += block) {
            const int64_t keys = std::min(block, n.keys - k0);
            const float* kb = K.head(b, h) + k0 * K.row();
            const float* vb = V.head(b, h) + k0 * V.row();
            pack_panels(kb, K.col(), K.row(), n.width, keys, k_turned);
            pack_panels(vb, V.col(), V.row(), n.values, keys, v_turned);
            pack_panels(kb, K.row(), K.col(), keys, n.width, k_panels);
            fill(k_sum, 0, keys * ldk, 0.0f);
            fill(v_sum, 0, keys * ldv, 0.0f);
            // A causal block of keys is first seen by its own first query.
            for (int64_t q0 = n.causal ? k0 / QUERIES * QUERIES : 0; q0 < n.queries;
                 q0 += QUERIES) {
                const int64_t m = std::min(QUERIES, n.queries - q0);
                const int64_t cols = n.causal ? std::min(keys, q0 + m - k0) : keys;
                const int64_t diagonal = n.causal ? q0 - k0 : UNBOUNDED;
                const float* qb = Q.head(b, h) + q0 * Q.row();
                const float* gb = DY.head(b, h) + q0 * DY.row();
                pack_rows(qb, Q.row(), Q.col(), m, n.width, scale, q_rows);
                pack_panels(q_rows, n.width, 1, m, n.width, q_panels);
                pack_rows(gb, DY.row(), DY.col(), m, n.values, 1.0f, dy_rows);
                pack_panels(dy_rows, n.values, 1, m, n.values, dy_panels);
                product_below(m, cols, n.width, q_rows, n.width, k_turned, s, lds, diagonal);
                product_below(m, cols, n.values, dy_rows, n.values, v_turned, t, lds, diagonal);
                for (int64_t i = 0; i < m; ++i) {
                    const int64_t row = head * n.queries + q0 + i;
                    const int64_t count =
                        n.causal ? std::clamp(q0 + i + 1 - k0, int64_t(0), cols) : cols;
                    float *si = s + i * lds, *ti = t + i * lds;
                    if (filter.nothing(peaks[row])) {
                        fill(si, 0, cols, 0.0f);
                        fill(ti, 0, cols, 0.0f);
                        continue;
                    }
                    filter.mask(b, h, q0 + i, k0, count, si);
                    const int64_t whole = padded(count);  // no scalar rest
                    const float inverse = 1.0f / totals[row];
                    if (one_block) {
                        fill(si, count, whole, -INFINITY);
                        fill(ti, count, whole, 0.0f);
                    }
                    if (one_block && filter.drops())
                        whole_row(si, ti, int32_t(whole), peaks[row], inverse,
                                  filter.key(b, h, q0 + i), uint32_t(threshold), keep_scale);
                    else if (one_block)
                        whole_row(si, ti, int32_t(whole), peaks[row], inverse);
                    else if (filter.drops())
                        probabilities(si, ti, int32_t(whole), peaks[row], inverse,
                                      delta[q0 + i], filter.key(b, h, q0 + i), uint32_t(k0),
                                      uint32_t(threshold), keep_scale);
                    else
                        probabilities(si, ti, int32_t(whole), peaks[row], inverse,
                                      delta[q0 + i]);
                    fill(si, count, cols, 0.0f);
                    fill(ti, count, cols, 0.0f);
                }
                add_turned_product(cols, n.values, m, s, lds, dy_panels, m, v_sum, ldv, diagonal);
                add_turned_product(cols, n.width, m, t, lds, q_panels, m, k_sum, ldk, diagonal);
                add_product(m, n.width, cols, t, lds, k_panels, keys, q_sum + q0 * ldk, ldk,
                            diagonal);
            }
            for (int64_t i = 0; i < keys; ++i) {
                write(k_sum + i * ldk, n.width, 1.0f, DK.head(b, h) + (k0 + i) * DK.row());
                write(v_sum + i * ldv, n.values, 1.0f, DV.head(b, h) + (k0 + i) * DV.row());
            }
        }
        for (int64_t i = 0; i < n.queries; ++i)
            write(q_sum + i * ldk, n.width, scale, DQ.head(b, h) + i * DQ.row());
    }
}
