// Attention by blocks of query rows: scores of one block live in scratch and are never kept.
//
// Forward: whole rows of scores, two passes; of more keys than a block holds, the results of the
// blocks are joined by their rows' numbers. Backward (FlashAttention-2, arXiv 2307.08691): blocks
// of keys outside, blocks of queries inside; the probabilities come from the scores again.
//
// Both go by segments, rows that attend to one another: the samples of a batch, or the sequences
// of packed rows. One task is one head of one segment, or some of its queries in the forward, so
// that every sum has one order.
#include "annotations.h"

#include <omp.h>

#include <cfloat>
#include <cmath>
#include <type_traits>

#include "filter.h"
#include "math.h"
#include "random.h"
#include "segments.h"
#include "tile.h"

using namespace onward;

namespace {

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

// Sums along rows. The order is written out: where a compiler chose it, a build that does not
// vectorise (-O1, sanitizers) added one number after the other, and was several times as far from
// the exact sum of a long row.
typedef int32_t Bits __attribute__((vector_size(LANES * 4)));

inline Lanes absolute(Lanes x) { return (Lanes)((Bits)x & 0x7fffffff); }

struct Sum {
    Lanes parts[4] = {};

    float total() const {
        const Lanes lanes = (parts[0] + parts[1]) + (parts[2] + parts[3]);
        float all = 0.0f;
        for (int64_t l = 0; l < LANES / 2; ++l) all += lanes[l] + lanes[l + LANES / 2];
        return all;
    }
};

// Calls add(j, part) for each LANES of n numbers; n is a multiple of LANES.
template <class Add> inline void each_part(int64_t n, const Add& add) {
    int64_t j = 0;
    for (; j + 4 * LANES <= n; j += 4 * LANES) {
        add(j, 0);
        add(j + LANES, 1);
        add(j + 2 * LANES, 2);
        add(j + 3 * LANES, 3);
    }
    for (; j < n; j += LANES) add(j, 0);
}

// s := exp(s - peak), 0 where dropped (the rest not scaled); the sum before dropping. n is a
// multiple of COLS. Counters of 32 bits, as the generator's words.
OUTLINED float exponentials(float* s, int32_t n, float peak) {
    #pragma omp simd
    for (int32_t j = 0; j < n; ++j) s[j] = math::exp(s[j] - peak);
    Sum sum;
    each_part(n, [&](int64_t j, int part) { sum.parts[part] += *(const Lanes*)(s + j); });
    return sum.total();
}

// With dropout; LISTED: the features are the keys' positions in `places`, else they are counted.
template <bool LISTED>
OUTLINED float exponentials(float* s, int32_t n, float peak, RowKey key, const int32_t* places,
                            uint32_t threshold)
{
    #pragma omp simd
    for (int32_t j = 0; j < n; ++j) {
        const float e = math::exp(s[j] - peak);
        s[j] = key.word(uint32_t(LISTED ? places[j] : j)) >= threshold ? e : -e;
    }
    Sum sum;
    each_part(n, [&](int64_t j, int part) {
        const Lanes e = *(const Lanes*)(s + j);
        *(Lanes*)(s + j) = e > 0.0f ? e : Lanes{};
        sum.parts[part] += absolute(e);
    });
    return sum.total();
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

template <bool LISTED>
OUTLINED void probabilities(float* s, float* t, int32_t n, float peak, float inverse, float delta,
                            RowKey key, const int32_t* places, uint32_t threshold, float scale)
{
    #pragma omp simd
    for (int32_t j = 0; j < n; ++j) {
        const float kept = key.word(uint32_t(LISTED ? places[j] : j)) >= threshold ? scale : 0.0f;
        const float p = math::exp(s[j] - peak) * inverse;
        s[j] = p * kept;
        t[j] = p * (t[j] * kept - delta);
    }
}

// The mean of t weighted by s, or by |s|. The sum of the weights is 1 but for rounding.
template <bool SIGNED> inline float mean(const float* s, const float* t, int64_t n) {
    Sum products, weights;
    each_part(n, [&](int64_t j, int part) {
        Lanes p = *(const Lanes*)(s + j);
        if (SIGNED) p = absolute(p);
        weights.parts[part] += p;
        products.parts[part] += p * *(const Lanes*)(t + j);
    });
    const float sum = products.total(), mass = weights.total();
    return mass > 0.0f ? sum / mass : sum;
}

// The same where the row is whole: delta is the sum of p * t itself, as in softmax's own gradient.
// Then the rounding of a few keys' t cancels as it does there, which that of dy * y would not; and
// divided by the sum of p, which is 1 but for rounding, so that the result sums to 0.
OUTLINED void whole_row(float* s, float* t, int32_t n, float peak, float inverse)
{
    #pragma omp simd
    for (int32_t j = 0; j < n; ++j) s[j] = math::exp(s[j] - peak) * inverse;
    const float delta = mean<false>(s, t, n);
    #pragma omp simd
    for (int32_t j = 0; j < n; ++j) t[j] = s[j] * (t[j] - delta);
}

template <bool LISTED>
OUTLINED void whole_row(float* s, float* t, int32_t n, float peak, float inverse, RowKey key,
                        const int32_t* places, uint32_t threshold, float scale)
{
    #pragma omp simd
    for (int32_t j = 0; j < n; ++j) {
        const bool kept = key.word(uint32_t(LISTED ? places[j] : j)) >= threshold;
        const float p = math::exp(s[j] - peak) * inverse;
        s[j] = kept ? p : -p;  // the sign says it until the second loop
        t[j] = kept ? t[j] * scale : 0.0f;
    }
    const float delta = mean<true>(s, t, n);
    #pragma omp simd
    for (int32_t j = 0; j < n; ++j) {
        const float p = s[j];
        t[j] = (p < 0.0f ? -p : p) * (t[j] - delta);
        s[j] = p > 0.0f ? p * scale : 0.0f;
    }
}

template <class E> inline float dot(const float* x, const E* y, int64_t ys, int64_t n) {
    Sum sum;
    int64_t j = 0;
    for (; ys == 1 && j + LANES <= n; j += LANES) {
        float wide[LANES];
        for (int64_t l = 0; l < LANES; ++l) wide[l] = y[j + l];
        sum.parts[0] += *(const Lanes*)(x + j) * *(const Lanes*)wide;
    }
    for (; j < n; ++j) sum.parts[1][j % LANES] += x[j] * y[j * ys];
    return sum.total();
}

template <class E> inline void fill(E* x, int64_t first, int64_t end, float number) {
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

template <class E> inline void write(const float* x, int64_t n, float scale, E* y) {
    #pragma omp simd
    for (int64_t j = 0; j < n; ++j) y[j] = x[j] * scale;
}

// y := x * scale + y * kept; what was there is not read where nothing of it is kept.
template <class E>
inline void join(const float* x, int64_t n, float scale, float kept, E* y) {
    if (kept == 0.0f) return write(x, n, scale, y);
    #pragma omp simd
    for (int64_t j = 0; j < n; ++j) y[j] = x[j] * scale + y[j] * kept;
}

template <class E>
inline void clear(const Strided<E>& x, int64_t h, int64_t first, int64_t end, int64_t n) {
    for (int64_t i = first; i < end; ++i) fill(x.at(0, h, i), 0, n, 0.0f);
}

// Whether elements hold less than what is computed with.
template <class E> constexpr bool LOW = !std::is_same_v<E, float>;

}  // namespace

// y[B,H,Q,E], peak[B,H,Q], total[B,H,Q] from q[B,H,Q,K], k[B,G,S,K], v[B,G,S,E]; of packed rows
// with their coordinates q_at[Q][2], k_at[S][2] (null: no packed rows). sizes: B, H, Q, S, K, E,
// is_causal, G, a divisor of H. peak, total: of the rows' scores. `allowed` and `added` are two
// kinds of mask, of which one is null, or both; `filled`: what the first one puts in the place of
// hidden scores, and 1 where it is added to them; null: they are left out. `bias`, or null, is
// added before: of each position of queries and keys, a row's numbers one after the other. `seed`
// null: no dropout; first_head: the number of head 0 in the model, by which it draws. scratch:
// f32[threads, room], and the table of the segments.
extern "C" void onward_attention(
    const T* q, const int64_t* OF(4) q_strides, const T* k, const int64_t* OF(4) k_strides,
    const T* v, const int64_t* OF(4) v_strides, const uint8_t* OPTIONAL allowed,
    const T* OPTIONAL added, const int64_t* OF(4) mask_strides,
    const int64_t* OPTIONAL OF(2) seed, const int64_t* OPTIONAL OF(1) offset, int64_t site,
    int64_t threshold, int64_t sample_dim, float keep_scale, float scale,
    float softcap, int64_t first_head, const float* OPTIONAL OF(2) filled, const T* OPTIONAL bias,
    const int64_t* OF(4) bias_strides,
    const int64_t* OPTIONAL OF(2 * sizes[2]) q_at, const int64_t* OPTIONAL OF(2 * sizes[3]) k_at,
    T* y, const int64_t* OF(4) y_strides, float* OF(sizes[0] * sizes[1] * sizes[2]) peaks,
    float* OF(sizes[0] * sizes[1] * sizes[2]) totals, const int64_t* OF(8) sizes,
    float* OF(threads * room) scratch, int64_t threads, int64_t room, int32_t* segments,
    int64_t element_T)
{
    with_element(element_T, [&](auto element) {
        using E = decltype(element);
        const Sizes n{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6],
                      sizes[7]};
        const Strided<const E> Q{of<E>(q), q_strides}, K{of<E>(k), k_strides};
        const Strided<const E> V{of<E>(v), v_strides};
        const Strided<E> Y{of<E>(y), y_strides};
        const Filter<E> filter{{allowed, mask_strides}, {of<E>(added), mask_strides},
                               {of<E>(bias), bias_strides}, seed, offset, site, threshold,
                               sample_dim, keep_scale, softcap, first_head, filled};
        const int64_t ldo = padded(n.values), most = std::min(QUERIES, n.queries);
        const int used = int(std::min(threads, int64_t(omp_get_max_threads())));
        Table table(n, q_at, k_at, segments);
        const int64_t tasks = table.share(used);
        #pragma omp parallel for schedule(dynamic) num_threads(used)
        for (int64_t task = 0; task < tasks; ++task) {
            const int64_t index = table.of(task), first_task = table.entries[index].task;
            const int64_t parts = (table.entries[index + 1].task - first_task) / n.heads;
            const int64_t h = (task - first_task) / parts, part = (task - first_task) % parts;
            const Segment g = table.segment(index);
            const int64_t blocks = (g.queries + QUERIES - 1) / QUERIES;
            const int64_t first = part * blocks / parts * QUERIES;
            const int64_t last = std::min(g.queries, (part + 1) * blocks / parts * QUERIES);
            const int64_t seen = n.causal ? g.reach(last - 1) : g.keys;
            const int64_t block = std::min(SEEN, g.keys), lds = padded(block);
            Room rest{scratch + omp_get_thread_num() * room};
            float* turned = rest.take(n.width * lds);  // k^T in panels
            float* panels = rest.take(block * ldo);    // v in panels
            float* rows = rest.take(most * n.width);
            float* s = rest.take(most * lds);
            float* o = rest.take(most * ldo);
            // Results that are joined are not rounded each time.
            const bool joined = LOW<E> && n.keys > SEEN;
            float* whole = joined ? rest.take(n.queries * n.values) : nullptr;
            // of a row's sum in this block, and of those before
            float factor[QUERIES], kept[QUERIES];
            for (int64_t k0 = 0; k0 == 0 || k0 < seen; k0 += SEEN) {
                const int64_t keys = std::min(block, seen - k0);
                const int64_t own = h / n.shared();
                pack_panels(K.at(g.b, own, g.k0 + k0), K.col(), K.row(), n.width, keys, turned);
                pack_panels(V.at(g.b, own, g.k0 + k0), V.row(), V.col(), keys, n.values, panels);
                for (int64_t q0 = first; q0 < last; q0 += QUERIES) {
                    const int64_t m = std::min(QUERIES, g.queries - q0);
                    const int64_t row = (g.b * n.heads + h) * n.queries + g.q0 + q0;
                    const Below below(g, filter, n.causal, h, q0, m, k0, keys, nullptr);
                    if (k0 > 0 && below.cols == 0) continue;
                    const int64_t k1 = k0 + below.first;
                    pack_rows(Q.at(g.b, h, g.q0 + q0), Q.row(), Q.col(), m, n.width, scale, rows);
                    product_below(m, below.cols, n.width, rows, n.width,
                                  turned + below.first * n.width, s, lds, below.diagonal);
                    for (int64_t i = 0; i < m; ++i) {
                        const int64_t count = below.count[i], whole = padded(count);
                        float *si = s + i * lds, *peak = peaks + row + i, *total = totals + row + i;
                        filter.cap(count, si, nullptr);
                        filter.mask(g, h, q0 + i, k1, count, si);
                        fill(si, count, whole, -INFINITY);
                        const float here = count > 0 ? highest(si, whole) : -FLT_MAX;
                        if (count == 0 || filter.nothing(here) || (k0 > 0 && here == -INFINITY)) {
                            fill(si, 0, below.cols, 0.0f);
                            factor[i] = 0.0f;
                            kept[i] = k0 > 0 ? 1.0f : 0.0f;
                            if (k0 == 0) {
                                *peak = count > 0 ? here : filter.hidden();
                                *total = float(n.keys);
                            }
                            continue;
                        }
                        float sum;
                        if (!filter.drops())
                            sum = exponentials(si, int32_t(whole), here);
                        else if (g.places)
                            sum = exponentials<true>(si, int32_t(whole), here,
                                                     filter.key(g, h, q0 + i, k1), g.places + k1,
                                                     uint32_t(threshold));
                        else
                            sum = exponentials<false>(si, int32_t(whole), here,
                                                      filter.key(g, h, q0 + i, k1), nullptr,
                                                      uint32_t(threshold));
                        fill(si, whole, below.cols, 0.0f);
                        // Joined with the blocks before, where one had something for this row.
                        float all = sum, before = 0.0f, top = here, share = 1.0f;
                        if (k0 > 0 && !filter.nothing(*peak) && *peak != -INFINITY) {
                            top = std::max(here, *peak);
                            share = math::exp(here - top);
                            before = *total * math::exp(*peak - top);
                            all = sum * share + before;
                        }
                        *peak = top;
                        *total = all;
                        factor[i] = keep_scale * share / all;
                        kept[i] = before / all;
                    }
                    fill(o, 0, m * ldo, 0.0f);
                    add_product(m, n.values, below.cols, s, lds, panels + below.first * COLS, keys,
                                o, ldo, below.diagonal);
                    for (int64_t i = 0; i < m; ++i) {
                        const float* oi = o + i * ldo;
                        if (joined)
                            join(oi, n.values, factor[i], kept[i], whole + (q0 + i) * n.values);
                        else
                            join(oi, n.values, factor[i], kept[i], Y.at(g.b, h, g.q0 + q0 + i));
                    }
                }
            }
            for (int64_t i = first; joined && i < last; ++i)
                write(whole + i * n.values, n.values, 1.0f, Y.at(g.b, h, g.q0 + i));
        }
    });
}

// dq, dk, dv from dy and what forward had and made. dbias, or null, is f32; it is also written to
// `rounded`, or null. bias_sizes are 1 or B, and how many positions of queries and of keys there are.
// A task is a head of keys of one segment, or of all where they share a bias, whose gradient then has
// one order of summing. given: the sums of dy * y of the rows, which may see more keys than these;
// null: they are found here.
extern "C" void onward_attention_grad(
    const T* dy, const int64_t* OF(4) dy_strides, const T* q,
    const int64_t* OF(4) q_strides, const T* k, const int64_t* OF(4) k_strides, const T* v,
    const int64_t* OF(4) v_strides, const uint8_t* OPTIONAL allowed, const T* OPTIONAL added,
    const int64_t* OF(4) mask_strides, const int64_t* OPTIONAL OF(2) seed,
    const int64_t* OPTIONAL OF(1) offset, int64_t site, int64_t threshold, int64_t sample_dim,
    float keep_scale, float scale, float softcap, int64_t first_head,
    const float* OPTIONAL OF(2) filled,
    const T* OPTIONAL bias, const int64_t* OF(4) bias_strides,
    const int64_t* OF(3) bias_sizes,
    float* OPTIONAL OF(bias_sizes[0] * sizes[1] * bias_sizes[1] * bias_sizes[2]) dbias,
    T* OPTIONAL OF(bias_sizes[0] * sizes[1] * bias_sizes[1] * bias_sizes[2]) rounded,
    const int64_t* OPTIONAL OF(2 * sizes[2]) q_at,
    const int64_t* OPTIONAL OF(2 * sizes[3]) k_at, const T* y, const int64_t* OF(4) y_strides,
    const float* OF(sizes[0] * sizes[1] * sizes[2]) peaks,
    const float* OF(sizes[0] * sizes[1] * sizes[2]) totals,
    const float* OPTIONAL OF(sizes[0] * sizes[1] * sizes[2]) given,
    T* dq, const int64_t* OF(4) dq_strides, T* dk, const int64_t* OF(4) dk_strides,
    T* dv, const int64_t* OF(4) dv_strides, const int64_t* OF(8) sizes,
    float* OF(threads * room) scratch, int64_t threads, int64_t room, int32_t* segments,
    int64_t element_T)
{
    with_element(element_T, [&](auto element) {
        using E = decltype(element);
        const Sizes n{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6],
                      sizes[7]};
        const Strided<const E> DY{of<E>(dy), dy_strides}, Y{of<E>(y), y_strides};
        const Strided<const E> Q{of<E>(q), q_strides}, K{of<E>(k), k_strides};
        const Strided<const E> V{of<E>(v), v_strides};
        const Strided<E> DQ{of<E>(dq), dq_strides}, DK{of<E>(dk), dk_strides};
        const Strided<E> DV{of<E>(dv), dv_strides};
        const Filter<E> filter{{allowed, mask_strides}, {of<E>(added), mask_strides},
                               {of<E>(bias), bias_strides}, seed, offset, site, threshold,
                               sample_dim, keep_scale, softcap, first_head, filled};
        const int64_t ldk = padded(n.width), ldv = padded(n.values);
        const int64_t most = std::min(QUERIES, n.queries);
        const int used = int(std::min(threads, int64_t(omp_get_max_threads())));
        const Table table(n, q_at, k_at, segments);
        const int64_t of_head = bias_sizes[1] * bias_sizes[2];
        const int64_t dbias_strides[] = {bias_sizes[0] > 1 ? n.heads * of_head : 0, of_head,
                                         bias_sizes[2], 1};
        const Strided<float> DBIAS{dbias, dbias_strides};
        const auto gradients = [&](int64_t index, int64_t own) {
            const Segment g = table.segment(index);
            if (q_at) {  // keys that no query sees
                const int64_t free = index > 0 ? table.entries[index - 1].k1 : 0;
                clear(DK, own, free, g.k0, n.width);
                clear(DV, own, free, g.k0, n.values);
            }
            const int64_t block = std::min(KEYS, g.keys), lds = padded(block);
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
            float* q_sum = rest.take(most * ldk);
            float* slope = rest.take(lds);  // of one row's soft cap
            // sums of dy * y: of the probabilities' gradient
            float* delta = rest.take(n.shared() * g.queries);
            const bool joined = LOW<E> && n.keys > KEYS;  // as in the forward
            float* q_whole = joined ? rest.take(n.shared() * n.queries * n.width) : nullptr;
            const bool one_block = block == g.keys && !given;  // a row is whole in it
            for (int64_t k0 = 0; k0 == 0 || k0 < g.keys; k0 += KEYS) {
                const int64_t keys = std::min(block, g.keys - k0);
                const E* kb = K.at(g.b, own, g.k0 + k0);
                const E* vb = V.at(g.b, own, g.k0 + k0);
                pack_panels(kb, K.col(), K.row(), n.width, keys, k_turned);
                pack_panels(vb, V.col(), V.row(), n.values, keys, v_turned);
                pack_panels(kb, K.row(), K.col(), keys, n.width, k_panels);
                fill(k_sum, 0, keys * ldk, 0.0f);
                fill(v_sum, 0, keys * ldv, 0.0f);
                // The blocks of queries of each head that these keys serve, head after head.
                const int64_t blocks = (g.queries + QUERIES - 1) / QUERIES;
                for (int64_t turn = 0; turn < n.shared() * blocks; ++turn) {
                    const int64_t member = turn / blocks, q0 = turn % blocks * QUERIES;
                    const int64_t h = own * n.shared() + member;
                    float* deltas = delta + member * g.queries;
                    const int64_t m = std::min(QUERIES, g.queries - q0);
                    const int64_t row = (g.b * n.heads + h) * n.queries + g.q0 + q0;
                    const Below below(g, filter, n.causal, h, q0, m, k0, keys, peaks + row);
                    if (k0 > 0 && below.cols == 0) continue;  // the first block writes each dq
                    const int64_t first = below.first, k1 = k0 + first;
                    const E* qb = Q.at(g.b, h, g.q0 + q0);
                    const E* gb = DY.at(g.b, h, g.q0 + q0);
                    pack_rows(qb, Q.row(), Q.col(), m, n.width, scale, q_rows);
                    pack_panels(q_rows, n.width, 1, m, n.width, q_panels);
                    pack_rows(gb, DY.row(), DY.col(), m, n.values, 1.0f, dy_rows);
                    pack_panels(dy_rows, n.values, 1, m, n.values, dy_panels);
                    for (int64_t i = 0; i < m && !one_block && k0 == 0; ++i)
                        deltas[q0 + i] = given ? given[row + i]
                                               : dot(dy_rows + i * n.values,
                                                     Y.at(g.b, h, g.q0 + q0 + i), Y.col(), n.values);
                    product_below(m, below.cols, n.width, q_rows, n.width,
                                  k_turned + first * n.width, s, lds, below.diagonal);
                    product_below(m, below.cols, n.values, dy_rows, n.values,
                                  v_turned + first * n.values, t, lds, below.diagonal);
                    for (int64_t i = 0; i < m; ++i) {
                        // no scalar rest
                        const int64_t count = below.count[i], whole = padded(count);
                        const float peak = peaks[row + i], inverse = 1.0f / totals[row + i];
                        float *si = s + i * lds, *ti = t + i * lds;
                        if (filter.nothing(peak)) {
                            fill(si, 0, below.cols, 0.0f);
                            fill(ti, 0, below.cols, 0.0f);
                            continue;
                        }
                        filter.cap(count, si, slope);
                        filter.mask(g, h, q0 + i, k1, count, si);
                        if (one_block) {
                            fill(si, count, whole, -INFINITY);
                            fill(ti, count, whole, 0.0f);
                        }
                        const int32_t* places = g.places ? g.places + k1 : nullptr;
                        const auto dropped = [&](auto listed) {
                            constexpr bool LISTED = decltype(listed)::value;
                            const RowKey key = filter.key(g, h, q0 + i, k1);
                            if (one_block)
                                whole_row<LISTED>(si, ti, int32_t(whole), peak, inverse, key,
                                                  places, uint32_t(threshold), keep_scale);
                            else
                                probabilities<LISTED>(si, ti, int32_t(whole), peak, inverse,
                                                      deltas[q0 + i], key, places,
                                                      uint32_t(threshold), keep_scale);
                        };
                        if (filter.drops() && g.places) dropped(std::true_type());
                        else if (filter.drops()) dropped(std::false_type());
                        else if (one_block) whole_row(si, ti, int32_t(whole), peak, inverse);
                        else probabilities(si, ti, int32_t(whole), peak, inverse, deltas[q0 + i]);
                        filter.undo(g, h, q0 + i, k1, count, peak, slope, ti, DBIAS);
                        fill(si, count, below.cols, 0.0f);
                        fill(ti, count, below.cols, 0.0f);
                    }
                    add_turned_product(below.cols, n.values, m, s, lds, dy_panels, m,
                                       v_sum + first * ldv, ldv, below.diagonal);
                    add_turned_product(below.cols, n.width, m, t, lds, q_panels, m,
                                       k_sum + first * ldk, ldk, below.diagonal);
                    fill(q_sum, 0, m * ldk, 0.0f);
                    add_product(m, n.width, below.cols, t, lds, k_panels + first * COLS, keys,
                                q_sum, ldk, below.diagonal);
                    const float before = k0 > 0 ? 1.0f : 0.0f;
                    for (int64_t i = 0; i < m; ++i) {
                        const float* qi = q_sum + i * ldk;
                        if (joined)
                            join(qi, n.width, scale, before,
                                 q_whole + (member * g.queries + q0 + i) * n.width);
                        else
                            join(qi, n.width, scale, before, DQ.at(g.b, h, g.q0 + q0 + i));
                    }
                }
                for (int64_t i = 0; i < keys; ++i) {
                    write(k_sum + i * ldk, n.width, 1.0f, DK.at(g.b, own, g.k0 + k0 + i));
                    write(v_sum + i * ldv, n.values, 1.0f, DV.at(g.b, own, g.k0 + k0 + i));
                }
            }
            for (int64_t i = 0; joined && i < n.shared() * g.queries; ++i) {
                const int64_t h = own * n.shared() + i / g.queries;
                write(q_whole + i * n.width, n.width, 1.0f, DQ.at(g.b, h, g.q0 + i % g.queries));
            }
        };
        // One more than the segments: the keys behind the last one's.
        const int64_t count = table.count + (q_at ? 1 : 0);
        const int64_t each = dbias && bias_sizes[0] == 1 ? count : 1;
        #pragma omp parallel for schedule(dynamic) num_threads(used)
        for (int64_t task = 0; task < count / each * n.groups; ++task) {
            const int64_t first = task / n.groups * each, own = task % n.groups;
            for (int64_t h = own * n.shared(); dbias && h < (own + 1) * n.shared(); ++h)
                fill(DBIAS.at(first, h, 0), 0, of_head, 0.0f);
            for (int64_t i = first; i < first + each; ++i) gradients(i, own);
        }
        const int64_t trained = rounded ? bias_sizes[0] * n.heads * of_head : 0;
        #pragma omp parallel for schedule(static) num_threads(used)
        for (int64_t start = 0; start < trained; start += KEYS)
            write(dbias + start, std::min(KEYS, trained - start), 1.0f, of<E>(rounded) + start);
    });
}
