// Dropout: y = x * scale where the mask keeps x, else 0. x, y: T[rows, features]. `sizes`
// are the dims before the feature, `first_feature` the number of the first one; random.h says what
// the rest is.
#include "annotations.h"
#include "element.h"
#include "random.h"

using namespace onward;

template <class E>
static void dropped(
    const E* x, E* y, int64_t rows, int64_t features, int64_t first_feature,
    const Mask mask, const Rows& where)
{
    #pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
        const RowKey key = where.key(mask.start, r).behind(uint32_t(first_feature));
        const E* xr = x + r * features;
        E* yr = y + r * features;
        #pragma omp simd
        for (int64_t i = 0; i < features; ++i)
            yr[i] = key.word(uint32_t(i)) >= mask.threshold ? xr[i] * mask.scale : 0.0f;
    }
}

extern "C" void onward_dropout(
    const T* OF(rows * features) x, T* OF(rows * features) y, int64_t rows, int64_t features,
    const int64_t* OF(2) seed, const int64_t* OPTIONAL OF(1) offset, int64_t site,
    int64_t threshold, float scale, const int64_t* OF(rank) sizes, int64_t rank,
    int64_t sample_dim, const int64_t* OPTIONAL coordinates, int64_t width, int64_t first_feature,
    int64_t element_T)
{
    const Mask mask(seed, site, threshold, scale);
    const Rows where(sizes, rank, sample_dim, offset, coordinates, width);
    with_element(element_T, [&](auto element) {
        using E = decltype(element);
        dropped(of<E>(x), of<E>(y), rows, features, first_feature, mask, where);
    });
}
