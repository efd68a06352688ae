// Sums over a row of numbers that lie one after the other, and its mean and variance.
#pragma once
#include <cmath>
#include <cstdint>

namespace onward {

// A row's sums run in this many interleaved partial sums: independent, so the loop is not bound by
// the latency of an addition, and short, so rounding stays small (features / 32 terms each).
constexpr int64_t LANES = 32;

// Two sums over i < n; `term(i, a, b)` adds element i to both. The order depends on n alone.
template <class Term>
inline void two_sums(int64_t n, const Term& term, float& first, float& second) {
    float a[LANES] = {}, b[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        #pragma omp simd
        for (int64_t j = 0; j < LANES; ++j) term(i + j, a[j], b[j]);
    }
    for (int64_t j = 0; i + j < n; ++j) term(i + j, a[j], b[j]);
    for (int64_t w = LANES / 2; w > 0; w /= 2)
        for (int64_t j = 0; j < w; ++j) {
            a[j] += a[j + w];
            b[j] += b[j + w];
        }
    first = a[0];
    second = b[0];
}

// Mean and variance in two passes, the second correcting the first's rounding (Chan, Golub and
// LeVeque, "Algorithms for computing the sample variance", 1983, eq. 1.7).
inline void mean_and_invstd(const float* r, int64_t n, float epsilon, float& m, float& s) {
    float sum, unused;
    two_sums(n, [=](int64_t i, float& a, float&) { a += r[i]; }, sum, unused);
    const float count = float(n), about = sum / count;
    float rest, squares;
    two_sums(n, [=](int64_t i, float& a, float& b) {
        const float d = r[i] - about;
        a += d;
        b += d * d;
    }, rest, squares);
    m = about + rest / count;
    const float variance = std::fmax(squares - rest * (rest / count), 0.0f) / count;
    s = 1.0f / std::sqrt(variance + epsilon);
}

}  // namespace onward
