// Whether numbers are finite: an exponent of ones is an infinity or a NaN.
#include "annotations.h"

#include <cstdint>
#include <cstring>

static const uint32_t INFINITE = 0x7f800000u, SIGN = 0x80000000u;

// The largest pattern among x[n] without its sign; from INFINITE on a number is not finite.
static uint32_t largest(const float* x, int64_t n) {
    uint32_t found = 0;
    #pragma omp parallel for simd schedule(static) reduction(max : found) if (parallel : n > 32768)
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits &= ~SIGN;
        found = bits > found ? bits : found;
    }
    return found;
}

// y[0]: whether all numbers of `count` tensors are; norm (null: not known) is that of them all, and
// says so at once where it is finite.
extern "C" void onward_all_finite(
    const int64_t* OF(count) addresses, const int64_t* OF(count) sizes, int64_t count,
    const float* OPTIONAL OF(1) norm, uint8_t* OF(1) y)
{
    y[0] = 1;
    if (norm && largest(norm, 1) < INFINITE) return;
    for (int64_t k = 0; k < count && y[0]; ++k) {
        y[0] = largest(reinterpret_cast<const float*>(addresses[k]), sizes[k]) < INFINITE;
    }
}
