// y = activation(x + bias) and its gradient, in one pass each. x: T[rows, features].
#include "annotations.h"
#include "element.h"
#include "math.h"
#include "partial.h"
#include "strided.h"

namespace {

using namespace onward;

// https://onnx.ai/onnx/operators/onnx__Gelu.html, exact: u Phi(u); slope Phi(u) + u phi(u).
struct Gelu {
    static float value(float u) { return u * math::normal(u).cdf; }
    static float grad(float dy, float u) {
        const math::Normal n = math::normal(u);
        return dy * (n.cdf + u * n.bell * 0.398942280f);
    }
};

// (1 + tanh z) / 2 = sigmoid(2 z), which does not cancel; z = sqrt(2 / pi) (u + 0.044715 u^3).
struct GeluTanh {
    static constexpr float C = 1.59576912f, A = 0.044715f;  // C = 2 sqrt(2 / pi)
    static float value(float u) { return u * math::sigmoid(C * u * (1.0f + A * (u * u))); }
    static float grad(float dy, float u) {
        u = u > 16.0f ? 16.0f : u;  // beyond, the slope is 0 or 1
        u = u < -16.0f ? -16.0f : u;
        const float square = u * u;
        const math::Logistic s = math::logistic(C * u * (1.0f + A * square));
        return dy * (s.value + u * (s.value * s.rest) * (C * (1.0f + 3.0f * A * square)));
    }
};

struct Relu {
    static float value(float u) { return u < 0.0f ? 0.0f : u; }  // NaN stays
    static float grad(float dy, float u) { return u > 0.0f ? dy : 0.0f; }
};

struct Silu {
    static float value(float u) { return u * math::sigmoid(u); }
    static float grad(float dy, float u) {
        u = u > 100.0f ? 100.0f : u;  // beyond, the slope is 0 or 1
        u = u < -100.0f ? -100.0f : u;
        const math::Logistic s = math::logistic(u);
        return dy * (s.value + u * (s.value * s.rest));
    }
};

constexpr int64_t BLOCK = 2048;  // elements a thread takes at once where there are no rows

template <class A, class E>
void plain(const E* x, E* y, int64_t n) {
    #pragma omp parallel for schedule(static)
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = start + BLOCK < n ? start + BLOCK : n;
        #pragma omp simd
        for (int64_t i = start; i < end; ++i) y[i] = A::value(x[i]);
    }
}

template <class A, class E>
void plain_grad(const E* dy, const E* x, E* dx, int64_t n) {
    #pragma omp parallel for schedule(static)
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = start + BLOCK < n ? start + BLOCK : n;
        #pragma omp simd
        for (int64_t i = start; i < end; ++i) dx[i] = A::grad(dy[i], x[i]);
    }
}

template <class A, class E>
void biased(const E* x, const E* bias, E* y, int64_t rows, int64_t features) {
    #pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
        const E* xr = x + r * features;
        E* yr = y + r * features;
        #pragma omp simd
        for (int64_t i = 0; i < features; ++i) yr[i] = A::value(xr[i] + bias[i]);
    }
}

template <class A, bool BIASED, class E>
void biased_grad(
    const E* dy, const E* x, const E* bias, E* dx, E* dbias, float* partial, int64_t rows,
    int64_t features, int64_t parts)
{
    #pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < parts; ++p) {
        float* sum = partial + p * features;
        for (int64_t i = 0; i < features; ++i) sum[i] = 0.0f;
        const int64_t end = part_start(rows, parts, p + 1);
        for (int64_t r = part_start(rows, parts, p); r < end; ++r) {
            const E* dyr = dy + r * features;
            const E* xr = x + r * features;
            E* dxr = dx + r * features;
            #pragma omp simd
            for (int64_t i = 0; i < features; ++i) {
                const float g = A::grad(dyr[i], BIASED ? xr[i] + bias[i] : xr[i]);
                dxr[i] = g;
                sum[i] += g;
            }
        }
    }
    add_parts(partial, dbias, parts, features);
}

// y = activation(gate) * up, row by row as they lie. Written twice: a stride that is not 1 would
// keep the loop from whole loads.
template <class A, class E>
void gated(Strided<const E> gate, Strided<const E> up, Strided<E> y, const int64_t* sizes)
{
    const int64_t rows = sizes[0] * sizes[1] * sizes[2], n = sizes[3];
    const bool dense = gate.col() == 1 && up.col() == 1 && y.col() == 1;
    #pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
        const RowIndex at(sizes, r);
        const E *g = at.of(gate), *u = at.of(up);
        E* out = at.of(y);
        if (dense) {
            #pragma omp simd
            for (int64_t i = 0; i < n; ++i) out[i] = A::value(g[i]) * u[i];
        } else {
            for (int64_t i = 0; i < n; ++i)
                out[i * y.col()] = A::value(g[i * gate.col()]) * u[i * up.col()];
        }
    }
}

// dgate and dup from dy, in one pass.
template <class A, class E>
void gated_grad(Strided<const E> dy, Strided<const E> gate, Strided<const E> up, Strided<E> dgate,
                Strided<E> dup, const int64_t* sizes)
{
    const int64_t rows = sizes[0] * sizes[1] * sizes[2], n = sizes[3];
    const bool dense = dy.col() == 1 && gate.col() == 1 && up.col() == 1 && dgate.col() == 1
                       && dup.col() == 1;
    #pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
        const RowIndex at(sizes, r);
        const E *d = at.of(dy), *g = at.of(gate), *u = at.of(up);
        E *dg = at.of(dgate), *du = at.of(dup);
        if (dense) {
            #pragma omp simd
            for (int64_t i = 0; i < n; ++i) {
                const float slope = A::grad(d[i] * u[i], g[i]), other = d[i] * A::value(g[i]);
                dg[i] = slope;
                du[i] = other;
            }
        } else {
            for (int64_t i = 0; i < n; ++i) {
                const float di = d[i * dy.col()], gi = g[i * gate.col()], ui = u[i * up.col()];
                dg[i * dgate.col()] = A::grad(di * ui, gi);
                du[i * dup.col()] = di * A::value(gi);
            }
        }
    }
}

// Calls `f` with the types of the elements and of the activation. kind: 0 gelu, 1 gelu by tanh,
// 2 relu, 3 silu.
template <class F>
void with_both(int64_t element, int64_t kind, F f) {
    with_element(element, [&](auto e) {
        switch (kind) {
            case 0: return f(e, Gelu());
            case 1: return f(e, GeluTanh());
            case 2: return f(e, Relu());
            case 3: return f(e, Silu());
        }
    });
}

}  // namespace

extern "C" void onward_activation(
    const T* OF(n) x, T* OF(n) y, int64_t n, int64_t kind, int64_t element_T)
{
    with_both(element_T, kind, [&](auto e, auto a) {
        using E = decltype(e);
        plain<decltype(a)>(of<E>(x), of<E>(y), n);
    });
}

extern "C" void onward_activation_grad(
    const T* OF(n) dy, const T* OF(n) x, T* OF(n) dx, int64_t n, int64_t kind, int64_t element_T)
{
    with_both(element_T, kind, [&](auto e, auto a) {
        using E = decltype(e);
        plain_grad<decltype(a)>(of<E>(dy), of<E>(x), of<E>(dx), n);
    });
}

extern "C" void onward_bias_activation(
    const T* OF(rows * features) x, const T* OF(features) bias, T* OF(rows * features) y,
    int64_t rows, int64_t features, int64_t kind, int64_t element_T)
{
    with_both(element_T, kind, [&](auto e, auto a) {
        using E = decltype(e);
        biased<decltype(a)>(of<E>(x), of<E>(bias), of<E>(y), rows, features);
    });
}

// dx = dy * slope(x + bias), dbias = the sum of dx, before it is rounded, over the rows. A null bias
// is already in x.
extern "C" void onward_bias_activation_grad(
    const T* OF(rows * features) dy, const T* OF(rows * features) x,
    const T* OPTIONAL OF(features) bias, T* OF(rows * features) dx, T* OF(features) dbias,
    float* OF(parts * features) partial, int64_t rows, int64_t features, int64_t parts,
    int64_t kind, int64_t element_T)
{
    with_both(element_T, kind, [&](auto e, auto a) {
        using E = decltype(e);
        using A = decltype(a);
        const auto run = bias ? biased_grad<A, true, E> : biased_grad<A, false, E>;
        run(of<E>(dy), of<E>(x), of<E>(bias), of<E>(dx), of<E>(dbias), partial, rows, features,
            parts);
    });
}

// Of [n0,n1,n2,features], each tensor as it lies.
extern "C" void onward_gated_activation(
    const T* gate, const int64_t* OF(4) gate_strides, const T* up, const int64_t* OF(4) up_strides,
    T* y, const int64_t* OF(4) y_strides, const int64_t* OF(4) sizes, int64_t kind,
    int64_t element_T)
{
    with_both(element_T, kind, [&](auto e, auto a) {
        using E = decltype(e);
        gated<decltype(a), E>({of<E>(gate), gate_strides}, {of<E>(up), up_strides},
                              {of<E>(y), y_strides}, sizes);
    });
}

extern "C" void onward_gated_activation_grad(
    const T* dy, const int64_t* OF(4) dy_strides, const T* gate, const int64_t* OF(4) gate_strides,
    const T* up, const int64_t* OF(4) up_strides, T* dgate, const int64_t* OF(4) dgate_strides,
    T* dup, const int64_t* OF(4) dup_strides, const int64_t* OF(4) sizes, int64_t kind,
    int64_t element_T)
{
    with_both(element_T, kind, [&](auto e, auto a) {
        using E = decltype(e);
        gated_grad<decltype(a), E>({of<E>(dy), dy_strides}, {of<E>(gate), gate_strides},
                                   {of<E>(up), up_strides}, {of<E>(dgate), dgate_strides},
                                   {of<E>(dup), dup_strides}, sizes);
    });
}

// For the tests: the functions of math.h alone. which: 0 exp, 1 sigmoid, 2 the normal's cdf.
extern "C" void onward_math(const float* OF(n) x, float* OF(n) y, int64_t n, int64_t which) {
    const auto each = [&](auto f) {
        #pragma omp simd
        for (int64_t i = 0; i < n; ++i) y[i] = f(x[i]);
    };
    if (which == 0) each([](float v) { return math::exp(v); });
    else if (which == 1) each([](float v) { return math::sigmoid(v); });
    else each([](float v) { return math::normal(v).cdf; });
}
