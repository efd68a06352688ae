// A linear head with its cross-entropy: loss, dx, dw, dbias through blocks of rows.
//
// A block's logits lie in panels of `chunk` classes, [chunks][rows][chunk]; a thread owns panels.
//   1  panel = x w^T + bias, per row its maximum and sum of exponentials; for a
//      backward the panel keeps them: e^(logit - maximum of the panel's row)   (parallel, panels)
//   2  per row the log-sum-exp, the loss and the row's share of dloss          (parallel, rows)
//   3  panel = dlogits; dw += panel^T x; own dx += panel w; dbias += panel     (parallel, panels)
//   4  dx = sum of the threads' own                                            (parallel, rows)
#include "annotations.h"
#include "blas.h"
#include "math.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <omp.h>

using namespace onward;

namespace {

struct Loss {
    const int64_t* labels;
    const float* weight;  // of classes, or null
    int64_t classes, ignore;
    float smoothing;
    double total_weight;  // of all classes

    bool counts(int64_t row) const { return labels[row] != ignore; }
    float of(int64_t c) const { return weight ? weight[c] : 1.0f; }
};

}  // namespace

// What is null of loss, dx, dw, dbias is not computed (dx and dw together); `dloss` is null where
// no gradient is.
// scratch f32: panels chunks*rows*chunk, statistics 3*chunks*rows, rows 4*rows, dx threads*rows*d
// flag: where a label is out of range (its row from 1, the label), and nothing else is written
extern "C" void onward_head(
    const Blas* blas, const float* OF(n * d) x, const float* OF(v * d) w,
    const float* OPTIONAL OF(v) bias, const int64_t* OF(n) labels,
    const float* OPTIONAL OF(v) weight, const float* OPTIONAL OF(1) dloss,
    float* OPTIONAL OF(1) loss, float* OPTIONAL OF(n * d) dx, float* OPTIONAL OF(v * d) dw,
    float* OPTIONAL OF(v) dbias, int64_t n, int64_t d, int64_t v, int64_t ignore, int64_t mean,
    float smoothing, int64_t rows, int64_t chunk, int64_t chunks, int64_t threads, float* scratch,
    int64_t* OF(2) flag)
{
    Loss l{labels, weight, v, ignore, smoothing, double(v)};
    double divisor = 0.0;
    for (int64_t i = 0; i < n; ++i) {
        if (!l.counts(i)) continue;
        if (labels[i] < 0 || labels[i] >= v) {
            flag[0] = i + 1;
            flag[1] = labels[i];
            return;
        }
        divisor += l.of(labels[i]);
    }
    if (weight) {
        l.total_weight = 0.0;
        for (int64_t c = 0; c < v; ++c) l.total_weight += weight[c];
    }
    if (!mean) divisor = 1.0;
    const bool backward = dw != nullptr;  // dx has no address where it has no rows
    const float unit = backward ? float(double(*dloss) / divisor) : 0.0f;
    const float even = smoothing / float(v);  // what smoothing gives to every class

    if (backward && n == 0) {  // no block of rows will write them
        std::memset(dw, 0, v * d * sizeof(float));
        if (dbias) std::memset(dbias, 0, v * sizeof(float));
    }
    float* panels = scratch;
    float* stats = panels + chunks * rows * chunk;  // [chunks][rows][maximum, sum, dot]
    float* peak = stats + 3 * chunks * rows;  // of the row's logits
    float* hit = peak + rows;       // the label's logit
    float* row_loss = hit + rows;
    float* factor = row_loss + rows;  // of e^(logit - peak) in dlogits; 0 where the row is ignored
    float* own = factor + rows;     // [threads][rows][d]
    double sum = 0.0;

    const OneThread one(*blas);
    #pragma omp parallel num_threads(int(threads))
    {
        const int t = omp_get_thread_num(), team = omp_get_num_threads();
        for (int64_t r0 = 0; r0 < n; r0 += rows) {
            const int64_t r = std::min(rows, n - r0);
            const float* xb = x + r0 * d;
            #pragma omp for schedule(static)
            for (int64_t p = 0; p < chunks; ++p) {
                const int64_t c0 = p * chunk, width = std::min(chunk, v - c0);
                if (width <= 0) continue;
                float* panel = panels + p * rows * chunk;
                blas->gemm(false, true, r, width, d, xb, d, w + c0 * d, d, 0.0f, panel, chunk);
                for (int64_t i = 0; i < r; ++i) {
                    float* row = panel + i * chunk;
                    float top = -INFINITY, total = 0.0f, dot = 0.0f;
                    const float* b = bias ? bias + c0 : nullptr;
                    if (b) {
                        #pragma omp simd reduction(max : top)
                        for (int64_t c = 0; c < width; ++c) {
                            row[c] += b[c];
                            top = row[c] > top ? row[c] : top;
                        }
                    } else {
                        #pragma omp simd reduction(max : top)
                        for (int64_t c = 0; c < width; ++c) top = row[c] > top ? row[c] : top;
                    }
                    if (smoothing != 0.0f && weight) {
                        const float* cw = weight + c0;
                        #pragma omp simd reduction(+ : dot)
                        for (int64_t c = 0; c < width; ++c) dot += row[c] * cw[c];
                    } else if (smoothing != 0.0f) {
                        #pragma omp simd reduction(+ : dot)
                        for (int64_t c = 0; c < width; ++c) dot += row[c];
                    }
                    const int64_t y = labels[r0 + i] - c0;
                    if (y >= 0 && y < width) hit[i] = row[y];
                    const float shift = top == -INFINITY ? 0.0f : top;
                    if (backward) {  // the exponentials stay for step 3
                        #pragma omp simd reduction(+ : total)
                        for (int64_t c = 0; c < width; ++c) {
                            const float e = math::exp(row[c] - shift);
                            row[c] = e;
                            total += e;
                        }
                    } else {
                        #pragma omp simd reduction(+ : total)
                        for (int64_t c = 0; c < width; ++c) total += math::exp(row[c] - shift);
                    }
                    float* s = stats + (p * rows + i) * 3;
                    s[0] = shift;
                    s[1] = total;
                    s[2] = dot;
                }
            }
            #pragma omp for schedule(static)
            for (int64_t i = 0; i < r; ++i) {
                float top = -INFINITY;
                double total = 0.0, dot = 0.0;
                for (int64_t p = 0; p < chunks && p * chunk < v; ++p) {
                    const float* s = stats + (p * rows + i) * 3;
                    // a sum of 0: each logit is -infinity, and s[0] is not their maximum
                    if (s[1] != 0.0f) top = std::max(top, s[0]);
                    dot += s[2];
                }
                for (int64_t p = 0; p < chunks && p * chunk < v; ++p) {
                    const float* s = stats + (p * rows + i) * 3;
                    if (s[1] != 0.0f) total += double(s[1]) * std::exp(double(s[0]) - double(top));
                }
                const double log_sum = double(top) + std::log(total);
                const bool counts = l.counts(r0 + i);
                const double wy = counts ? l.of(labels[r0 + i]) : 0.0;
                peak[i] = top;
                factor[i] = counts ? float(unit * ((1.0 - smoothing) * wy +
                                                   even * l.total_weight) / total)
                                   : 0.0f;
                row_loss[i] = counts ? float((1.0 - smoothing) * wy * (log_sum - hit[i]) +
                                             even * (l.total_weight * log_sum - dot))
                                     : 0.0f;
            }
            #pragma omp single nowait
            for (int64_t i = 0; i < r; ++i) sum += row_loss[i];
            if (!backward) {
                #pragma omp barrier
                continue;
            }
            float* mine = team == 1 ? dx + r0 * d : own + t * rows * d;
            bool begun = false;
            #pragma omp for schedule(static)
            for (int64_t p = 0; p < chunks; ++p) {
                const int64_t c0 = p * chunk, width = std::min(chunk, v - c0);
                if (width <= 0) continue;
                float* panel = panels + p * rows * chunk;
                if (dbias && r0 == 0) std::memset(dbias + c0, 0, width * sizeof(float));
                for (int64_t i = 0; i < r; ++i) {
                    float* row = panel + i * chunk;
                    if (!l.counts(r0 + i)) {
                        std::memset(row, 0, width * sizeof(float));
                        continue;
                    }
                    const float* s = stats + (p * rows + i) * 3;
                    const float rest = s[1] == 0.0f ? 0.0f : math::exp(s[0] - peak[i]);
                    const float a = factor[i] * rest;
                    const float b = even == 0.0f ? 0.0f : even * unit;  // of an infinite one too
                    if (b != 0.0f && weight) {
                        const float* cw = weight + c0;
                        #pragma omp simd
                        for (int64_t c = 0; c < width; ++c) row[c] = row[c] * a - b * cw[c];
                    } else {
                        #pragma omp simd
                        for (int64_t c = 0; c < width; ++c) row[c] = row[c] * a - b;
                    }
                    const int64_t y = labels[r0 + i] - c0;
                    if (y >= 0 && y < width)
                        row[y] -= unit * (1.0f - smoothing) * l.of(labels[r0 + i]);
                    if (dbias) {
                        float* db = dbias + c0;
                        #pragma omp simd
                        for (int64_t c = 0; c < width; ++c) db[c] += row[c];
                    }
                }
                blas->gemm(true, false, width, d, r, panel, chunk, xb, d, r0 ? 1.0f : 0.0f,
                           dw + c0 * d, d);
                blas->gemm(false, false, r, d, width, panel, chunk, w + c0 * d, d,
                           begun ? 1.0f : 0.0f, mine, d);
                begun = true;
            }
            if (team == 1) continue;
            if (!begun) std::memset(mine, 0, r * d * sizeof(float));
            #pragma omp barrier
            #pragma omp for schedule(static)
            for (int64_t i = 0; i < r; ++i) {
                float* out = dx + (r0 + i) * d;
                std::memcpy(out, own + i * d, d * sizeof(float));
                for (int other = 1; other < team; ++other) {
                    const float* part = own + (other * rows + i) * d;
                    #pragma omp simd
                    for (int64_t j = 0; j < d; ++j) out[j] += part[j];
                }
            }
        }
    }
    if (loss) *loss = float(sum / divisor);
}
