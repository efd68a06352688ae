// Every function that Python calls, once. `signatures.py` reads this file, and `library.py` checks
// a call by it before it is made: the arguments' names, kinds, dtypes, and how many numbers lie
// behind a pointer. The compiler checks the definitions by it.
//
// A pointer to const is read, another one is written.
#pragma once
#include <cstdint>

#include "blas.h"

#define OF(count)  // so many numbers; without it, as many as the strides beside it reach
#define OPTIONAL   // may be null

using onward::Blas;

extern "C" {

// ---- activation.cpp. kind: 0 gelu, 1 gelu by tanh, 2 relu, 3 silu

void onward_activation(const float* OF(n) x, float* OF(n) y, int64_t n, int64_t kind);

void onward_activation_grad(
    const float* OF(n) dy, const float* OF(n) x, float* OF(n) dx, int64_t n, int64_t kind);

void onward_bias_activation(
    const float* OF(rows * features) x, const float* OF(features) bias,
    float* OF(rows * features) y, int64_t rows, int64_t features, int64_t kind);

// dx = dy * slope(x + bias), dbias = the sum of dx over the rows. A null bias is already in x.
void onward_bias_activation_grad(
    const float* OF(rows * features) dy, const float* OF(rows * features) x,
    const float* OPTIONAL OF(features) bias, float* OF(rows * features) dx,
    float* OF(features) dbias, float* OF(parts * features) partial, int64_t rows, int64_t features,
    int64_t parts, int64_t kind);

// For the tests: the functions of math.h alone. which: 0 exp, 1 sigmoid, 2 the normal's cdf.
void onward_math(const float* OF(n) x, float* OF(n) y, int64_t n, int64_t which);

// ---- attention.cpp. sizes: B, H, Q, S, K, E, is_causal

// y, peaks, totals f32[B,H,Q] of the rows' scores. `allowed` and `added` are two kinds of mask, of
// which one is null, or both. `seed` null: no dropout. `q_at`, `k_at` null: no packed rows.
// scratch: f32[threads, room].
void onward_attention(
    const float* q, const int64_t* OF(4) q_strides, const float* k, const int64_t* OF(4) k_strides,
    const float* v, const int64_t* OF(4) v_strides, const uint8_t* OPTIONAL allowed,
    const float* OPTIONAL added, const int64_t* OF(4) mask_strides,
    const int64_t* OPTIONAL OF(2) seed, const int64_t* OPTIONAL OF(1) offset, int64_t site,
    int64_t threshold, int64_t sample_dim, float keep_scale, float scale,
    const int64_t* OPTIONAL OF(2 * sizes[2]) q_at, const int64_t* OPTIONAL OF(2 * sizes[3]) k_at,
    float* y, const int64_t* OF(4) y_strides, float* OF(sizes[0] * sizes[1] * sizes[2]) peaks,
    float* OF(sizes[0] * sizes[1] * sizes[2]) totals, const int64_t* OF(7) sizes,
    float* OF(threads * room) scratch, int64_t threads, int64_t room, int32_t* segments);

void onward_attention_grad(
    const float* dy, const int64_t* OF(4) dy_strides, const float* q,
    const int64_t* OF(4) q_strides, const float* k, const int64_t* OF(4) k_strides, const float* v,
    const int64_t* OF(4) v_strides, const uint8_t* OPTIONAL allowed, const float* OPTIONAL added,
    const int64_t* OF(4) mask_strides, const int64_t* OPTIONAL OF(2) seed,
    const int64_t* OPTIONAL OF(1) offset, int64_t site, int64_t threshold, int64_t sample_dim,
    float keep_scale, float scale, const int64_t* OPTIONAL OF(2 * sizes[2]) q_at,
    const int64_t* OPTIONAL OF(2 * sizes[3]) k_at, const float* y, const int64_t* OF(4) y_strides,
    const float* OF(sizes[0] * sizes[1] * sizes[2]) peaks,
    const float* OF(sizes[0] * sizes[1] * sizes[2]) totals,
    float* dq, const int64_t* OF(4) dq_strides, float* dk, const int64_t* OF(4) dk_strides,
    float* dv, const int64_t* OF(4) dv_strides, const int64_t* OF(7) sizes,
    float* OF(threads * room) scratch, int64_t threads, int64_t room, int32_t* segments);

// ---- dropout.cpp. `sizes` are the dims before the feature; random.h says what the rest is

void onward_dropout(
    const float* OF(rows * features) x, float* OF(rows * features) y, int64_t rows,
    int64_t features, const int64_t* OF(2) seed, const int64_t* OPTIONAL OF(1) offset, int64_t site,
    int64_t threshold, float scale, const int64_t* OF(rank) sizes, int64_t rank,
    int64_t sample_dim, const int64_t* OPTIONAL coordinates, int64_t width);

// ---- embedding.cpp. bad: whether a number is out of range, and which

void onward_gather_rows(
    const float* OF(rows * width) table, int64_t rows, int64_t width, const int64_t* OF(count) ids,
    int64_t count, float* OF(count * width) y, int64_t* OF(2) bad);

// y = data, then y[ids[i]] += updates[i]. data: null where it already lies in y; `uniform` where
// it is one number. An id counts from the end where negative.
void onward_add_rows(
    const float* OPTIONAL data, int64_t uniform, float* OF(rows * width) y, int64_t rows,
    int64_t width, const int64_t* OF(count) ids, const float* OF(count * width) updates,
    int64_t count, int64_t* OF(2) bad);

// ---- finite.cpp

// y: whether all numbers of `count` tensors are finite; a finite `norm` of them says so at once.
void onward_all_finite(
    const int64_t* OF(count) addresses, const int64_t* OF(count) sizes, int64_t count,
    const float* OPTIONAL OF(1) norm, uint8_t* OF(1) y);

// ---- gemm.cpp

// y[m,n] = a[m,k] b[k,n] + c; ta, tb: the operand is stored transposed; lda, ldb, ldy: the distance
// of lines; c_stride: of c's rows, 0 where it has one.
void onward_gemm(
    const Blas* blas, int64_t ta, int64_t tb, int64_t m, int64_t n, int64_t k, const float* a,
    int64_t lda, const float* b, int64_t ldb, const float* OPTIONAL c, int64_t c_stride, float* y,
    int64_t ldy);

// ---- head.cpp

// x: f32[n,d], w: f32[v,d]. `dloss` null: the gradient of the mean or the sum itself. What is null
// of loss, dx, dw, dbias is not computed. bad: the first row with a label out of range, plus 1.
void onward_head(
    const Blas* blas, const float* OF(n * d) x, const float* OF(v * d) w,
    const float* OPTIONAL OF(v) bias, const int64_t* OF(n) labels, const float* OPTIONAL OF(v) weight,
    const float* OPTIONAL OF(1) dloss, float* OPTIONAL OF(1) loss, float* OPTIONAL OF(n * d) dx,
    float* OPTIONAL OF(v * d) dw, float* OPTIONAL OF(v) dbias, int64_t n, int64_t d, int64_t v,
    int64_t ignore, int64_t mean, float smoothing, int64_t rows, int64_t chunk, int64_t chunks,
    int64_t threads, float* scratch, int64_t* OF(1) bad);

// ---- layer_norm.cpp

void onward_layer_norm(
    const float* OF(rows * features) x, const float* OF(features) scale,
    const float* OPTIONAL OF(features) bias, float* OF(rows * features) y, float* OF(rows) mean,
    float* OF(rows) invstd, int64_t rows, int64_t features, float epsilon);

// r = residual + Dropout(x), y its norm. `seed` null: no dropout.
void onward_add_layer_norm(
    const float* OF(rows * features) x, const float* OF(rows * features) residual,
    const float* OF(features) scale, const float* OPTIONAL OF(features) bias,
    float* OF(rows * features) y, float* OF(rows) mean, float* OF(rows) invstd,
    float* OF(rows * features) r, int64_t rows, int64_t features, float epsilon,
    const int64_t* OPTIONAL OF(2) seed, const int64_t* OPTIONAL OF(1) offset, int64_t site,
    int64_t threshold, float factor, const int64_t* OF(rank) sizes, int64_t rank,
    int64_t sample_dim, const int64_t* OPTIONAL coordinates, int64_t width);

// `dr` null: nothing else reads r. `dx` null: dresidual is it.
void onward_add_layer_norm_grad(
    const float* OF(rows * features) dy, const float* OPTIONAL OF(rows * features) dr,
    const float* OF(rows * features) r, const float* OF(features) scale,
    const float* OF(rows) mean, const float* OF(rows) invstd,
    float* OF(rows * features) dresidual, float* OF(features) dscale, float* OF(features) dbias,
    float* OPTIONAL OF(rows * features) dx, float* OF(tiles * 2 * features) partial, int64_t tiles,
    int64_t rows, int64_t features, const int64_t* OPTIONAL OF(2) seed,
    const int64_t* OPTIONAL OF(1) offset, int64_t site, int64_t threshold, float factor,
    const int64_t* OF(rank) sizes, int64_t rank, int64_t sample_dim,
    const int64_t* OPTIONAL coordinates, int64_t width);

// ---- reduce.cpp

void onward_sum_rows(
    const float* OF(rows * features) x, float* OF(features) y, float* OF(parts * features) partial,
    int64_t rows, int64_t features, int64_t parts);

// The 2-norm; the squares of `block` numbers are summed before their sum is kept.
void onward_norm(
    const float* OF(n) x, float* OF(1) y, double* OF((n + block - 1) / block) partial, int64_t n,
    int64_t block);

// ---- sources.cpp

// A digest of the sources: a call written for others would read and write foreign memory.
const char* onward_sources();

// ---- update.cpp

// lr to weight_decay, step and scale (null: 1) are read at each launch.
void onward_adam(
    const float* OF(n) p, const float* OF(n) g, const float* OF(n) m, const float* OF(n) v,
    float* OF(n) new_p, float* OF(n) new_m, float* OF(n) new_v, int64_t n, const double* OF(1) lr,
    const double* OF(1) first, const double* OF(1) second, const double* OF(1) epsilon,
    const double* OF(1) weight_decay, const int64_t* OF(1) step, const float* OPTIONAL OF(1) scale,
    int64_t decoupled);

}  // extern "C"
