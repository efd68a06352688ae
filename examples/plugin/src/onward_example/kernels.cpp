// Squared ReLU and its gradient. An output may lie where an input lies.
#include <cstdint>

extern "C" void squared_relu(const float* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const float r = x[i] < 0.0f ? 0.0f : x[i];  // NaN stays NaN
        y[i] = r * r;
    }
}

extern "C" void squared_relu_grad(const float* dy, const float* x, float* dx, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const float r = x[i] < 0.0f ? 0.0f : x[i];
        dx[i] = dy[i] * (2.0f * r);
    }
}
