// GroupNorm of f32[samples, channels, places] and its gradient: each of `groups` of a sample's
// channels, whose numbers lie one after the other, is normalised by itself.
//
// A group is read from memory once: all its passes run while it lies in a near cache.
#include "annotations.h"
#include "sums.h"

using namespace onward;

extern "C" void onward_group_norm(
    const float* OF(samples * channels * places) x, const float* OPTIONAL OF(channels) scale,
    const float* OPTIONAL OF(channels) bias, float* OF(samples * channels * places) y,
    float* OF(samples * groups) mean, float* OF(samples * groups) invstd, int64_t samples,
    int64_t channels, int64_t places, int64_t groups, float epsilon)
{
    const int64_t each = channels / groups;  // channels of a group
    #pragma omp parallel for schedule(static)
    for (int64_t k = 0; k < samples * groups; ++k) {
        const float* xk = x + k * each * places;
        float* yk = y + k * each * places;
        float m, s;
        mean_and_invstd(xk, each * places, epsilon, m, s);
        for (int64_t c = 0; c < each; ++c) {
            const int64_t channel = k % groups * each + c;
            const float factor = scale ? s * scale[channel] : s;
            const float addend = bias ? bias[channel] : 0.0f;
            const float* from = xk + c * places;
            float* to = yk + c * places;
            #pragma omp simd
            for (int64_t i = 0; i < places; ++i) to[i] = (from[i] - m) * factor + addend;
        }
        mean[k] = m;
        invstd[k] = s;
    }
}

// dscale and dbias are summed by samples of `partial` f32[samples, 2, channels], in their order, so
// that no number of threads changes them.
extern "C" void onward_group_norm_grad(
    const float* OF(samples * channels * places) dy, const float* OF(samples * channels * places) x,
    const float* OPTIONAL OF(channels) scale, const float* OF(samples * groups) mean,
    const float* OF(samples * groups) invstd, float* OF(samples * channels * places) dx,
    float* OF(channels) dscale, float* OF(channels) dbias,
    float* OF(samples * 2 * channels) partial, int64_t samples, int64_t channels, int64_t places,
    int64_t groups)
{
    const int64_t each = channels / groups;
    const double count = double(each * places);
    #pragma omp parallel for schedule(static)
    for (int64_t k = 0; k < samples * groups; ++k) {
        const int64_t start = k * each * places, first = k % groups * each;
        float *ds = partial + k / groups * 2 * channels + first, *db = ds + channels;
        const float m = mean[k], s = invstd[k];
        double total = 0.0, along_all = 0.0;  // of dy scale, and of it times xhat
        for (int64_t c = 0; c < each; ++c) {
            const float *dyc = dy + start + c * places, *xc = x + start + c * places;
            float along, sum;
            two_sums(places, [=](int64_t i, float& a, float& b) {
                a += dyc[i] * (xc[i] - m);
                b += dyc[i];
            }, along, sum);
            ds[c] = along * s;
            db[c] = sum;
            const float w = scale ? scale[first + c] : 1.0f;
            total += w * db[c];
            along_all += w * ds[c];
        }
        const float centre = float(total / count), slope = float(along_all / count);
        for (int64_t c = 0; c < each; ++c) {
            const float *dyc = dy + start + c * places, *xc = x + start + c * places;
            float* out = dx + start + c * places;
            const float w = scale ? scale[first + c] : 1.0f;
            #pragma omp simd
            for (int64_t i = 0; i < places; ++i)
                out[i] = s * (dyc[i] * w - centre - (xc[i] - m) * s * slope);
        }
    }
    for (int64_t c = 0; c < channels; ++c) {
        float a = 0.0f, b = 0.0f;
        for (int64_t n = 0; n < samples; ++n) {
            a += partial[2 * n * channels + c];
            b += partial[(2 * n + 1) * channels + c];
        }
        dscale[c] = a;
        dbias[c] = b;
    }
}
