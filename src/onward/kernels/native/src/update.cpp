// Adam and AdamW in one pass over p, g, m, v: the body of graph/ops/optimizers/adam.py, in its order.
// The gradient may be of another element type than the parameter and its moments, which are f32.
#include "annotations.h"
#include "element.h"

#include <cmath>
#include <cstdint>

using namespace onward;

namespace {

// What all elements of an update share.
struct Scalars {
    float beta1, beta2, eps, rest1, rest2, size, root, shrink, weight, factor;
    bool added;
};

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

constexpr int64_t BLOCK = 2048;  // elements a thread takes at once

// Numbers as f32; of less, copied to `wide`: with them in it the loop above does not vectorise.
inline const float* widened(const float* x, int64_t, float*) { return x; }

template <class E> inline const float* widened(const E* x, int64_t n, float* wide) {
    #pragma omp simd
    for (int64_t i = 0; i < n; ++i) wide[i] = x[i];
    return wide;
}

}  // namespace

// lr to weight_decay, step and scale (null: 1) are read at each launch.
extern "C" void onward_adam(
    const float* OF(n) p, const T* OF(n) g, const float* OF(n) m, const float* OF(n) v,
    float* OF(n) new_p, float* OF(n) new_m, float* OF(n) new_v, int64_t n, const double* OF(1) lr,
    const double* OF(1) first, const double* OF(1) second, const double* OF(1) epsilon,
    const double* OF(1) weight_decay, const int64_t* OF(1) step, const float* OPTIONAL OF(1) scale,
    int64_t decoupled, int64_t element_T)
{
    const double rate = *lr, count = double(*step), decay = *weight_decay;
    const float beta1 = float(*first), beta2 = float(*second), eps = float(*epsilon);
    const float rest1 = float(1.0 - *first), rest2 = float(1.0 - *second);
    const float size = float(rate / (1.0 - std::pow(*first, count)));
    const float root = float(std::sqrt(1.0 - std::pow(*second, count)));
    const float shrink = decoupled ? float(1.0 - rate * decay) : 1.0f;
    const bool added = !decoupled && decay != 0.0;
    const float weight = float(decay);
    const float factor = scale ? *scale : 1.0f;
    const Scalars all{beta1, beta2, eps, rest1, rest2, size, root, shrink, weight, factor, added};
    with_element(element_T, [&](auto element) {
        #pragma omp parallel for schedule(static) if (n > 8192)
        for (int64_t start = 0; start < n; start += BLOCK) {
            const int64_t some = start + BLOCK < n ? BLOCK : n - start;
            float wide[BLOCK];
            const float* gradient = widened(of<decltype(element)>(g) + start, some, wide);
            update(p + start, gradient, m + start, v + start, new_p + start, new_m + start,
                   new_v + start, some, all);
        }
    });
}
