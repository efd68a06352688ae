// Dropout: y = x * scale where the mask keeps x, else 0. x, y: f32[rows, features]. `sizes`
// are the dims before the feature; random.h says what the rest is.
#include "annotations.h"
#include "random.h"

using namespace onward;

extern "C" void onward_dropout(
    const float* OF(rows * features) x, float* OF(rows * features) y, int64_t rows,
    int64_t features, const int64_t* OF(2) seed, const int64_t* OPTIONAL OF(1) offset, int64_t site,
    int64_t threshold, float scale, const int64_t* OF(rank) sizes, int64_t rank,
    int64_t sample_dim, const int64_t* OPTIONAL coordinates, int64_t width)
{
    const Mask mask(seed, site, threshold, scale);
    const Rows where(sizes, rank, sample_dim, offset, coordinates, width);
    #pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
        const RowKey key = where.key(mask.start, r);
        const float* xr = x + r * features;
        float* yr = y + r * features;
        #pragma omp simd
        for (int64_t i = 0; i < features; ++i)
            yr[i] = key.word(uint32_t(i)) >= mask.threshold ? xr[i] * scale : 0.0f;
    }
}
