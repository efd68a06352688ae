// Tensors of four dims where they lie, of any strides.
#pragma once
#include <cstdint>

namespace onward {

// A tensor [B,H,rows,cols] in place, read or written through its strides.
template <class T> struct Strided {
    T* data;
    const int64_t* strides;

    T* at(int64_t b, int64_t h, int64_t row) const {
        return data + b * strides[0] + h * strides[1] + row * strides[2];
    }
    int64_t row() const { return strides[2]; }
    int64_t col() const { return strides[3]; }
};

// Which row of [n0,n1,n2,features] a number counts.
struct RowIndex {
    int64_t first, second, third;

    RowIndex(const int64_t* sizes, int64_t row)
        : first(row / (sizes[1] * sizes[2])), second(row / sizes[2] % sizes[1]),
          third(row % sizes[2]) {}

    template <class T> T* of(const Strided<T>& x) const { return x.at(first, second, third); }
};

}  // namespace onward
