// Adam and AdamW in one pass over p, g, m, v: the body of graph/ops/optimizers/adam.py, in its order.
// The gradient may be of another element type than the parameter and its moments, which are f32.
// Two more functions keep the moments in bf16, rounded by chance (rounding.py there), and in codes of
// 8 bits (quantization.py); they read, update and keep a block of them at a time, while it is in cache.
#include "annotations.h"
#include "element.h"
#include "random.h"
#include "update.h"

#include <cmath>
#include <cstdint>
#include <type_traits>

using namespace onward;

namespace {

// What all elements of an update share.
struct Scalars {
    float beta1, beta2, eps, rest1, rest2, size, root, shrink, weight, factor;
    bool added;
};

// lr to weight_decay, step and scale (null: 1) are read at each launch.
Scalars scalars(
    double rate, double first, double second, double epsilon, double decay, double count,
    const float* scale, int64_t decoupled)
{
    const float beta1 = float(first), beta2 = float(second), eps = float(epsilon);
    const float rest1 = float(1.0 - first), rest2 = float(1.0 - second);
    const float size = float(rate / (1.0 - std::pow(first, count)));
    const float root = float(std::sqrt(1.0 - std::pow(second, count)));
    const float shrink = decoupled ? float(1.0 - rate * decay) : 1.0f;
    const bool added = !decoupled && decay != 0.0;
    const float weight = float(decay);
    const float factor = factor_of(scale);
    return {beta1, beta2, eps, rest1, rest2, size, root, shrink, weight, factor, added};
}

void update(
    const float* p, const float* g, const float* m, const float* v, float* new_p, float* new_m,
    float* new_v, int64_t n, const Scalars& all)
{
    const auto [beta1, beta2, eps, rest1, rest2, size, root, shrink, weight, factor, added] = all;
    #pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float scaled = g[i] * factor;
        const float grad = added ? scaled + weight * p[i] : scaled;
        const float mi = m[i] * beta1 + grad * rest1;
        const float vi = v[i] * beta2 + grad * grad * rest2;
        new_m[i] = mi;
        new_v[i] = vi;
        new_p[i] = p[i] * shrink - size * (mi / (std::sqrt(vi) / root + eps));
    }
}

// AMSGrad: divides by the largest v so far.
void update_most(
    const float* p, const float* g, const float* m, const float* v, const float* most, float* new_p,
    float* new_m, float* new_v, float* new_most, int64_t n, const Scalars& all)
{
    const auto [beta1, beta2, eps, rest1, rest2, size, root, shrink, weight, factor, added] = all;
    #pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float scaled = g[i] * factor;
        const float grad = added ? scaled + weight * p[i] : scaled;
        const float mi = m[i] * beta1 + grad * rest1;
        const float vi = v[i] * beta2 + grad * grad * rest2;
        const float top = larger(most[i], vi);
        new_m[i] = mi;
        new_v[i] = vi;
        new_most[i] = top;
        new_p[i] = p[i] * shrink - size * (mi / (std::sqrt(top) / root + eps));
    }
}

// The upper half of an f32 as it is kept.
inline void keep(bf16& y, uint32_t word) { y.word = uint16_t(word >> 16); }
inline void keep(float& y, uint32_t word) { y = math::from_bits(word & 0xffff0000u); }

// Up by chance: 16 random bits are added to the 16 that are cut off. What is not finite stays.
inline uint32_t up_by_chance(float x, uint32_t draw) {
    const uint32_t word = math::bits(x), size = word & 0x7fffffffu;
    const uint32_t strange = size > 0x7f800000u ? 0x7fc00000u : word;
    return size < 0x7f800000u ? word + draw : strange;
}

constexpr int64_t ROW = 1024;  // elements that share a key of the generator

template <class E>
void keep_by_chance(const float* m, const float* v, E* new_m, E* new_v, int64_t n, RowKey key) {
    #pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t word = key.word(uint32_t(i));
        keep(new_m[i], up_by_chance(m[i], word & 0xffffu));
        keep(new_v[i], up_by_chance(v[i], word >> 16));
    }
}

constexpr int64_t CODED = 256;  // numbers that share the largest of their sizes
constexpr int LEVELS = 8;

void decoded(const code_t* codes, float absmax, const float* values, float* x, int64_t n) {
    #pragma omp simd
    for (int64_t i = 0; i < n; ++i) x[i] = values[int32_t(codes[i])] * absmax;
}

// The number of the last level, from K on, that a share of absmax has reached. By value: what is
// written through references in a vectorised loop gcc would keep in memory.
template <int K>
inline float reached(const float* starts, const float* numbers, float share, float found) {
    if constexpr (K == LEVELS) return found;
    else return reached<K + 1>(starts, numbers, share, share >= starts[K] ? numbers[K] : found);
}

// Codes, and the largest size, which is NaN where a number is not finite. sign: of codes, or 0.
float coded(const float* x, const float* all_levels, int32_t sign, code_t* codes, int64_t n) {
    float levels[5 * LEVELS];  // of our own: those in memory might be loaded under a mask
    for (int i = 0; i < 5 * LEVELS; ++i) levels[i] = all_levels[i];
    float most = 0.0f, taint = 0.0f;
    #pragma omp simd reduction(max : most) reduction(+ : taint)
    for (int64_t i = 0; i < n; ++i) {
        const float size = std::fabs(x[i]);
        most = size > most ? size : most;
        taint += x[i] * 0.0f;
    }
    const float absmax = most + taint;
    const float divisor = absmax > 0.0f ? absmax : INFINITY;  // then shares are 0, or NaN
    #pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float part = std::fabs(x[i]) / divisor, share = part > 0.0f ? part : 0.0f;
        const float low = reached<0>(levels, levels + LEVELS, share, 0.0f);
        const float rate = reached<0>(levels, levels + 2 * LEVELS, share, 0.0f);
        const float first = reached<0>(levels, levels + 3 * LEVELS, share, 0.0f);
        const float last = reached<0>(levels, levels + 4 * LEVELS, share, 0.0f);
        const float steps = float(int32_t((share - low) * rate)) + first;
        const int32_t code = int32_t(steps < last ? steps : last);
        codes[i] = code_t(code + (x[i] < 0.0f && code > 0 ? sign : 0));
    }
    return absmax;
}

}  // namespace

extern "C" void onward_adam(
    const float* OF(n) p, const T* OF(n) g, const float* OF(n) m, const float* OF(n) v,
    const float* OPTIONAL OF(n) most, float* OF(n) new_p, float* OF(n) new_m, float* OF(n) new_v,
    float* OPTIONAL OF(n) new_most, int64_t n, const double* OF(1) lr, const double* OF(1) first,
    const double* OF(1) second, const double* OF(1) epsilon, const double* OF(1) weight_decay,
    const int64_t* OF(1) step, const float* OPTIONAL OF(1) scale, int64_t decoupled,
    int64_t element_T)
{
    const Scalars all = scalars(
        *lr, *first, *second, *epsilon, *weight_decay, double(*step), scale, decoupled);
    in_blocks(g, n, element_T, [&](const float* gradient, int64_t start, int64_t some) {
        if (most)
            update_most(p + start, gradient, m + start, v + start, most + start, new_p + start,
                        new_m + start, new_v + start, new_most + start, some, all);
        else
            update(p + start, gradient, m + start, v + start, new_p + start, new_m + start,
                   new_v + start, some, all);
    });
}

// m, v: bf16, or wider with its numbers. The random bits are those of an element's number in the
// whole parameter, of which this is the part from row `first_row` on.
extern "C" void onward_adam_bf16(
    const float* OF(n) p, const T* OF(n) g, const U* OF(n) m, const U* OF(n) v, float* OF(n) new_p,
    U* OF(n) new_m, U* OF(n) new_v, int64_t n, const double* OF(1) lr, const double* OF(1) first,
    const double* OF(1) second, const double* OF(1) epsilon, const double* OF(1) weight_decay,
    const int64_t* OF(1) step, const float* OPTIONAL OF(1) scale, int64_t decoupled,
    const int64_t* OF(2) seed, int64_t site, int64_t first_row, int64_t element_T,
    int64_t element_U)
{
    const Scalars all = scalars(
        *lr, *first, *second, *epsilon, *weight_decay, double(*step), scale, decoupled);
    const RowKey key = RowKey::start(seed, site);
    with_elements(element_T, element_U, [&](auto element, auto kept) {
        using G = decltype(element);
        using M = decltype(kept);
        if constexpr (std::is_same_v<M, fp16>) return;  // nobody asks for it
        else
        #pragma omp parallel for schedule(static) if (n > 8192)
        for (int64_t start = 0; start < n; start += ROW) {
            const int64_t some = start + ROW < n ? ROW : n - start;
            float wide_g[ROW], wide_m[ROW], wide_v[ROW], moved_m[ROW], moved_v[ROW];
            update(p + start, widened(of<G>(g) + start, some, wide_g),
                   widened(of<M>(m) + start, some, wide_m), widened(of<M>(v) + start, some, wide_v),
                   new_p + start, moved_m, moved_v, some, all);
            keep_by_chance(moved_m, moved_v, of<M>(new_m) + start, of<M>(new_v) + start, some,
                           key.at(uint32_t(first_row + start / ROW)));
        }
    });
}

// m, v: codes of 256 numbers that share an absmax. values, levels: of each code, and of each decade.
extern "C" void onward_adam_8bit(
    const float* OF(n) p, const T* OF(n) g, const code_t* OF(n) m,
    const float* OF((n + 255) / 256) m_absmax, const code_t* OF(n) v,
    const float* OF((n + 255) / 256) v_absmax, float* OF(n) new_p, code_t* OF(n) new_m,
    float* OF((n + 255) / 256) new_m_absmax, code_t* OF(n) new_v,
    float* OF((n + 255) / 256) new_v_absmax, int64_t n, const double* OF(1) lr,
    const double* OF(1) first, const double* OF(1) second, const double* OF(1) epsilon,
    const double* OF(1) weight_decay, const int64_t* OF(1) step, const float* OPTIONAL OF(1) scale,
    int64_t decoupled, const float* OF(256) m_values, const float* OF(256) v_values,
    const float* OF(40) m_levels, const float* OF(40) v_levels, int64_t element_T)
{
    const Scalars all = scalars(
        *lr, *first, *second, *epsilon, *weight_decay, double(*step), scale, decoupled);
    with_element(element_T, [&](auto element) {
        using G = decltype(element);
        #pragma omp parallel for schedule(static) if (n > 8192)
        for (int64_t start = 0; start < n; start += CODED) {
            const int64_t some = start + CODED < n ? CODED : n - start, block = start / CODED;
            float wide_g[CODED], wide_m[CODED], wide_v[CODED], moved_m[CODED], moved_v[CODED];
            decoded(m + start, m_absmax[block], m_values, wide_m, some);
            decoded(v + start, v_absmax[block], v_values, wide_v, some);
            update(p + start, widened(of<G>(g) + start, some, wide_g), wide_m, wide_v,
                   new_p + start, moved_m, moved_v, some, all);
            new_m_absmax[block] = coded(moved_m, m_levels, 128, new_m + start, some);
            new_v_absmax[block] = coded(moved_v, v_levels, 0, new_v + start, some);
        }
    });
}
