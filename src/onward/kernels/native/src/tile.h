// Small matrix products out of the cache, for kernels that make and use their operands in blocks.
//
// A is read where it lies. B is packed in panels of COLS columns, `[panel][inner][COLS]`, zeros
// behind the last column. Packing takes elements of any type to f32. C is row-major with room for whole panels. The product of ROWS x COLS
// numbers of C stays in registers; GCC's vector types make it so on every machine.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "element.h"

#define OUTLINED static __attribute__((noinline, unused))  // registers of its own

namespace onward {

// ROWS * 2 vectors of C, two of B and one of A fill the registers; 64 rows are whole tiles where
// there are registers for more.
#if defined(__AVX512F__)
constexpr int64_t LANES = 16, ROWS = 8;
#elif defined(__AVX__)
constexpr int64_t LANES = 8, ROWS = 6;
#else
constexpr int64_t LANES = 4, ROWS = 6;
#endif
constexpr int64_t COLS = 2 * LANES;
constexpr int64_t DEPTH = 256;  // a panel of that depth stays in the first-level cache
constexpr int64_t UNBOUNDED = int64_t(1) << 40;

typedef float Lanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));

inline int64_t padded(int64_t n) { return (n + COLS - 1) / COLS * COLS; }

// C[M,COLS] (+)= A[M,inner] B[inner,COLS]; with TURNED, A is stored as [inner,M].
template <int M, bool TURNED>
inline void tile(const float* a, int64_t lda, const float* b, int64_t inner, float* c, int64_t ldc,
                 bool add)
{
    Lanes left[M], right[M];
    for (int i = 0; i < M; ++i) {
        left[i] = add ? *(const Lanes*)(c + i * ldc) : Lanes{};
        right[i] = add ? *(const Lanes*)(c + i * ldc + LANES) : Lanes{};
    }
    for (int64_t p = 0; p < inner; ++p) {
        const Lanes b0 = *(const Lanes*)(b + p * COLS), b1 = *(const Lanes*)(b + p * COLS + LANES);
        #pragma GCC unroll 16
        for (int i = 0; i < M; ++i) {
            const float x = TURNED ? a[p * lda + i] : a[i * lda + p];
            left[i] += x * b0;
            right[i] += x * b1;
        }
    }
    for (int i = 0; i < M; ++i) {
        *(Lanes*)(c + i * ldc) = left[i];
        *(Lanes*)(c + i * ldc + LANES) = right[i];
    }
}

template <bool TURNED>
inline void tile_of(int64_t m, const float* a, int64_t lda, const float* b, int64_t inner, float* c,
                    int64_t ldc, bool add)
{
    switch (m) {
        case 1: return tile<1, TURNED>(a, lda, b, inner, c, ldc, add);
        case 2: return tile<2, TURNED>(a, lda, b, inner, c, ldc, add);
        case 3: return tile<3, TURNED>(a, lda, b, inner, c, ldc, add);
        case 4: return tile<4, TURNED>(a, lda, b, inner, c, ldc, add);
        case 5: return tile<5, TURNED>(a, lda, b, inner, c, ldc, add);
#if defined(__AVX512F__)
        case 6: return tile<6, TURNED>(a, lda, b, inner, c, ldc, add);
        case 7: return tile<7, TURNED>(a, lda, b, inner, c, ldc, add);
#endif
        default: return tile<ROWS, TURNED>(a, lda, b, inner, c, ldc, add);
    }
}

// C[m,n] = A[m,inner] B[inner,n]. Row i is wanted up to column i + diagonal only; others of its
// tile are written or left as they are.
OUTLINED void product_below(int64_t m, int64_t n, int64_t inner, const float* a, int64_t lda,
                          const float* b, float* c, int64_t ldc, int64_t diagonal)
{
    for (int64_t j = 0; j < n; j += COLS)
        for (int64_t i = 0; i < m; i += ROWS) {
            const int64_t rows = std::min(ROWS, m - i);
            if (j > i + rows - 1 + diagonal) continue;
            tile_of<false>(rows, a + i * lda, lda, b + j * inner, inner, c + i * ldc + j, ldc,
                           false);
        }
}

// C[m,n] += A[m,inner] B[inner,n], where row i of A is zero behind column i + diagonal.
OUTLINED void add_product(int64_t m, int64_t n, int64_t inner, const float* a, int64_t lda,
                        const float* b, int64_t depth, float* c, int64_t ldc, int64_t diagonal)
{
    for (int64_t p = 0; p < inner; p += DEPTH)
        for (int64_t j = 0; j < n; j += COLS)
            for (int64_t i = 0; i < m; i += ROWS) {
                const int64_t rows = std::min(ROWS, m - i);
                const int64_t end = std::min({inner, p + DEPTH, i + rows + diagonal});
                if (end <= p) continue;
                tile_of<false>(rows, a + i * lda + p, lda, b + j * depth + p * COLS, end - p,
                               c + i * ldc + j, ldc, true);
            }
}

// C[m,n] += A^T B with A[inner,m], where column i of A is zero above row i - diagonal.
OUTLINED void add_turned_product(int64_t m, int64_t n, int64_t inner, const float* a, int64_t lda,
                               const float* b, int64_t depth, float* c, int64_t ldc,
                               int64_t diagonal)
{
    for (int64_t j = 0; j < n; j += COLS)
        for (int64_t i = 0; i < m; i += ROWS) {
            const int64_t first = std::max(int64_t(0), i - diagonal);
            if (first >= inner) continue;
            tile_of<true>(std::min(ROWS, m - i), a + first * lda + i, lda,
                          b + j * depth + first * COLS, inner - first, c + i * ldc + j, ldc, true);
        }
}

// Operands come from wide rows far apart: each is asked for before it is needed.
template <class E> inline void prefetch(const E* row, int64_t n) {
    for (int64_t j = 0; j < n; j += 64 / sizeof(E)) __builtin_prefetch(row + j);
}

// A strided matrix to rows one after the other, times `scale`.
template <class E>
OUTLINED void pack_rows(const E* x, int64_t rs, int64_t cs, int64_t rows, int64_t cols, float scale,
                        float* to)
{
    for (int64_t i = 0; i < rows; ++i, to += cols) {
        const E* row = x + i * rs;
        if (cs == 1) {
            if (i + 8 < rows) prefetch(row + 8 * rs, cols);
            #pragma omp simd
            for (int64_t j = 0; j < cols; ++j) to[j] = row[j] * scale;
        } else {
            for (int64_t j = 0; j < cols; ++j) to[j] = row[j * cs] * scale;
        }
    }
}

// to[i][l] = x[l][i] for four rows and columns; rows of `to` are COLS apart.
inline void turn_quad(const float* x, int64_t rs, float* to) {
    const Quad a = *(const Quad*)x, b = *(const Quad*)(x + rs);
    const Quad c = *(const Quad*)(x + 2 * rs), d = *(const Quad*)(x + 3 * rs);
    typedef int32_t Order __attribute__((vector_size(16)));
    const Order low{0, 4, 1, 5}, high{2, 6, 3, 7}, first{0, 1, 4, 5}, second{2, 3, 6, 7};
    const Quad ab = __builtin_shuffle(a, b, low), cd = __builtin_shuffle(c, d, low);
    const Quad AB = __builtin_shuffle(a, b, high), CD = __builtin_shuffle(c, d, high);
    *(Quad*)to = __builtin_shuffle(ab, cd, first);
    *(Quad*)(to + COLS) = __builtin_shuffle(ab, cd, second);
    *(Quad*)(to + 2 * COLS) = __builtin_shuffle(AB, CD, first);
    *(Quad*)(to + 3 * COLS) = __builtin_shuffle(AB, CD, second);
}

// One panel of `wide` columns; row 0 of the matrix at x.
template <class E>
inline void pack_panel(const E* x, int64_t rs, int64_t cs, int64_t rows, int64_t wide, float* to) {
    int64_t i = 0;
    if (wide == COLS && cs == 1)
        for (; i < rows; ++i)
            #pragma omp simd
            for (int64_t l = 0; l < COLS; ++l) to[i * COLS + l] = x[i * rs + l];
    if constexpr (std::is_same_v<E, float>) {
        if (wide == COLS && rs == 1)
            for (; i + 4 <= rows; i += 4)
                for (int64_t l = 0; l < COLS; l += 4)
                    turn_quad(x + l * cs + i, cs, to + i * COLS + l);
    } else if (rs == 1) {  // as f32 first, some rows at a time
        constexpr int64_t SOME = 32;
        float wider[COLS * SOME] = {};
        for (; i + 4 <= rows; i += SOME) {
            const int64_t size = std::min(SOME, (rows - i) / 4 * 4);
            for (int64_t l = 0; l < wide; ++l) {
                const E* column = x + l * cs + i;
                float* place = wider + l * SOME;
                #pragma omp simd
                for (int64_t j = 0; j < size; ++j) place[j] = column[j];
            }
            for (int64_t j = 0; j < size; j += 4)
                for (int64_t l = 0; l < COLS; l += 4)
                    turn_quad(wider + l * SOME + j, SOME, to + (i + j) * COLS + l);
            if (size < SOME) {
                i += size;
                break;
            }
        }
    }
    for (; i < rows; ++i)
        for (int64_t l = 0; l < COLS; ++l)
            to[i * COLS + l] = l < wide ? float(x[i * rs + l * cs]) : 0.0f;
}

// A strided matrix [rows,cols] to panels.
template <class E>
OUTLINED void pack_panels(const E* x, int64_t rs, int64_t cs, int64_t rows, int64_t cols, float* to)
{
    if (cs == 1)
        for (int64_t i = 0; i < rows; ++i) prefetch(x + i * rs, cols);
    for (int64_t j = 0; j < cols; j += COLS, to += rows * COLS) {
        if (rs == 1)
            for (int64_t l = j + COLS; l < std::min(j + 2 * COLS, cols); ++l)
                prefetch(x + l * cs, rows);
        pack_panel(x + j * cs, rs, cs, rows, std::min(COLS, cols - j), to);
    }
}

}  // namespace onward
