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

// x = n ln 2 + r with |r| <= ln 2 / 2.
struct Split {
    int32_t n;
    float r;
};

inline Split split(float x) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer
    const float shifted = x * 1.442695041f + ROUND;
    const float k = shifted - ROUND;
    const float r = x - k * 0.693145752f;  // ln 2 in two parts; the first has so few bits that k
    return {int32_t(bits(shifted) - bits(ROUND)), r - k * 1.42860677e-6f};  // times it is exact
}

// e^r for |r| <= ln 2 / 2; the polynomial's error is 3e-9.
inline float exp_near_0(float r) {
    float p = 1.3814585840838973e-3f;
    p = p * r + 8.368716735314086e-3f;
    p = p * r + 4.1668388203115886e-2f;
    p = p * r + 1.666652063306952e-1f;
    p = p * r + 4.9999993447440866e-1f;
    return 1.0f + (r + r * r * p);
}

// e^x to 1 ulp for |x| <= 87, where it is a normal number. Outside anything, NaN stays NaN.
inline float exp_within_87(float x) {
    const Split s = split(x);
    return exp_near_0(s.r) * power_of_two(s.n);
}

// e^x to 1 ulp for x <= 88; 0 below -87.3, where the result would be subnormal. NaN stays NaN.
inline float exp(float x) {
    constexpr float LOWEST = -87.3365447f;  // ln of the smallest normal number
    const float e = exp_within_87(x < LOWEST ? LOWEST : x);
    return x < LOWEST ? 0.0f : e;
}

// 1 / (1 + e^-x), relatively exact in both tails down to 1e-38, then 0.
inline float sigmoid(float x) {
    const float s = 1.0f / (1.0f + exp_within_87(x > 87.0f ? -87.0f : -x));
    return x < -87.0f ? 0.0f : s;
}

// value = sigmoid(x), rest = 1 - value without cancellation. x is held within +-87.
struct Logistic {
    float value, rest;
};

inline Logistic logistic(float x) {
    x = x > 87.0f ? 87.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float e = exp_within_87(-x), s = 1.0f / (1.0f + e);
    return {s, e * s};
}

// tanh(x) to 3e-7 in relative error: near 0 by its series, where 1 - e^-2x would cancel.
inline float tanh(float x) {
    const float t = x < 0.0f ? -x : x, square = x * x;
    float p = -8.863236e-3f;
    p = p * square + 2.1869488e-2f;
    p = p * square - 5.3968254e-2f;
    p = p * square + 1.3333333e-1f;
    p = p * square - 3.3333333e-1f;
    const float e = exp_within_87(t > 40.0f ? -80.0f : -2.0f * t), far = (1.0f - e) / (1.0f + e);
    return t < 0.35f ? x + x * square * p : x < 0.0f ? -far : far;
}

// The standard normal distribution at x: cdf = P(X <= x), and bell = e^(-x^2 / 2).
struct Normal {
    float cdf, bell;
};

// The upper tail is bell * R(t) with t = |x| and R smooth (Mills' ratio over sqrt(2 pi)), fitted as
// w times a polynomial in t w, w = 1 / (t + 3), whose constant is exact, so that the cdf is 1/2 at
// 0. Its absolute error is 7e-8 at most, where erf's rounding alone gives (1 + erf) / 2 3e-8; up to
// t = 5 its relative error is 3e-7 beside that of the bell, so x cdf(x) does not cancel.
inline Normal normal(float x) {
    float t = x < 0.0f ? -x : x;
    t = t > 20.0f ? 20.0f : t;
    const float bell = t > 13.0f ? 0.0f : exp_within_87(-0.5f * t * t);
    const float w = 1.0f / (t + 3.0f);
    const float u = t * w;
    float p = -0.0739986668f;
    p = p * u + 0.178402928f;
    p = p * u - 0.0348490404f;
    p = p * u - 0.0913443856f;
    p = p * u - 0.265572835f;
    p = p * u + 0.207716999f;
    p = p * u + 1.06900661f;
    p = p * u - 2.09047992f;
    p = p * u + 1.5f;
    const float tail = bell * (p * w);
    return {x < 0.0f ? tail : 1.0f - tail, bell};
}

}  // namespace onward::math
