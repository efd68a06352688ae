// The sum in f32 of up to four terms of one type and, after them, up to four of f32. y may lie in a
// term of f32: a block is summed beside it before it is written.
#include <algorithm>

#include "annotations.h"
#include "element.h"

using namespace onward;

static constexpr int64_t BLOCK = 1024;  // numbers, 4 KiB

template <class E> static void add(const E* x, float* sum, int64_t count) {
    #pragma omp simd
    for (int64_t i = 0; i < count; ++i) sum[i] += float(x[i]);
}

extern "C" void onward_wide_sum(
    const T* OPTIONAL OF(count) low0, const T* OPTIONAL OF(count) low1,
    const T* OPTIONAL OF(count) low2, const T* OPTIONAL OF(count) low3,
    const float* OPTIONAL OF(count) wide0, const float* OPTIONAL OF(count) wide1,
    const float* OPTIONAL OF(count) wide2, const float* OPTIONAL OF(count) wide3,
    float* OF(count) y, int64_t count, int64_t element_T)
{
    const void* lows[] = {low0, low1, low2, low3};
    const float* wides[] = {wide0, wide1, wide2, wide3};
    with_element(element_T, [&](auto element) {
        using E = decltype(element);
        #pragma omp parallel for schedule(static)
        for (int64_t start = 0; start < count; start += BLOCK) {
            const int64_t size = std::min(BLOCK, count - start);
            // the sum of nothing is -0, which changes no term
            float sum[BLOCK];
            std::fill_n(sum, size, -0.0f);
            for (const void* x : lows)
                if (x) add(of<E>(x) + start, sum, size);
            for (const float* x : wides)
                if (x) add(x + start, sum, size);
            std::copy_n(sum, size, y + start);
        }
    });
}
