// y = activation(x + bias) and its gradient, in one pass each. x: f32[rows, features].
#include "annotations.h"
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

template <class A>
void plain(const float* x, float* y, int64_t n) {
    #pragma omp parallel for schedule(static)
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = start + BLOCK < n ? start + BLOCK : n;
        #pragma omp simd
        for (int64_t i = start; i < end; ++i) y[i] = A::value(x[i]);
    }
}

template <class A>
void plain_grad(const float* dy, const float* x, float* dx, int64_t n) {
    #pragma omp parallel for schedule(static)
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = start + BLOCK < n ? start + BLOCK : n;
        #pragma omp simd
        for (int64_t i = start; i < end; ++i) dx[i] = A::grad(dy[i], x[i]);
    }
}

template <class A>
void biased(const float* x, const float* bias, float* y, int64_t rows, int64_t features) {
    #pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
        const float* xr = x + r * features;
        float* yr = y + r * features;
        #pragma omp simd
        for (int64_t i = 0; i < features; ++i) yr[i] = A::value(xr[i] + bias[i]);
    }
}

template <class A, bool BIASED>
void biased_grad(
    const float* dy, const float* x, const float* bias, float* dx, float* dbias, float* partial,
    int64_t rows, int64_t features, int64_t parts)
{
    #pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < parts; ++p) {
        float* sum = partial + p * features;
        for (int64_t i = 0; i < features; ++i) sum[i] = 0.0f;
        const int64_t end = part_start(rows, parts, p + 1);
        for (int64_t r = part_start(rows, parts, p); r < end; ++r) {
            const float* dyr = dy + r * features;
            const float* xr = x + r * features;
            float* dxr = dx + r * features;
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
template <class A>
void gated(Strided<const float> gate, Strided<const float> up, Strided<float> y,
           const int64_t* sizes)
{
    const int64_t rows = sizes[0] * sizes[1] * sizes[2], n = sizes[3];
    const bool dense = gate.col() == 1 && up.col() == 1 && y.col() == 1;
    #pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
        const RowIndex at(sizes, r);
        const float *g = at.of(gate), *u = at.of(up);
        float* out = at.of(y);
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
template <class A>
void gated_grad(Strided<const float> dy, Strided<const float> gate, Strided<const float> up,
                Strided<float> dgate, Strided<float> dup, const int64_t* sizes)
{
    const int64_t rows = sizes[0] * sizes[1] * sizes[2], n = sizes[3];
    const bool dense = dy.col() == 1 && gate.col() == 1 && up.col() == 1 && dgate.col() == 1
                       && dup.col() == 1;
    #pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
        const RowIndex at(sizes, r);
        const float *d = at.of(dy), *g = at.of(gate), *u = at.of(up);
        float *dg = at.of(dgate), *du = at.of(dup);
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

// Calls `f` with the activation's type. kind: 0 gelu, 1 gelu by tanh, 2 relu, 3 silu.
template <class F>
void with_activation(int64_t kind, F f) {
    switch (kind) {
        case 0: return f(Gelu());
        case 1: return f(GeluTanh());
        case 2: return f(Relu());
        case 3: return f(Silu());
    }
}

}  // namespace

extern "C" void onward_activation(const float* OF(n) x, float* OF(n) y, int64_t n, int64_t kind) {
    with_activation(kind, [&](auto a) { plain<decltype(a)>(x, y, n); });
}

extern "C" void onward_activation_grad(
    const float* OF(n) dy, const float* OF(n) x, float* OF(n) dx, int64_t n, int64_t kind)
{
    with_activation(kind, [&](auto a) { plain_grad<decltype(a)>(dy, x, dx, n); });
}

extern "C" void onward_bias_activation(
    const float* OF(rows * features) x, const float* OF(features) bias,
    float* OF(rows * features) y, int64_t rows, int64_t features, int64_t kind)
{
    with_activation(kind, [&](auto a) { biased<decltype(a)>(x, bias, y, rows, features); });
}

// dx = dy * slope(x + bias), dbias = the sum of dx over the rows. A null bias is already in x.
extern "C" void onward_bias_activation_grad(
    const float* OF(rows * features) dy, const float* OF(rows * features) x,
    const float* OPTIONAL OF(features) bias, float* OF(rows * features) dx,
    float* OF(features) dbias, float* OF(parts * features) partial, int64_t rows, int64_t features,
    int64_t parts, int64_t kind)
{
    with_activation(kind, [&](auto a) {
        const auto run = bias ? biased_grad<decltype(a), true> : biased_grad<decltype(a), false>;
        run(dy, x, bias, dx, dbias, partial, rows, features, parts);
    });
}

// Of [n0,n1,n2,features], each tensor as it lies.
extern "C" void onward_gated_activation(
    const float* gate, const int64_t* OF(4) gate_strides, const float* up,
    const int64_t* OF(4) up_strides, float* y, const int64_t* OF(4) y_strides,
    const int64_t* OF(4) sizes, int64_t kind)
{
    with_activation(kind, [&](auto a) {
        gated<decltype(a)>({gate, gate_strides}, {up, up_strides}, {y, y_strides}, sizes);
    });
}

extern "C" void onward_gated_activation_grad(
    const float* dy, const int64_t* OF(4) dy_strides, const float* gate,
    const int64_t* OF(4) gate_strides, const float* up, const int64_t* OF(4) up_strides,
    float* dgate, const int64_t* OF(4) dgate_strides, float* dup,
    const int64_t* OF(4) dup_strides, const int64_t* OF(4) sizes, int64_t kind)
{
    with_activation(kind, [&](auto a) {
        gated_grad<decltype(a)>({dy, dy_strides}, {gate, gate_strides}, {up, up_strides},
                                {dgate, dgate_strides}, {dup, dup_strides}, sizes);
    });
}

// For the tests: the functions of math.h alone. which: 0 exp, 1 sigmoid, 2 the normal's cdf.
extern "C" void onward_math(const float* OF(n) x, float* OF(n) y, int64_t n, int64_t which) {
    #pragma omp simd
    for (int64_t i = 0; i < n; ++i)
        y[i] = which == 0 ? math::exp(x[i])
             : which == 1 ? math::sigmoid(x[i])
                          : math::normal(x[i]).cdf;
}
