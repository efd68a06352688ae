// Small matrix products out of the cache, for kernels that make and use their operands in blocks.
//
// A is read where it lies. B is packed in panels of COLS columns, `[panel][inner][COLS]`, zeros
// behind the last column. C is row-major with room for whole panels. The product of ROWS x COLS
// numbers of C stays in registers; GCC's vector types make it so on every machine.
#pragma once
#include <algorithm>
#include <cstdint>

namespace onward {

#if defined(__AVX__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif
constexpr int64_t ROWS = 6, COLS = 2 * LANES;
constexpr int64_t DEPTH = 256;  // a panel of that depth stays in the first-level cache
constexpr int64_t UNBOUNDED = int64_t(1) << 40;

typedef float Lanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

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
        #pragma GCC unroll 6
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
        default: return tile<6, TURNED>(a, lda, b, inner, c, ldc, add);
    }
}

// C[m,n] = A[m,inner] B[inner,n]. Row i is wanted up to column i + diagonal only; others of its
// tile are written or left as they are.
inline void product_below(int64_t m, int64_t n, int64_t inner, const float* a, int64_t lda,
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
inline void add_product(int64_t m, int64_t n, int64_t inner, const float* a, int64_t lda,
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
inline void add_turned_product(int64_t m, int64_t n, int64_t inner, const float* a, int64_t lda,
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

// A strided matrix to rows one after the other, times `scale`.
inline void pack_rows(const float* x, int64_t rs, int64_t cs, int64_t rows, int64_t cols,
                      float scale, float* to)
{
    for (int64_t i = 0; i < rows; ++i, to += cols) {
        const float* row = x + i * rs;
        if (cs == 1)
            for (int64_t j = 0; j < cols; ++j) to[j] = row[j] * scale;
        else
            for (int64_t j = 0; j < cols; ++j) to[j] = row[j * cs] * scale;
    }
}

// A strided matrix [rows,cols] to panels.
inline void pack_panels(const float* x, int64_t rs, int64_t cs, int64_t rows, int64_t cols,
                        float* to)
{
    for (int64_t j = 0; j < cols; j += COLS) {
        const int64_t wide = std::min(COLS, cols - j);
        for (int64_t i = 0; i < rows; ++i, to += COLS) {
            const float* row = x + i * rs + j * cs;
            if (wide < COLS) {
                for (int64_t l = 0; l < COLS; ++l) to[l] = l < wide ? row[l * cs] : 0.0f;
            } else if (cs == 1) {
                for (int64_t l = 0; l < COLS; ++l) to[l] = row[l];
            } else {
                for (int64_t l = 0; l < COLS; ++l) to[l] = row[l * cs];
            }
        }
    }
}

}  // namespace onward
