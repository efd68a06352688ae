// Rotary position embedding of heads [B,H,T,width], read and written where they lie.
//
// y = x * cos + turned(x) * sin over the first `turns` features, the others as they are. turned(x)
// is (-x2, x1) of a row's halves (x1, x2), or the same of each pair of neighbours. The gradient is
// the transpose: dx = dy * cos + turned^T(dy * sin), turned^T(z) = (z2, -z1). x and y are of one
// element type, the angles of the same or of f32.
#include "annotations.h"
#include "element.h"
#include "strided.h"

using namespace onward;

namespace {

// Pairs (a, b) of a row, `count` of them, that lie `apart` from one another and begin every `step`.
struct Pairs {
    int64_t count, step, apart;
};

template <bool TRANSPOSED, class E, class A>
inline void dense_halves(const E* x, const A* c, const A* s, E* y, int64_t half) {
    #pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        const float a = x[i], b = x[half + i];
        const float first = TRANSPOSED ? a * c[i] + b * s[half + i] : a * c[i] - b * s[i];
        const float second = TRANSPOSED ? b * c[half + i] - a * s[i]
                                        : b * c[half + i] + a * s[half + i];
        y[i] = first;
        y[half + i] = second;
    }
}

template <bool TRANSPOSED, class E, class A>
inline void any_pairs(
    const E* x, int64_t xs, const A* c, int64_t cs, const A* s, int64_t ss, E* y, int64_t ys,
    Pairs pairs)
{
    for (int64_t i = 0; i < pairs.count; ++i) {
        const int64_t p = i * pairs.step, q = p + pairs.apart;
        const float a = x[p * xs], b = x[q * xs];
        const float first = TRANSPOSED ? a * c[p * cs] + b * s[q * ss]
                                       : a * c[p * cs] - b * s[p * ss];
        const float second = TRANSPOSED ? b * c[q * cs] - a * s[p * ss]
                                        : b * c[q * cs] + a * s[q * ss];
        y[p * ys] = first;
        y[q * ys] = second;
    }
}

template <bool TRANSPOSED, class E, class A>
void rotated(
    Strided<const E> x, Strided<const A> cos, Strided<const A> sin, Strided<E> y,
    const int64_t* sizes, int64_t turns, bool interleaved)
{
    const int64_t rows = sizes[0] * sizes[1] * sizes[2], n = sizes[3], half = turns / 2;
    const bool dense = x.col() == 1 && cos.col() == 1 && sin.col() == 1 && y.col() == 1;
    const Pairs pairs = interleaved ? Pairs{half, 2, 1} : Pairs{half, 1, half};
    #pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
        const RowIndex at(sizes, r);
        const E* xr = at.of(x);
        const A *c = at.of(cos), *s = at.of(sin);
        E* yr = at.of(y);
        if (dense && !interleaved)
            dense_halves<TRANSPOSED>(xr, c, s, yr, half);
        else if (dense)
            any_pairs<TRANSPOSED>(xr, 1, c, 1, s, 1, yr, 1, pairs);
        else
            any_pairs<TRANSPOSED>(xr, x.col(), c, cos.col(), s, sin.col(), yr, y.col(), pairs);
        for (int64_t i = turns; i < n; ++i) yr[i * y.col()] = xr[i * x.col()];
    }
}

}  // namespace

extern "C" void onward_rotary(
    const T* x, const int64_t* OF(4) x_strides, const U* cos, const int64_t* OF(4) cos_strides,
    const U* sin, const int64_t* OF(4) sin_strides, T* y, const int64_t* OF(4) y_strides,
    const int64_t* OF(4) sizes, int64_t turns, int64_t interleaved, int64_t transposed,
    int64_t element_T, int64_t element_U)
{
    with_elements(element_T, element_U, [&](auto e, auto a) {
        using E = decltype(e);
        using A = decltype(a);
        const auto run = transposed ? rotated<true, E, A> : rotated<false, E, A>;
        run({of<E>(x), x_strides}, {of<A>(cos), cos_strides}, {of<A>(sin), sin_strides},
            {of<E>(y), y_strides}, sizes, turns, interleaved != 0);
    });
}
