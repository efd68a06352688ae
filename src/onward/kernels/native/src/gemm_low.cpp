// y = a b + c of bf16 or fp16 on a processor without instructions for them: blocks of the operands
// are widened to f32 for a BLAS, and each number of y is rounded once.
#include "annotations.h"
#include "blas.h"
#include "element.h"

#include <algorithm>
#include <cstring>
#include <omp.h>

using namespace onward;

namespace {

template <class E> void widen(const E* x, float* y, int64_t n)
{
    #pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = float(x[i]);
}

}  // namespace

// y[m,n] = a[m,k] b[k,n] + c. ta, tb: the operand is stored transposed. lda, ldb, ldy: the distance
// of lines. c: null (y = a b), a row T[n] (c_stride 0), a matrix with rows c_stride apart, or y
// itself. rows, columns, depth: of a block of y, and of the inner dim.
//
// Of a block of rows, either all of a is widened at once, or all of y is summed in f32: the smaller.
//   k <= n: widen a[rows,k]; a thread takes columns of b, widened by depths, and writes y
//   k > n:  for each depth: widen a[rows,depth]; a thread adds columns of b to sums[rows,n]; then y
// scratch f32: rows*k, or rows*depth and rows*n; and for each thread columns*(depth + rows)
extern "C" void onward_gemm_low(
    const Blas* blas, int64_t ta, int64_t tb, int64_t m, int64_t n, int64_t k, const T* a,
    int64_t lda, const T* b, int64_t ldb, const T* OPTIONAL c, int64_t c_stride, T* y, int64_t ldy,
    int64_t rows, int64_t columns, int64_t depth, int64_t threads, int64_t room,
    float* OF(room) scratch, int64_t element_T)
{
    const OneThread one(*blas);
    const bool sums_all = k > n;
    const int64_t most = sums_all ? depth : k;  // of the inner dim, widened at a time
    with_element(element_T, [&](auto e) {
        using E = decltype(e);
        const E *first = of<E>(a), *second = of<E>(b), *added = of<E>(c);
        E* out = of<E>(y);
        float* sums = scratch + rows * most;  // [rows][n]
        float* others = sums + (sums_all ? rows * n : 0);

        // a[m0.., k0..], stored as in a
        auto widen_a = [&](int64_t i, int64_t m0, int64_t high, int64_t k0, int64_t deep) {
            if (ta) widen(first + (k0 + i) * lda + m0, scratch + i * high, high);
            else widen(first + (m0 + i) * lda + k0, scratch + i * deep, deep);
        };
        // b[k0.., n0..], stored as in b
        auto widen_b = [&](float* own, int64_t k0, int64_t deep, int64_t n0, int64_t wide) {
            if (tb)
                for (int64_t j = 0; j < wide; ++j)
                    widen(second + (n0 + j) * ldb + k0, own + j * deep, deep);
            else
                for (int64_t j = 0; j < deep; ++j)
                    widen(second + (k0 + j) * ldb + n0, own + j * wide, wide);
        };
        auto write = [&](const float* row, int64_t i, int64_t n0, int64_t wide) {
            E* to = out + i * ldy + n0;
            if (added) {
                const E* plus = added + i * c_stride + n0;
                #pragma omp simd
                for (int64_t j = 0; j < wide; ++j) to[j] = row[j] + float(plus[j]);
            } else {
                #pragma omp simd
                for (int64_t j = 0; j < wide; ++j) to[j] = row[j];
            }
        };

        #pragma omp parallel num_threads(int(threads))
        {
            float* own = others + omp_get_thread_num() * columns * (depth + rows);
            float* product = own + depth * columns;  // [rows][columns]
            for (int64_t m0 = 0; m0 < m; m0 += rows) {
                const int64_t high = std::min(rows, m - m0);
                for (int64_t s0 = 0; s0 == 0 || s0 < k; s0 += std::max<int64_t>(most, 1)) {
                    const int64_t span = std::min(most, k - s0);
                    const int64_t lines = ta ? span : high;
                    #pragma omp for schedule(static)
                    for (int64_t i = 0; i < lines; ++i) widen_a(i, m0, high, s0, span);
                    #pragma omp for schedule(dynamic)
                    for (int64_t n0 = 0; n0 < n; n0 += columns) {
                        const int64_t wide = std::min(columns, n - n0);
                        float* to = sums_all ? sums + n0 : product;
                        const int64_t ld = sums_all ? n : wide;
                        if (k == 0) std::memset(product, 0, high * wide * sizeof(float));
                        for (int64_t k0 = 0; k0 < span; k0 += depth) {
                            const int64_t deep = std::min(depth, span - k0);
                            widen_b(own, s0 + k0, deep, n0, wide);
                            blas->gemm(ta, tb, high, wide, deep,
                                       ta ? scratch + k0 * high : scratch + k0, ta ? high : span,
                                       own, tb ? deep : wide, s0 + k0 ? 1.0f : 0.0f, to, ld);
                        }
                        if (!sums_all)
                            for (int64_t i = 0; i < high; ++i)
                                write(product + i * wide, m0 + i, n0, wide);
                    }
                }
                if (!sums_all) continue;
                #pragma omp for schedule(static)
                for (int64_t i = 0; i < high; ++i) write(sums + i * n, m0 + i, 0, n);
            }
        }
    });
}
