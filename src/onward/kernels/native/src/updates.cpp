// One pass over memory for each optimizer besides Adam: the bodies of graph/ops/optimizers, in their
// order. Scalars are read at each launch and combined in double, as the bodies do; the gradient may
// be of another element type than the parameter and its state, which are f32.
#include "annotations.h"
#include "update.h"

#include <cmath>
#include <cstdint>
#include <vector>

using namespace onward;

namespace {

// ---- SGD

struct Sgd {
    float rate, momentum, rest, weight, factor;
    bool first, nesterov;
};

void sgd(const float* p, const float* g, float* new_p, int64_t n, const Sgd& all) {
    const float rate = all.rate, weight = all.weight, factor = all.factor;
    #pragma omp simd
    for (int64_t i = 0; i < n; ++i) new_p[i] = p[i] - rate * (g[i] * factor + weight * p[i]);
}

void sgd_moving(
    const float* p, const float* g, const float* u, float* new_p, float* new_u, int64_t n,
    const Sgd& all)
{
    const auto [rate, momentum, rest, weight, factor, first, nesterov] = all;
    #pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float grad = g[i] * factor + weight * p[i];
        const float kept = u[i] * momentum + grad * rest;
        const float ui = first ? grad : kept;
        const float ahead = grad + ui * momentum;
        new_u[i] = ui;
        new_p[i] = p[i] - rate * (nesterov ? ahead : ui);
    }
}

// ---- Lion

struct Lion {
    float rate, rest1, rest2, shrink, factor;
};

void lion(
    const float* p, const float* g, const float* m, float* new_p, float* new_m, int64_t n,
    const Lion& all)
{
    const auto [rate, rest1, rest2, shrink, factor] = all;
    #pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float away = g[i] * factor - m[i], x = m[i] + rest1 * away;
        const float sign = (x > 0.0f ? 1.0f : 0.0f) - (x < 0.0f ? 1.0f : 0.0f);
        new_m[i] = m[i] + rest2 * away;
        new_p[i] = p[i] * shrink - rate * sign;
    }
}

// ---- RMSprop

struct RmsProp {
    float rate, alpha, rest, eps, weight, momentum, factor;
};

template <bool MOVING, bool CENTERED>
void rmsprop(
    const float* p, const float* g, const float* v, const float* u, const float* a, float* new_p,
    float* new_v, float* new_u, float* new_a, int64_t n, const RmsProp& all)
{
    const auto [rate, alpha, rest, eps, weight, momentum, factor] = all;
    #pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float grad = g[i] * factor + weight * p[i];
        const float vi = v[i] * alpha + grad * grad * rest;
        float spread = vi;
        if constexpr (CENTERED) {
            const float ai = a[i] + rest * (grad - a[i]);
            spread = vi - ai * ai;
            new_a[i] = ai;
        }
        float step = grad / (std::sqrt(spread) + eps);
        if constexpr (MOVING) {
            step = u[i] * momentum + step;
            new_u[i] = step;
        }
        new_v[i] = vi;
        new_p[i] = p[i] - rate * step;
    }
}

// ---- Adagrad

struct Adagrad {
    float rate, eps, weight, factor;
};

void adagrad(
    const float* p, const float* g, const float* s, float* new_p, float* new_s, int64_t n,
    const Adagrad& all)
{
    const auto [rate, eps, weight, factor] = all;
    #pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float grad = g[i] * factor + weight * p[i], total = s[i] + grad * grad;
        new_s[i] = total;
        new_p[i] = p[i] - rate * (grad / (std::sqrt(total) + eps));
    }
}

// ---- Adamax, NAdam, RAdam, LAMB: two averages

struct Averages {
    float rest1, beta2, rest2, eps, shrink, weight, factor;
};

Averages averages(
    double rate, double first, double second, double epsilon, double decay, const float* scale,
    int64_t decoupled)
{
    const float shrink = decoupled ? float(1.0 - rate * decay) : 1.0f;
    const float weight = decoupled ? 0.0f : float(decay);
    return {float(1.0 - first), float(second), float(1.0 - second), float(epsilon), shrink, weight,
            factor_of(scale)};
}

void adamax(
    const float* p, const float* g, const float* m, const float* u, float* new_p, float* new_m,
    float* new_u, int64_t n, float size, const Averages& all)
{
    const auto [rest1, beta2, rest2, eps, shrink, weight, factor] = all;
    #pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float grad = g[i] * factor + weight * p[i];
        const float mi = m[i] + rest1 * (grad - m[i]);
        const float ui = larger(u[i] * beta2, std::fabs(grad) + eps);
        new_m[i] = mi;
        new_u[i] = ui;
        new_p[i] = p[i] - size * (mi / ui);
    }
}

void nadam(
    const float* p, const float* g, const float* m, const float* v, float* new_p, float* new_m,
    float* new_v, int64_t n, float of_g, float of_m, float left, const Averages& all)
{
    const auto [rest1, beta2, rest2, eps, shrink, weight, factor] = all;
    #pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float grad = g[i] * factor + weight * p[i];
        const float mi = m[i] + rest1 * (grad - m[i]);
        const float vi = v[i] * beta2 + grad * grad * rest2;
        new_m[i] = mi;
        new_v[i] = vi;
        new_p[i] = p[i] * shrink - (grad * of_g + mi * of_m) / (std::sqrt(vi / left) + eps);
    }
}

// adapted: the factor of 1 / (sqrt(v) + eps); below 0: none.
void radam(
    const float* p, const float* g, const float* m, const float* v, float* new_p, float* new_m,
    float* new_v, int64_t n, float size, float adapted, const Averages& all)
{
    const auto [rest1, beta2, rest2, eps, shrink, weight, factor] = all;
    const bool certain = adapted >= 0.0f;
    #pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float grad = g[i] * factor + weight * p[i];
        const float mi = m[i] + rest1 * (grad - m[i]);
        const float vi = v[i] * beta2 + grad * grad * rest2;
        const float rate = adapted / (std::sqrt(vi) + eps);
        new_m[i] = mi;
        new_v[i] = vi;
        new_p[i] = p[i] * shrink - mi * size * (certain ? rate : 1.0f);
    }
}

// The step of LAMB before its ratio; 1 / the corrections, or 1.
struct Lamb {
    float of_m, of_v, decay;
};

void lamb_moments(
    const float* g, const float* m, const float* v, float* new_m, float* new_v, int64_t n,
    const Averages& all)
{
    const float rest1 = all.rest1, beta2 = all.beta2, rest2 = all.rest2, factor = all.factor;
    #pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float grad = g[i] * factor;
        new_m[i] = m[i] + rest1 * (grad - m[i]);
        new_v[i] = v[i] * beta2 + grad * grad * rest2;
    }
}

// The squares' sums of p and of its step, from the new moments.
void lamb_squares(
    const float* p, const float* m, const float* v, int64_t n, float eps, const Lamb& all,
    double* of_p, double* of_u)
{
    const auto [of_m, of_v, decay] = all;
    float whole = 0.0f, moved = 0.0f;
    #pragma omp simd reduction(+ : whole, moved)
    for (int64_t i = 0; i < n; ++i) {
        const float u = m[i] * of_m / (std::sqrt(v[i] * of_v) + eps) + decay * p[i];
        whole += p[i] * p[i];
        moved += u * u;
    }
    *of_p = whole;
    *of_u = moved;
}

void lamb(
    const float* p, const float* m, const float* v, float* new_p, int64_t n, float rate, float eps,
    const Lamb& all)
{
    const auto [of_m, of_v, decay] = all;
    #pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float u = m[i] * of_m / (std::sqrt(v[i] * of_v) + eps) + decay * p[i];
        new_p[i] = p[i] - rate * u;
    }
}

}  // namespace

extern "C" void onward_sgd(
    const float* OF(n) p, const T* OF(n) g, const float* OPTIONAL OF(n) momentum_buffer,
    float* OF(n) new_p, float* OPTIONAL OF(n) new_momentum_buffer, int64_t n,
    const double* OF(1) lr, const double* OF(1) momentum, const double* OF(1) dampening,
    const double* OF(1) weight_decay, const int64_t* OF(1) step, const float* OPTIONAL OF(1) scale,
    int64_t nesterov, int64_t element_T)
{
    const Sgd all = {float(*lr), float(*momentum), float(1.0 - *dampening), float(*weight_decay),
                     factor_of(scale), *step == 1, nesterov != 0};
    in_blocks(g, n, element_T, [&](const float* gradient, int64_t start, int64_t some) {
        if (momentum_buffer)
            sgd_moving(p + start, gradient, momentum_buffer + start, new_p + start,
                       new_momentum_buffer + start, some, all);
        else
            sgd(p + start, gradient, new_p + start, some, all);
    });
}

extern "C" void onward_lion(
    const float* OF(n) p, const T* OF(n) g, const float* OF(n) exp_avg, float* OF(n) new_p,
    float* OF(n) new_exp_avg, int64_t n, const double* OF(1) lr, const double* OF(1) beta1,
    const double* OF(1) beta2, const double* OF(1) weight_decay, const int64_t* OF(1) step,
    const float* OPTIONAL OF(1) scale, int64_t element_T)
{
    const Lion all = {float(*lr), float(1.0 - *beta1), float(1.0 - *beta2),
                      float(1.0 - *lr * *weight_decay), factor_of(scale)};
    in_blocks(g, n, element_T, [&](const float* gradient, int64_t start, int64_t some) {
        lion(p + start, gradient, exp_avg + start, new_p + start, new_exp_avg + start, some, all);
    });
}

extern "C" void onward_rmsprop(
    const float* OF(n) p, const T* OF(n) g, const float* OF(n) square_avg,
    const float* OPTIONAL OF(n) momentum_buffer, const float* OPTIONAL OF(n) grad_avg,
    float* OF(n) new_p, float* OF(n) new_square_avg, float* OPTIONAL OF(n) new_momentum_buffer,
    float* OPTIONAL OF(n) new_grad_avg, int64_t n, const double* OF(1) lr,
    const double* OF(1) alpha, const double* OF(1) eps, const double* OF(1) weight_decay,
    const double* OF(1) momentum, const int64_t* OF(1) step, const float* OPTIONAL OF(1) scale,
    int64_t element_T)
{
    const RmsProp all = {float(*lr), float(*alpha), float(1.0 - *alpha), float(*eps),
                         float(*weight_decay), float(*momentum), factor_of(scale)};
    const auto form = momentum_buffer ? (grad_avg ? rmsprop<true, true> : rmsprop<true, false>)
                                      : (grad_avg ? rmsprop<false, true> : rmsprop<false, false>);
    in_blocks(g, n, element_T, [&](const float* gradient, int64_t start, int64_t some) {
        form(p + start, gradient, square_avg + start, at(momentum_buffer, start),
             at(grad_avg, start), new_p + start, new_square_avg + start,
             at(new_momentum_buffer, start), at(new_grad_avg, start), some, all);
    });
}

extern "C" void onward_adagrad(
    const float* OF(n) p, const T* OF(n) g, const float* OF(n) sum, float* OF(n) new_p,
    float* OF(n) new_sum, int64_t n, const double* OF(1) lr, const double* OF(1) lr_decay,
    const double* OF(1) weight_decay, const double* OF(1) eps, const int64_t* OF(1) step,
    const float* OPTIONAL OF(1) scale, int64_t element_T)
{
    const double rate = *lr / (1.0 + double(*step - 1) * *lr_decay);
    const Adagrad all = {float(rate), float(*eps), float(*weight_decay), factor_of(scale)};
    in_blocks(g, n, element_T, [&](const float* gradient, int64_t start, int64_t some) {
        adagrad(p + start, gradient, sum + start, new_p + start, new_sum + start, some, all);
    });
}

extern "C" void onward_adamax(
    const float* OF(n) p, const T* OF(n) g, const float* OF(n) exp_avg, const float* OF(n) exp_inf,
    float* OF(n) new_p, float* OF(n) new_exp_avg, float* OF(n) new_exp_inf, int64_t n,
    const double* OF(1) lr, const double* OF(1) beta1, const double* OF(1) beta2,
    const double* OF(1) eps, const double* OF(1) weight_decay, const int64_t* OF(1) step,
    const float* OPTIONAL OF(1) scale, int64_t element_T)
{
    const Averages all = averages(*lr, *beta1, *beta2, *eps, *weight_decay, scale, 0);
    const float size = float(*lr / (1.0 - std::pow(*beta1, double(*step))));
    in_blocks(g, n, element_T, [&](const float* gradient, int64_t start, int64_t some) {
        adamax(p + start, gradient, exp_avg + start, exp_inf + start, new_p + start,
               new_exp_avg + start, new_exp_inf + start, some, size, all);
    });
}

extern "C" void onward_nadam(
    const float* OF(n) p, const T* OF(n) g, const float* OF(1) mu_product,
    const float* OF(n) exp_avg, const float* OF(n) exp_avg_sq, float* OF(n) new_p,
    float* OF(1) new_mu_product, float* OF(n) new_exp_avg, float* OF(n) new_exp_avg_sq, int64_t n,
    const double* OF(1) lr, const double* OF(1) beta1, const double* OF(1) beta2,
    const double* OF(1) eps, const double* OF(1) weight_decay, const double* OF(1) momentum_decay,
    const int64_t* OF(1) step, const float* OPTIONAL OF(1) scale, int64_t decoupled,
    int64_t element_T)
{
    const Averages all = averages(*lr, *beta1, *beta2, *eps, *weight_decay, scale, decoupled);
    const double t = double(*step);
    const double now = *beta1 * (1.0 - 0.5 * std::pow(0.96, t * *momentum_decay));
    const double following = *beta1 * (1.0 - 0.5 * std::pow(0.96, (t + 1.0) * *momentum_decay));
    const float product = float(double(*mu_product) * now);
    const float of_g = float(*lr * (1.0 - now) / (1.0 - double(product)));
    const float of_m = float(*lr * following / (1.0 - double(product) * following));
    const float left = float(1.0 - std::pow(*beta2, t));
    in_blocks(g, n, element_T, [&](const float* gradient, int64_t start, int64_t some) {
        nadam(p + start, gradient, exp_avg + start, exp_avg_sq + start, new_p + start,
              new_exp_avg + start, new_exp_avg_sq + start, some, of_g, of_m, left, all);
    });
    *new_mu_product = product;
}

extern "C" void onward_radam(
    const float* OF(n) p, const T* OF(n) g, const float* OF(n) exp_avg,
    const float* OF(n) exp_avg_sq, float* OF(n) new_p, float* OF(n) new_exp_avg,
    float* OF(n) new_exp_avg_sq, int64_t n, const double* OF(1) lr, const double* OF(1) beta1,
    const double* OF(1) beta2, const double* OF(1) eps, const double* OF(1) weight_decay,
    const int64_t* OF(1) step, const float* OPTIONAL OF(1) scale, int64_t decoupled,
    int64_t element_T)
{
    const Averages all = averages(*lr, *beta1, *beta2, *eps, *weight_decay, scale, decoupled);
    const double t = double(*step), left = 1.0 - std::pow(*beta2, t);
    const double most = 2.0 / (1.0 - *beta2) - 1.0, rho = most - 2.0 * t * (1.0 - left) / left;
    const double share = (rho - 4.0) * (rho - 2.0) * most / ((most - 4.0) * (most - 2.0) * rho);
    const float adapted = rho > 5.0 ? float(std::sqrt(share * left)) : -1.0f;
    const float size = float(*lr / (1.0 - std::pow(*beta1, t)));
    in_blocks(g, n, element_T, [&](const float* gradient, int64_t start, int64_t some) {
        radam(p + start, gradient, exp_avg + start, exp_avg_sq + start, new_p + start,
              new_exp_avg + start, new_exp_avg_sq + start, some, size, adapted, all);
    });
}

// Two passes: moments and norms, then the step. Sums are by block, and so the same on any threads.
extern "C" void onward_lamb(
    const float* OF(n) p, const T* OF(n) g, const float* OF(n) exp_avg,
    const float* OF(n) exp_avg_sq, float* OF(n) new_p, float* OF(n) new_exp_avg,
    float* OF(n) new_exp_avg_sq, int64_t n, const double* OF(1) lr, const double* OF(1) beta1,
    const double* OF(1) beta2, const double* OF(1) eps, const double* OF(1) weight_decay,
    const double* OF(1) ratio_min, const double* OF(1) ratio_max, const int64_t* OF(1) step,
    const float* OPTIONAL OF(1) scale, int64_t adapt, int64_t bias_correction, int64_t element_T)
{
    const Averages all = averages(*lr, *beta1, *beta2, *eps, 0.0, scale, 0);
    const double t = double(*step);
    const double left1 = bias_correction ? 1.0 - std::pow(*beta1, t) : 1.0;
    const double left2 = bias_correction ? 1.0 - std::pow(*beta2, t) : 1.0;
    const Lamb form = {float(1.0 / left1), float(1.0 / left2), float(*weight_decay)};
    std::vector<double> squares(2 * size_t((n + BLOCK - 1) / BLOCK));
    double* sums = squares.data();
    in_blocks(g, n, element_T, [&](const float* gradient, int64_t start, int64_t some) {
        double* found = sums + 2 * (start / BLOCK);
        lamb_moments(gradient, exp_avg + start, exp_avg_sq + start, new_exp_avg + start,
                     new_exp_avg_sq + start, some, all);
        if (adapt)
            lamb_squares(p + start, new_exp_avg + start, new_exp_avg_sq + start, some, all.eps,
                         form, found, found + 1);
    });
    double whole = 0.0, moved = 0.0;
    for (size_t i = 0; i < squares.size(); i += 2) whole += squares[i], moved += squares[i + 1];
    double ratio = 1.0;
    if (adapt && whole > 0.0 && moved > 0.0) {
        ratio = std::sqrt(whole) / std::sqrt(moved);
        ratio = ratio > *ratio_min ? ratio : *ratio_min;
        ratio = ratio < *ratio_max ? ratio : *ratio_max;
    }
    const float rate = float(*lr * ratio);
    #pragma omp parallel for schedule(static) if (n > 8192)
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t some = start + BLOCK < n ? BLOCK : n - start;
        lamb(p + start, new_exp_avg + start, new_exp_avg_sq + start, new_p + start, some, rate,
             all.eps, form);
    }
}
