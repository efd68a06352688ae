// y = a b + c: tiles of y to threads, each tile one call of a BLAS on its own thread.
#include "annotations.h"
#include "blas.h"

#include <algorithm>
#include <cstring>
#include <omp.h>

using namespace onward;

namespace {

// rows x columns of threads: each packs its rows of a and its columns of b, so keep their sum low
int rows_of_threads(int threads, int64_t m, int64_t n)
{
    int best = 1;
    double least = 1e300;
    for (int r = 1; r <= threads; ++r) {
        if (threads % r) continue;
        const double packed = double(m) / r + double(n) / (threads / r);
        if (packed < least) { least = packed; best = r; }
    }
    return best;
}

// The part [begin, end) of `size` that share `i` of `shares` takes, in multiples of 16.
void part(int64_t size, int i, int shares, int64_t& begin, int64_t& end)
{
    const int64_t step = (((size + shares - 1) / shares) + 15) / 16 * 16;
    begin = std::min<int64_t>(size, i * step);
    end = std::min<int64_t>(size, begin + step);
}

}  // namespace

// y[m,n] = a[m,k] b[k,n] + c. ta, tb: the operand is stored transposed. lda, ldb, ldy: the distance
// of lines. c: null (y = a b), a row f32[n] (c_stride 0), a matrix with rows c_stride apart, or y
// itself.
extern "C" void onward_gemm(
    const Blas* blas, int64_t ta, int64_t tb, int64_t m, int64_t n, int64_t k, const float* a,
    int64_t lda, const float* b, int64_t ldb, const float* OPTIONAL c, int64_t c_stride, float* y,
    int64_t ldy)
{
    const OneThread one(*blas);
    #pragma omp parallel
    {
        const int threads = omp_get_num_threads(), t = omp_get_thread_num();
        const int rows = rows_of_threads(threads, m, n), columns = threads / rows;
        int64_t m0, m1, n0, n1;
        part(m, t / columns, rows, m0, m1);
        part(n, t % columns, columns, n0, n1);
        if (m0 < m1 && n0 < n1) {
            float* out = y + m0 * ldy + n0;
            if (c && c != y)
                for (int64_t i = m0; i < m1; ++i)
                    std::memcpy(y + i * ldy + n0, c + i * c_stride + n0, (n1 - n0) * sizeof(float));
            blas->gemm(ta, tb, m1 - m0, n1 - n0, k, ta ? a + m0 : a + m0 * lda, lda,
                       tb ? b + n0 * ldb : b + n0, ldb, c ? 1.0f : 0.0f, out, ldy);
        }
    }
}
