// exp for softmax: branch-free, so that a loop over it vectorises.
#pragma once
#include <cstdint>
#include <cstring>

namespace onward {

// e^x for x <= 88, within 2 ulp; 0 below -87.3, where the result would be subnormal; NaN stays NaN.
// x = n ln2 + r, |r| <= ln2 / 2, and the polynomial of Cephes' expf (netlib.org/cephes) for e^r.
inline float exp_f32(float x) {
    constexpr float LOWEST = -87.3365447f;          // ln of the smallest normal number
    constexpr float ROUND = 12582912.0f;            // 1.5 * 2^23: adding it rounds to an integer
    constexpr float LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
    const float c = x < LOWEST ? LOWEST : x;
    const float shifted = c * 1.44269504f + ROUND;  // n in its low bits
    const float n = shifted - ROUND;
    const float r = (c - n * LN2_HIGH) - n * LN2_LOW;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, 4);
    bits = (bits + 127u) << 23;                     // 2^n; what ROUND put above is shifted out
    float power;
    std::memcpy(&power, &bits, 4);
    return x < LOWEST ? 0.0f : p * power;
}

}  // namespace onward
