// Column sums in two steps. Rows are cut into `parts` whose number depends on their count alone, so
// the result does not depend on how many threads there are.
#pragma once
#include <cstdint>

namespace onward {

// The first row of part `p`.
inline int64_t part_start(int64_t rows, int64_t parts, int64_t p) { return rows * p / parts; }

// y[features] = the sum of partial[parts, features], in order; y of any element type.
template <class E>
inline void add_parts(const float* partial, E* y, int64_t parts, int64_t features) {
    constexpr int64_t BLOCK = 1024;
    #pragma omp parallel for schedule(static) if (parts * features > 16384)
    for (int64_t start = 0; start < features; start += BLOCK) {
        const int64_t width = start + BLOCK < features ? BLOCK : features - start;
        float sum[BLOCK];
        for (int64_t i = 0; i < width; ++i) sum[i] = partial[start + i];
        for (int64_t p = 1; p < parts; ++p) {
            const float* from = partial + p * features + start;
            #pragma omp simd
            for (int64_t i = 0; i < width; ++i) sum[i] += from[i];
        }
        for (int64_t i = 0; i < width; ++i) y[start + i] = sum[i];
    }
}

}  // namespace onward
