// The losses of a block of rows of logits in low precision, and the logits' gradients in their
// place. All that is computed is f32; logits and gradients are rounded when stored.
#include "annotations.h"

#include <cmath>

#include "element.h"
#include "math.h"
#include "sums.h"

using namespace onward;

namespace {

struct Row {
    float log_sum, dot;  // of the exponentials; of the logits with the class weights
};

// A row's logit with its bias.
template <class E> inline float logit(const E* z, const float* bias, int64_t c) {
    return bias ? float(z[c]) + bias[c] : float(z[c]);
}

template <class E>
inline Row sums_of(const E* z, const float* bias, const float* weight, int64_t n, bool smooth) {
    float top = -INFINITY;
    if (bias) {
        #pragma omp simd reduction(max : top)
        for (int64_t c = 0; c < n; ++c) {
            const float u = float(z[c]) + bias[c];
            top = u > top ? u : top;
        }
    } else {
        #pragma omp simd reduction(max : top)
        for (int64_t c = 0; c < n; ++c) {
            const float u = float(z[c]);
            top = u > top ? u : top;
        }
    }
    const float shift = top == -INFINITY ? 0.0f : top;
    float total, dot = 0.0f, unused;
    if (bias)
        two_sums(n, [=](int64_t c, float& a, float&) {
            a += math::exp(float(z[c]) + bias[c] - shift);
        }, total, unused);
    else
        two_sums(n, [=](int64_t c, float& a, float&) { a += math::exp(float(z[c]) - shift); },
                 total, unused);
    if (smooth)
        two_sums(n, [=](int64_t c, float& a, float&) {
            a += logit(z, bias, c) * (weight ? weight[c] : 1.0f);
        }, dot, unused);
    return {shift + std::log(total), dot};
}

// z := (e^(z - log_sum) mass - even weight) factor, of all classes alike.
template <class E>
inline void gradients(
    E* z, const float* bias, const float* weight, int64_t n, float log_sum, float mass, float even,
    float factor)
{
    const float scale = mass * factor, share = even == 0.0f ? 0.0f : even * factor;
    if (bias && weight) {
        #pragma omp simd
        for (int64_t c = 0; c < n; ++c)
            z[c] = math::exp(float(z[c]) + bias[c] - log_sum) * scale - weight[c] * share;
    } else if (bias) {
        #pragma omp simd
        for (int64_t c = 0; c < n; ++c)
            z[c] = math::exp(float(z[c]) + bias[c] - log_sum) * scale - share;
    } else if (weight) {
        #pragma omp simd
        for (int64_t c = 0; c < n; ++c)
            z[c] = math::exp(float(z[c]) - log_sum) * scale - weight[c] * share;
    } else {
        #pragma omp simd
        for (int64_t c = 0; c < n; ++c) z[c] = math::exp(float(z[c]) - log_sum) * scale - share;
    }
}

}  // namespace

// loss[rows] = -sum(t log softmax(z + bias)) with the target t = weight (1 - smoothing) of the
// label, and smoothing / classes times each class's weight; 0 where the label is `ignore`. `unit`
// (null: no gradients) is what dlogits are multiplied by, and z then holds them. all_weights: the
// sum of the class weights.
extern "C" void onward_cross_entropy(
    T* OF(rows * classes) z, const float* OPTIONAL OF(classes) bias, const int64_t* OF(rows) labels,
    const float* OPTIONAL OF(classes) weight, const float* OF(1) all_weights,
    const float* OPTIONAL OF(1) unit, float* OF(rows) loss, int64_t rows, int64_t classes,
    int64_t ignore, float smoothing, int64_t element_T)
{
    const float even = smoothing / float(classes), every = all_weights[0];
    with_element(element_T, [&](auto e) {
        using E = decltype(e);
        #pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < rows; ++i) {
            E* row = of<E>(z) + i * classes;
            const int64_t label = labels[i];
            if (label == ignore || label < 0 || label >= classes) {
                loss[i] = 0.0f;
                if (unit)
                    for (int64_t c = 0; c < classes; ++c) row[c] = 0.0f;
                continue;
            }
            const Row found = sums_of(row, bias, weight, classes, smoothing != 0.0f);
            const float own = weight ? weight[label] : 1.0f, hit = own * (1.0f - smoothing);
            const float at = logit(row, bias, label), mass = hit + even * every;
            loss[i] = hit * (found.log_sum - at) + even * (every * found.log_sum - found.dot);
            if (!unit) continue;
            const float factor = unit[0];
            gradients(row, bias, weight, classes, found.log_sum, mass, even, factor);
            const float share = even * (weight ? weight[label] : 1.0f);
            const float chance = math::exp(at - found.log_sum);
            // 1 - p without cancellation matters little: hit is at least as large as p's rounding
            // and what is infinite is NaN there, inf - inf, as in PyTorch
            row[label] = (chance * mass - share - hit) * factor + (factor - factor);
        }
    });
}

// y[classes] (+)= the sum of z's rows, in f32.
extern "C" void onward_sum_rows_into(
    const T* OF(rows * classes) z, float* OF(classes) y, int64_t rows, int64_t classes,
    int64_t adds, int64_t element_T)
{
    constexpr int64_t BLOCK = 512;
    with_element(element_T, [&](auto e) {
        using E = decltype(e);
        #pragma omp parallel for schedule(static)
        for (int64_t start = 0; start < classes; start += BLOCK) {
            const int64_t width = start + BLOCK < classes ? BLOCK : classes - start;
            float* sum = y + start;
            if (!adds)
                for (int64_t c = 0; c < width; ++c) sum[c] = 0.0f;
            for (int64_t i = 0; i < rows; ++i) {
                const E* row = of<E>(z) + i * classes + start;
                #pragma omp simd
                for (int64_t c = 0; c < width; ++c) sum[c] += float(row[c]);
            }
        }
    });
}

// y (+)= x, of low precision into f32.
extern "C" void onward_accumulate(
    const T* OF(n) x, float* OF(n) y, int64_t n, int64_t adds, int64_t element_T)
{
    constexpr int64_t BLOCK = 8192;
    with_element(element_T, [&](auto e) {
        using E = decltype(e);
        const E* from = of<E>(x);
        #pragma omp parallel for schedule(static)
        for (int64_t start = 0; start < n; start += BLOCK) {
            const int64_t end = start + BLOCK < n ? start + BLOCK : n;
            if (adds) {
                #pragma omp simd
                for (int64_t i = start; i < end; ++i) y[i] += float(from[i]);
            } else {
                #pragma omp simd
                for (int64_t i = start; i < end; ++i) y[i] = float(from[i]);
            }
        }
    });
}
