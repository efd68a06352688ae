// Depthwise convolutions of f32[samples, channels, size] by f32[channels, taps], stride 1, and the
// gradient of their weight: each channel has one filter of its own.
//
// A row is read once for every tap, from a near cache, and its sums stay in registers.
#include <algorithm>

#include "annotations.h"
#include "sums.h"

using namespace onward;

namespace {

constexpr int64_t WIDE = 16;
typedef float Wide __attribute__((vector_size(WIDE * 4), aligned(4), may_alias));

// Places i of a row of `places` for which i + at is in one of `size`.
inline void within(int64_t places, int64_t size, int64_t at, int64_t& first, int64_t& end) {
    first = std::min(std::max<int64_t>(0, -at), places);
    end = std::max(first, std::min(places, size - at));
}

// y[i] = bias + sum over k of w[k] x[i + k step + shift], x being 0 outside its row.
void filtered(
    const float* x, int64_t size, const float* w, int64_t taps, float bias, float* y,
    int64_t places, int64_t step, int64_t shift)
{
    const int64_t last = (taps - 1) * step;
    int64_t first, end, begin, stop;
    within(places, size, shift + std::min<int64_t>(0, last), begin, stop);
    within(places, size, shift + std::max<int64_t>(0, last), first, end);
    first = std::max(first, begin);
    end = std::max(first, std::min(end, stop));
    auto edge = [=](int64_t i) {
        float sum = bias;
        for (int64_t k = 0, at = i + shift; k < taps; ++k, at += step)
            if (at >= 0 && at < size) sum += w[k] * x[at];
        y[i] = sum;
    };
    for (int64_t i = 0; i < first; ++i) edge(i);
    int64_t i = first;
    for (; i + 4 * WIDE <= end; i += 4 * WIDE) {
        Wide a = Wide{} + bias, b = a, c = a, d = a;
        const float* p = x + i + shift;
        for (int64_t k = 0; k < taps; ++k, p += step) {
            const Wide factor = Wide{} + w[k];
            a += factor * *reinterpret_cast<const Wide*>(p);
            b += factor * *reinterpret_cast<const Wide*>(p + WIDE);
            c += factor * *reinterpret_cast<const Wide*>(p + 2 * WIDE);
            d += factor * *reinterpret_cast<const Wide*>(p + 3 * WIDE);
        }
        *reinterpret_cast<Wide*>(y + i) = a;
        *reinterpret_cast<Wide*>(y + i + WIDE) = b;
        *reinterpret_cast<Wide*>(y + i + 2 * WIDE) = c;
        *reinterpret_cast<Wide*>(y + i + 3 * WIDE) = d;
    }
    for (; i + WIDE <= end; i += WIDE) {
        Wide a = Wide{} + bias;
        const float* p = x + i + shift;
        for (int64_t k = 0; k < taps; ++k, p += step)
            a += (Wide{} + w[k]) * *reinterpret_cast<const Wide*>(p);
        *reinterpret_cast<Wide*>(y + i) = a;
    }
    for (; i < places; ++i) edge(i);
}

}  // namespace

// step: the dilation, less than 0 for a transposed one. shift: what is read first, before or behind.
extern "C" void onward_depthwise_conv(
    const float* OF(samples * channels * size) x, const float* OF(channels * taps) w,
    const float* OPTIONAL OF(channels) bias, float* OF(samples * channels * places) y,
    int64_t samples, int64_t channels, int64_t size, int64_t taps, int64_t places, int64_t step,
    int64_t shift)
{
    #pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < samples * channels; ++row) {
        const int64_t channel = row % channels;
        filtered(
            x + row * size, size, w + channel * taps, taps, bias ? bias[channel] : 0.0f,
            y + row * places, places, step, shift);
    }
}

// dw[k] = sum over samples and places i of dy[i] x[i + k step + shift], samples in their order.
extern "C" void onward_depthwise_conv_weight_grad(
    const float* OF(samples * channels * places) dy, const float* OF(samples * channels * size) x,
    float* OF(channels * taps) dw, int64_t samples, int64_t channels, int64_t size, int64_t taps,
    int64_t places, int64_t step, int64_t shift)
{
    #pragma omp parallel for schedule(static)
    for (int64_t channel = 0; channel < channels; ++channel) {
        float* out = dw + channel * taps;
        for (int64_t k = 0; k < taps; ++k) out[k] = 0.0f;
        for (int64_t n = 0; n < samples; ++n) {
            const float* dyn = dy + (n * channels + channel) * places;
            const float* xn = x + (n * channels + channel) * size;
            for (int64_t k = 0; k < taps; ++k) {
                const int64_t at = k * step + shift;
                int64_t first, end;
                within(places, size, at, first, end);
                const float *a = dyn + first, *b = xn + first + at;
                float sum, unused;
                two_sums(
                    end - first, [=](int64_t i, float& s, float&) { s += a[i] * b[i]; }, sum,
                    unused);
                out[k] += sum;
            }
        }
    }
}
