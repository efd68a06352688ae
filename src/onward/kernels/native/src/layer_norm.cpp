// LayerNormalization of rows f32[rows, features] and its gradient, alone or with what surrounds it
// in a transformer: r = residual + Dropout(x) before, the gradients' sum and the mask after. And
// RMSNormalization, the same without a mean and a bias. With its surroundings y and dy may be of
// another element type than the sum, and x and dx of another one.
//
// A row is read from memory once: all its passes run while it lies in the nearest cache.
#include "annotations.h"

#include <cmath>
#include <cstring>

#include "element.h"
#include "random.h"
#include "sums.h"

using namespace onward;

namespace {

constexpr int64_t CHUNK = 1024;  // elements of a row that are dropped at a time: 4 KB of stack

// One row of y, mean, invstd. Its own function, so that every caller gets the same bits.
template <class Y>
__attribute__((noinline)) void norm_row(
    const float* r, const float* scale, const float* bias, Y* y, float* mean, float* invstd,
    int64_t n, float epsilon)
{
    float m, s;
    mean_and_invstd(r, n, epsilon, m, s);
    if (bias) {
        #pragma omp simd
        for (int64_t i = 0; i < n; ++i) y[i] = (r[i] - m) * s * scale[i] + bias[i];
    } else {
        #pragma omp simd
        for (int64_t i = 0; i < n; ++i) y[i] = (r[i] - m) * s * scale[i];
    }
    *mean = m;
    *invstd = s;
}

// 1 / sqrt(mean(r^2) + epsilon) of a row.
inline float inverse_root(const float* r, int64_t n, float epsilon) {
    float squares, unused;
    two_sums(n, [=](int64_t i, float& a, float&) { a += r[i] * r[i]; }, squares, unused);
    return 1.0f / std::sqrt(squares / float(n) + epsilon);
}

// One row of y, the norm by the root of the mean square. Its own function, as norm_row.
template <class Y>
__attribute__((noinline)) void rms_row(
    const float* r, const float* scale, Y* y, int64_t n, float epsilon)
{
    const float s = inverse_root(r, n, epsilon);
    #pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = r[i] * s * scale[i];
}

// r = residual + Dropout(x) of one row, with the bits of the two ops one after the other: the
// dropped numbers go through memory, so that no compiler joins the product and the sum.
template <class X>
inline void dropped_sum(
    const X* x, const float* residual, float* r, int64_t n, RowKey key, uint32_t threshold,
    float factor)
{
    float dropped[CHUNK];
    for (int64_t start = 0; start < n; start += CHUNK) {
        const int64_t size = n - start < CHUNK ? n - start : CHUNK;
        const X* xs = x + start;
        #pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            const float kept = xs[i] * factor;
            dropped[i] = key.word(uint32_t(start + i)) >= threshold ? kept : 0.0f;
        }
        const float* res = residual + start;
        float* rs = r + start;
        #pragma omp simd
        for (int64_t i = 0; i < size; ++i) rs[i] = res[i] + dropped[i];
    }
}

// The row's two means, and its terms of dscale and dbias added to `dscale`, `dbias`.
template <class Y>
inline void row_means(
    const Y* dy, const float* r, const float* scale, float m, float s, float* dscale,
    float* dbias, int64_t n, float& centre, float& slope)
{
    two_sums(n, [=](int64_t i, float& a, float& b) {
        const float xhat = (r[i] - m) * s, g = dy[i] * scale[i];
        a += g;
        b += g * xhat;
        dscale[i] += dy[i] * xhat;
        dbias[i] += dy[i];
    }, centre, slope);
    centre /= float(n);
    slope /= float(n);
}

// The same of a norm without a mean: its row's one mean, and its terms of dscale.
template <class Y>
inline float row_slope(
    const Y* dy, const float* r, const float* scale, float s, float* dscale, int64_t n)
{
    float slope, unused;
    two_sums(n, [=](int64_t i, float& a, float&) {
        const float xhat = r[i] * s;
        a += dy[i] * scale[i] * xhat;
        dscale[i] += dy[i] * xhat;
    }, slope, unused);
    return slope / float(n);
}

// Writes a row of gradients g(i), and of its dropout `dx` where that is wanted; `drops` false: dx is
// the same in its own type.
template <class Gradient, class X>
inline void write_row(
    const Gradient& gradient, const float* dr, float* out, X* dx, int64_t n, bool drops, RowKey key,
    uint32_t threshold, float factor)
{
    if (dx && !drops) {
        const auto write = [=](int64_t i, float g) {
            out[i] = g;
            dx[i] = g;
        };
        if (dr) {
            #pragma omp simd
            for (int64_t i = 0; i < n; ++i) write(i, gradient(i) + dr[i]);
        } else {
            #pragma omp simd
            for (int64_t i = 0; i < n; ++i) write(i, gradient(i));
        }
    } else if (dx) {
        const auto write = [=](int64_t i, float g) {
            out[i] = g;
            dx[i] = key.word(uint32_t(i)) >= threshold ? g * factor : 0.0f;
        };
        if (dr) {
            #pragma omp simd
            for (int64_t i = 0; i < n; ++i) write(i, gradient(i) + dr[i]);
        } else {
            #pragma omp simd
            for (int64_t i = 0; i < n; ++i) write(i, gradient(i));
        }
    } else if (dr) {
        #pragma omp simd
        for (int64_t i = 0; i < n; ++i) out[i] = gradient(i) + dr[i];
    } else {
        #pragma omp simd
        for (int64_t i = 0; i < n; ++i) out[i] = gradient(i);
    }
}

// y := the sum of `tiles` rows of n that lie `step` apart, columns first to first + width.
inline void add_tiles(const float* partial, int64_t tiles, int64_t step, int64_t width, float* y) {
    std::memset(y, 0, size_t(width) * sizeof(float));
    for (int64_t t = 0; t < tiles; ++t) {
        const float* part = partial + t * step;
        #pragma omp simd
        for (int64_t i = 0; i < width; ++i) y[i] += part[i];
    }
}

// r = residual + Dropout(x) of row k; `drops` false: without dropout.
template <class X>
inline void summed_row(
    const X* x, const float* residual, float* r, int64_t k, int64_t n, bool drops,
    const Mask& mask, const Rows& where)
{
    const X* xk = x + k * n;
    const float* residual_k = residual + k * n;
    float* rk = r + k * n;
    if (drops) {
        dropped_sum(xk, residual_k, rk, n, where.key(mask.start, k), mask.threshold, mask.scale);
    } else {
        #pragma omp simd
        for (int64_t i = 0; i < n; ++i) rk[i] = residual_k[i] + xk[i];
    }
}

constexpr int64_t COLUMNS = 64;  // of the sums over tiles that a thread takes at a time

}  // namespace

extern "C" void onward_layer_norm(
    const float* OF(rows * features) x, const float* OF(features) scale,
    const float* OPTIONAL OF(features) bias, float* OF(rows * features) y, float* OF(rows) mean,
    float* OF(rows) invstd, int64_t rows, int64_t features, float epsilon)
{
    #pragma omp parallel for schedule(static)
    for (int64_t k = 0; k < rows; ++k)
        norm_row(x + k * features, scale, bias, y + k * features, mean + k, invstd + k, features,
                 epsilon);
}

// r = residual + Dropout(x), y its norm. `seed` null: no dropout.
extern "C" void onward_add_layer_norm(
    const U* OF(rows * features) x, const float* OF(rows * features) residual,
    const float* OF(features) scale, const float* OPTIONAL OF(features) bias,
    T* OF(rows * features) y, float* OF(rows) mean, float* OF(rows) invstd,
    float* OF(rows * features) r, int64_t rows, int64_t features, float epsilon,
    const int64_t* OPTIONAL OF(2) seed, const int64_t* OPTIONAL OF(1) offset, int64_t site,
    int64_t threshold, float factor, const int64_t* OF(rank) sizes, int64_t rank,
    int64_t sample_dim, const int64_t* OPTIONAL coordinates, int64_t width, int64_t element_T,
    int64_t element_U)
{
    const int64_t none[2] = {0, 0};
    const Mask mask(seed ? seed : none, site, threshold, factor);
    const Rows where(sizes, rank, sample_dim, offset, coordinates, width);
    with_elements(element_T, element_U, [&](auto of_y, auto of_x) {
        const auto* xs = of<decltype(of_x)>(x);
        auto* ys = of<decltype(of_y)>(y);
        #pragma omp parallel for schedule(static)
        for (int64_t k = 0; k < rows; ++k) {
            summed_row(xs, residual, r, k, features, seed, mask, where);
            norm_row(r + k * features, scale, bias, ys + k * features, mean + k, invstd + k,
                     features, epsilon);
        }
    });
}

// dresidual = gradient of LayerNormalization at r, plus dr (null: nothing else reads r). dx (null:
// not wanted) = Dropout's mask applied to it. dscale and dbias are summed by tiles of rows in
// `partial` f32[tiles, 2, features], whose number does not depend on the threads; so the result
// does not either. dx may overwrite dresidual where nobody reads that.
extern "C" void onward_add_layer_norm_grad(
    const T* OF(rows * features) dy, const float* OPTIONAL OF(rows * features) dr,
    const float* OF(rows * features) r, const float* OF(features) scale,
    const float* OF(rows) mean, const float* OF(rows) invstd,
    float* OF(rows * features) dresidual, float* OF(features) dscale, float* OF(features) dbias,
    U* OPTIONAL OF(rows * features) dx, float* OF(tiles * 2 * features) partial, int64_t tiles,
    int64_t rows, int64_t features, const int64_t* OPTIONAL OF(2) seed,
    const int64_t* OPTIONAL OF(1) offset, int64_t site, int64_t threshold, float factor,
    const int64_t* OF(rank) sizes, int64_t rank, int64_t sample_dim,
    const int64_t* OPTIONAL coordinates, int64_t width, int64_t element_T, int64_t element_U)
{
    const int64_t none[2] = {0, 0};
    const Mask mask(seed ? seed : none, site, threshold, factor);
    const Rows where(sizes, rank, sample_dim, offset, coordinates, width);
    const int64_t n = features, height = (rows + tiles - 1) / tiles;
    with_elements(element_T, element_U, [&](auto of_y, auto of_x) {
        const auto* dys = of<decltype(of_y)>(dy);
        auto* dxs = of<decltype(of_x)>(dx);
        #pragma omp parallel
        {
            #pragma omp for schedule(static)
            for (int64_t t = 0; t < tiles; ++t) {
                float *ds = partial + 2 * t * n, *db = ds + n;
                std::memset(ds, 0, size_t(2 * n) * sizeof(float));
                const int64_t end = (t + 1) * height < rows ? (t + 1) * height : rows;
                for (int64_t k = t * height; k < end; ++k) {
                    const auto* dyk = dys + k * n;
                    const float* rk = r + k * n;
                    float* out = dresidual + k * n;
                    const float m = mean[k], s = invstd[k];
                    float centre, slope;
                    row_means(dyk, rk, scale, m, s, ds, db, n, centre, slope);
                    const auto gradient = [=](int64_t i) {
                        return s * (dyk[i] * scale[i] - centre - (rk[i] - m) * s * slope);
                    };
                    write_row(gradient, dr ? dr + k * n : nullptr, out, dxs ? dxs + k * n : nullptr, n,
                              seed, seed ? where.key(mask.start, k) : mask.start, mask.threshold,
                              mask.scale);
                }
            }
            #pragma omp for schedule(static)
            for (int64_t c = 0; c < n; c += COLUMNS) {
                const int64_t width = n - c < COLUMNS ? n - c : COLUMNS;
                add_tiles(partial + c, tiles, 2 * n, width, dscale + c);
                add_tiles(partial + n + c, tiles, 2 * n, width, dbias + c);
            }
        }
    });
}

extern "C" void onward_rms_norm(
    const float* OF(rows * features) x, const float* OF(features) scale,
    float* OF(rows * features) y, int64_t rows, int64_t features, float epsilon)
{
    #pragma omp parallel for schedule(static)
    for (int64_t k = 0; k < rows; ++k)
        rms_row(x + k * features, scale, y + k * features, features, epsilon);
}

// r = residual + Dropout(x), y its norm. `seed` null: no dropout.
extern "C" void onward_add_rms_norm(
    const U* OF(rows * features) x, const float* OF(rows * features) residual,
    const float* OF(features) scale, T* OF(rows * features) y, float* OF(rows * features) r,
    int64_t rows, int64_t features, float epsilon, const int64_t* OPTIONAL OF(2) seed,
    const int64_t* OPTIONAL OF(1) offset, int64_t site, int64_t threshold, float factor,
    const int64_t* OF(rank) sizes, int64_t rank, int64_t sample_dim,
    const int64_t* OPTIONAL coordinates, int64_t width, int64_t element_T, int64_t element_U)
{
    const int64_t none[2] = {0, 0};
    const Mask mask(seed ? seed : none, site, threshold, factor);
    const Rows where(sizes, rank, sample_dim, offset, coordinates, width);
    with_elements(element_T, element_U, [&](auto of_y, auto of_x) {
        const auto* xs = of<decltype(of_x)>(x);
        auto* ys = of<decltype(of_y)>(y);
        #pragma omp parallel for schedule(static)
        for (int64_t k = 0; k < rows; ++k) {
            summed_row(xs, residual, r, k, features, seed, mask, where);
            rms_row(r + k * features, scale, ys + k * features, features, epsilon);
        }
    });
}

// As onward_add_layer_norm_grad, of the norm by the root of the mean square, which is found again.
extern "C" void onward_add_rms_norm_grad(
    const T* OF(rows * features) dy, const float* OPTIONAL OF(rows * features) dr,
    const float* OF(rows * features) r, const float* OF(features) scale,
    float* OF(rows * features) dresidual, float* OF(features) dscale,
    U* OPTIONAL OF(rows * features) dx, float* OF(tiles * features) partial, int64_t tiles,
    int64_t rows, int64_t features, float epsilon, const int64_t* OPTIONAL OF(2) seed,
    const int64_t* OPTIONAL OF(1) offset, int64_t site, int64_t threshold, float factor,
    const int64_t* OF(rank) sizes, int64_t rank, int64_t sample_dim,
    const int64_t* OPTIONAL coordinates, int64_t width, int64_t element_T, int64_t element_U)
{
    const int64_t none[2] = {0, 0};
    const Mask mask(seed ? seed : none, site, threshold, factor);
    const Rows where(sizes, rank, sample_dim, offset, coordinates, width);
    const int64_t n = features, height = (rows + tiles - 1) / tiles;
    with_elements(element_T, element_U, [&](auto of_y, auto of_x) {
        const auto* dys = of<decltype(of_y)>(dy);
        auto* dxs = of<decltype(of_x)>(dx);
        #pragma omp parallel
        {
            #pragma omp for schedule(static)
            for (int64_t t = 0; t < tiles; ++t) {
                float* ds = partial + t * n;
                std::memset(ds, 0, size_t(n) * sizeof(float));
                const int64_t end = (t + 1) * height < rows ? (t + 1) * height : rows;
                for (int64_t k = t * height; k < end; ++k) {
                    const auto* dyk = dys + k * n;
                    const float* rk = r + k * n;
                    const float s = inverse_root(rk, n, epsilon);
                    const float slope = row_slope(dyk, rk, scale, s, ds, n);
                    const auto gradient = [=](int64_t i) {
                        return s * (dyk[i] * scale[i] - rk[i] * s * slope);
                    };
                    write_row(gradient, dr ? dr + k * n : nullptr, dresidual + k * n,
                              dxs ? dxs + k * n : nullptr, n, seed,
                              seed ? where.key(mask.start, k) : mask.start, mask.threshold, mask.scale);
                }
            }
            #pragma omp for schedule(static)
            for (int64_t c = 0; c < n; c += COLUMNS)
                add_tiles(partial + c, tiles, n, n - c < COLUMNS ? n - c : COLUMNS, dscale + c);
        }
    });
}
