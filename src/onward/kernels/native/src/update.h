// What updates of all optimizers share: one pass over memory, by blocks that a thread takes at once.
#pragma once
#include "element.h"

#include <cmath>
#include <cstdint>

namespace onward {

constexpr int64_t BLOCK = 2048;  // elements a thread takes at once

// Numbers as f32; of less, copied to `wide`: with them in it a loop would not vectorise.
inline const float* widened(const float* x, int64_t, float*) { return x; }

template <class E> inline const float* widened(const E* x, int64_t n, float* wide) {
    #pragma omp simd
    for (int64_t i = 0; i < n; ++i) wide[i] = x[i];
    return wide;
}

// Calls `step(gradient, start, some)` for each block of a gradient of any element type.
template <class Step>
inline void in_blocks(const void* g, int64_t n, int64_t element, const Step& step) {
    with_element(element, [&](auto kind) {
        #pragma omp parallel for schedule(static) if (n > 8192)
        for (int64_t start = 0; start < n; start += BLOCK) {
            const int64_t some = start + BLOCK < n ? BLOCK : n - start;
            float wide[BLOCK];
            step(widened(of<decltype(kind)>(g) + start, some, wide), start, some);
        }
    });
}

inline float factor_of(const float* scale) { return scale ? *scale : 1.0f; }

// A pointer moved by some elements; null stays null.
inline float* at(float* x, int64_t start) { return x ? x + start : x; }
inline const float* at(const float* x, int64_t start) { return x ? x + start : x; }

// The larger number, NaN where one is NaN: torch.maximum.
inline float larger(float x, float y) { return x > y || x != x ? x : y; }

}  // namespace onward
