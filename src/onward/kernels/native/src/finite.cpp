// Whether numbers are finite: an exponent of ones is an infinity or a NaN.
#include "annotations.h"
#include "element.h"

#include <cstdint>
#include <cstring>

using namespace onward;

namespace {

// The words of an element type, and that of infinity: from there on a number is not finite.
template <class E> struct Format;
template <> struct Format<float> {
    using Word = uint32_t;
    static constexpr Word INFINITE = 0x7f800000u;
};
template <> struct Format<bf16> {
    using Word = uint16_t;
    static constexpr Word INFINITE = 0x7f80u;
};
template <> struct Format<fp16> {
    using Word = uint16_t;
    static constexpr Word INFINITE = 0x7c00u;
};

// By the largest pattern among x[n] without its sign.
template <class E> bool finite(const E* x, int64_t n) {
    using Word = typename Format<E>::Word;
    constexpr Word SIZE = Word(~Word(0)) >> 1;
    Word found = 0;
    #pragma omp parallel for simd schedule(static) reduction(max : found) if (parallel : n > 32768)
    for (int64_t i = 0; i < n; ++i) {
        Word bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits &= SIZE;
        found = bits > found ? bits : found;
    }
    return found < Format<E>::INFINITE;
}

}  // namespace

// y[0]: whether all numbers of `count` tensors are; norm (null: not known) is that of them all, and
// says so at once where it is finite. `elements`: their types, by the codes of element.h.
extern "C" void onward_all_finite(
    const int64_t* OF(count) addresses, const int64_t* OF(count) elements,
    const int64_t* OF(count) sizes, int64_t count, const T* OPTIONAL OF(1) norm, uint8_t* OF(1) y,
    int64_t element_T)
{
    const auto holds = [](int64_t element, const void* x, int64_t n) {
        bool all = true;
        with_element(element, [&](auto e) { all = finite(of<decltype(e)>(x), n); });
        return all;
    };
    y[0] = 1;
    if (norm && holds(element_T, norm, 1)) return;
    for (int64_t k = 0; k < count && y[0]; ++k)
        y[0] = holds(elements[k], reinterpret_cast<const void*>(addresses[k]), sizes[k]);
}
