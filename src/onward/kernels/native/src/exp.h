// exp in single precision, branch-free, so that a loop over it vectorises. Within 1 ulp of the
// truth for results that are normal numbers; 0 below; NaN stays NaN.
#pragma once
#include <cstdint>
#include <cstring>

namespace onward {

inline float fast_exp(float x)
{
    const float low = -87.336544f, high = 88.722835f;
    const float clamped = x < low ? low : (x > high ? high : x);
    // x = n ln 2 + r, |r| <= ln 2 / 2; adding 1.5 * 2^23 rounds to the nearest integer
    const float magic = 12582912.0f;
    const float shifted = clamped * 1.44269504f + magic;
    const float n = shifted - magic;
    float r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    // minimax polynomial of e^r (Cephes)
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    // 2^n in two factors, because 2^128 is no float: n lies in the low bits of `shifted`
    const int32_t k = bits - 0x4B400000, half = k >> 1;
    const int32_t one = (half + 127) << 23, two = (k - half + 127) << 23;
    float a, b;
    std::memcpy(&a, &one, 4);
    std::memcpy(&b, &two, 4);
    const float y = p * a * b;
    return x < low ? 0.0f : (x > high ? y * 1e38f : y);  // above: overflow to infinity
}

}  // namespace onward
