// Elements of two bytes beside f32: loaded to f32, computed with there, and rounded when stored.
//
// Rounding is to the nearest, ties to even; numbers out of range become infinities and NaN stays
// NaN. All branch-free on 32-bit words, so that loops under `#pragma omp simd` vectorise. A float
// becomes an element by assignment alone: of a temporary gcc would keep an array, lane by lane.
#pragma once
#include <cstdint>

#include "math.h"

namespace onward {

// What Python passes for an element type that a call may choose: signatures.py knows the codes.
using T = void;  // f32, bf16 or fp16, one for all pointers to T of a call; `element_T` says which
using U = void;  // the same once more, where a call has two; `element_U`

// The upper half of an f32.
struct bf16 {
    uint16_t word;

    bf16& operator=(float x) {
        const uint32_t w = math::bits(x), nearest = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
        word = uint16_t(x != x ? 0x7fc0u : nearest);
        return *this;
    }
    operator float() const { return math::from_bits(uint32_t(word) << 16); }
};

// IEEE 754 binary16.
struct fp16 {
    uint16_t word;

    fp16& operator=(float x) {
        const uint32_t w = math::bits(x), size = w & 0x7fffffffu;
        // Exponents moved from f32's bias to fp16's; a carry of the rounding may reach infinity.
        const uint32_t normal = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
        // Beside 0.5 the last place of an f32 is fp16's smallest number: the addition rounds.
        const uint32_t small = math::bits(math::from_bits(size) + 0.5f) - math::bits(0.5f);
        const uint32_t large = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
        const uint32_t kept = size < (113u << 23) ? small : size >= (143u << 23) ? large : normal;
        word = uint16_t(kept | (w >> 16 & 0x8000u));
        return *this;
    }
    operator float() const {
        const uint32_t size = word & 0x7fffu, sign = uint32_t(word & 0x8000u) << 16;
        const uint32_t normal = (size << 13) + (112u << 23), endless = normal + (112u << 23);
        // A subnormal number is so many of 2^-24, exact in f32.
        const uint32_t small = math::bits(float(int32_t(size)) * 5.9604644775390625e-8f);
        const uint32_t found = size < 0x400u ? small : size >= 0x7c00u ? endless : normal;
        return math::from_bits(found | sign);
    }
};

// Calls `f` with an element of the type of that code.
template <class F> inline void with_element(int64_t element, const F& f) {
    switch (element) {
        case 0: return f(float());
        case 1: return f(bf16());
        case 2: return f(fp16());
    }
}

// Of two element types, of which one is float or both are the same: others do not meet.
template <class F> inline void with_elements(int64_t first, int64_t second, const F& f) {
    with_element(first, [&](auto a) {
        if (second == first) return f(a, a);
        if (second == 0) return f(a, float());
        if (first == 0) with_element(second, [&](auto b) { f(float(), b); });
    });
}

// An untyped pointer that Python gave, as one to elements.
template <class E> inline const E* of(const void* x) { return static_cast<const E*>(x); }
template <class E> inline E* of(void* x) { return static_cast<E*>(x); }

}  // namespace onward
