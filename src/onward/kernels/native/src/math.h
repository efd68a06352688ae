// Branch-free elementary functions of f32 that vectorise inside `#pragma omp simd`.
// The standard library's are calls, one element at a time. Polynomials are minimax fits in relative
// error (Lawson's algorithm, fp64); errors are tested against fp64, in units of the last place.
#pragma once
#include <cstdint>
#include <cstring>

namespace onward::math {

inline uint32_t bits(float x) {
    uint32_t word;
    std::memcpy(&word, &x, sizeof word);
    return word;
}

inline float from_bits(uint32_t word) {
    float x;
    std::memcpy(&x, &word, sizeof x);
    return x;
}

// 2^n for -126 <= n <= 127.
inline float power_of_two(int32_t n) { return from_bits(uint32_t(n + 127) << 23); }

// e^x to 2 ulp, denormal results, 0, infinity and NaN as they should be.
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by a polynomial of error 3e-9; 2^n in two factors, so
// that results below the normal numbers come out right.
inline float exp(float x) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer
    x = x > 89.0f ? 89.0f : x;            // written so that NaN stays NaN
    x = x < -104.0f ? -104.0f : x;
    const float shifted = x * 1.442695041f + ROUND;
    const int32_t n = int32_t(bits(shifted) - bits(ROUND));
    const float k = shifted - ROUND;
    float r = x - k * 0.693145752f;  // ln 2 in two parts; the first has so few bits that k times
    r = r - k * 1.42860677e-6f;      // it is exact
    float p = 1.3814585840838973e-3f;
    p = p * r + 8.368716735314086e-3f;
    p = p * r + 4.1668388203115886e-2f;
    p = p * r + 1.666652063306952e-1f;
    p = p * r + 4.9999993447440866e-1f;
    const float e = 1.0f + (r + r * r * p);
    const int32_t half = n >> 1;
    return e * power_of_two(half) * power_of_two(n - half);
}

// 1 / (1 + e^-x), relatively exact in both tails.
inline float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

// The standard normal distribution at x: cdf = P(X <= x), and bell = e^(-x^2 / 2).
struct Normal {
    float cdf, bell;
};

// The upper tail is bell * R(t) with t = |x| and R smooth (Mills' ratio over sqrt(2 pi)), fitted as
// w times a polynomial in v = (t - K) w, w = 1 / (t + K), with relative error 2e-8 up to t = 14.5,
// where the bell vanishes. Two to three ulp in the tail, so x * cdf does not cancel as x (1 + erf)
// does.
inline Normal normal(float x) {
    constexpr float K = 2.5f;
    float t = x < 0.0f ? -x : x;
    t = t > 20.0f ? 20.0f : t;
    const float bell = exp(-0.5f * t * t);
    const float w = 1.0f / (t + K);
    const float v = (t - K) * w;
    float p = -0.000157264546f;
    p = p * v - 0.000310862893f;
    p = p * v + 0.000684342087f;
    p = p * v + 0.00252329518f;
    p = p * v - 0.00160096007f;
    p = p * v - 0.0163860209f;
    p = p * v + 0.00923591467f;
    p = p * v + 0.131986965f;
    p = p * v - 0.433692014f;
    p = p * v + 0.70665666f;
    const float tail = bell * (p * w);
    return {x < 0.0f ? tail : 1.0f - tail, bell};
}

}  // namespace onward::math
