// Sums of columns, and the 2-norm of a whole tensor.
#include "annotations.h"
#include "element.h"
#include "partial.h"

#include <cmath>

using namespace onward;

// y[features] = the sum over the rows of x[rows, features]; partial: f32[parts, features].
extern "C" void onward_sum_rows(
    const T* OF(rows * features) x, T* OF(features) y, float* OF(parts * features) partial,
    int64_t rows, int64_t features, int64_t parts, int64_t element_T)
{
    with_element(element_T, [&](auto element) {
        using E = decltype(element);
        const E* xs = of<E>(x);
        constexpr int64_t BLOCK = 2048;  // columns, so that few but long rows make work for all threads
        #pragma omp parallel for collapse(2) schedule(static)
        for (int64_t p = 0; p < parts; ++p) {
            for (int64_t start = 0; start < features; start += BLOCK) {
                const int64_t width = start + BLOCK < features ? BLOCK : features - start;
                float* sum = partial + p * features + start;
                for (int64_t i = 0; i < width; ++i) sum[i] = 0.0f;
                const int64_t end = part_start(rows, parts, p + 1);
                int64_t r = part_start(rows, parts, p);
                for (; r + 4 <= end; r += 4) {
                    const E* a = xs + r * features + start;
                    const E* b = a + features;
                    const E* c = b + features;
                    const E* d = c + features;
                    #pragma omp simd
                    for (int64_t i = 0; i < width; ++i) sum[i] += (a[i] + b[i]) + (c[i] + d[i]);
                }
                for (; r < end; ++r) {
                    const E* a = xs + r * features + start;
                    #pragma omp simd
                    for (int64_t i = 0; i < width; ++i) sum[i] += a[i];
                }
            }
        }
        add_parts(partial, of<E>(y), parts, features);
    });
}

// y[0] = |x|, accumulated in fp64: no square overflows. The squares of `block` numbers are summed
// before their sum is kept, and blocks are added in order.
extern "C" void onward_norm(
    const T* OF(n) x, T* OF(1) y, double* OF((n + block - 1) / block) partial, int64_t n,
    int64_t block, int64_t element_T)
{
    with_element(element_T, [&](auto element) {
        using E = decltype(element);
        const E* xs = of<E>(x);
        constexpr int64_t LANES = 16;  // sums that do not wait for each other
        const int64_t blocks = (n + block - 1) / block;
        #pragma omp parallel for schedule(static)
        for (int64_t k = 0; k < blocks; ++k) {
            const int64_t end = (k + 1) * block < n ? (k + 1) * block : n;
            double lanes[LANES] = {};
            int64_t i = k * block;
            for (; i + LANES <= end; i += LANES) {
                #pragma omp simd
                for (int64_t j = 0; j < LANES; ++j) {
                    const double wide = float(xs[i + j]);
                    lanes[j] += wide * wide;
                }
            }
            double sum = 0.0;
            for (; i < end; ++i) sum += double(float(xs[i])) * double(float(xs[i]));
            for (int64_t j = 0; j < LANES; ++j) sum += lanes[j];
            partial[k] = sum;
        }
        double total = 0.0;
        for (int64_t k = 0; k < blocks; ++k) total += partial[k];
        *of<E>(y) = float(std::sqrt(total));
    });
}
