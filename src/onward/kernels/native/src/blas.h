// A single-precision matrix product of another library, called with one thread from each of ours.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>

namespace onward {

// As kernels/blas/engines.py lays it out: the routine, how it is called, and its thread setting.
struct Blas {
    int64_t sgemm;        // address
    int64_t convention;   // 0: cblas with 64-bit integers, 1: Fortran with 32-bit integers
    int64_t set_threads;  // address of void(int), 0 where it follows the caller's region
    int64_t get_threads;  // address of int()

    // c[m,n] = a[m,k] b[k,n] + beta c, row-major; ta, tb: the operand is stored transposed.
    void gemm(bool ta, bool tb, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda,
              const float* b, int64_t ldb, float beta, float* c, int64_t ldc) const
    {
        if (m <= 0 || n <= 0) return;
        if (convention == 0) {
            using F = void (*)(int, int, int, int64_t, int64_t, int64_t, float, const float*,
                               int64_t, const float*, int64_t, float, float*, int64_t);
            reinterpret_cast<F>(sgemm)(101, ta ? 112 : 111, tb ? 112 : 111, m, n, k, 1.0f, a, lda,
                                       b, ldb, beta, c, ldc);
        } else {
            // column-major: c^T = b^T a^T, and a row-major matrix is its own transpose's columns
            using F = void (*)(const char*, const char*, const int*, const int*, const int*,
                               const float*, const float*, const int*, const float*, const int*,
                               const float*, float*, const int*);
            const int m_ = int(m), n_ = int(n), k_ = int(k), a_ = int(lda), b_ = int(ldb),
                      c_ = int(ldc);
            const float one = 1.0f;
            reinterpret_cast<F>(sgemm)(tb ? "T" : "N", ta ? "T" : "N", &n_, &m_, &k_, &one, b, &b_,
                                       a, &a_, &beta, c, &c_);
        }
    }
};

// For the time of a launch the library runs each call on the thread that makes it. Two pools that
// wait actively on the same cores would cost more than the products (docs/notes/0005). The setting
// is the whole process's, and launches of several threads overlap: the first one in sets it, the
// last one out sets it back.
class OneThread {
    struct Setting {
        int launches = 0, before = 1;
    };
    inline static std::mutex lock;
    inline static std::map<int64_t, Setting> settings;  // by the library's set_threads

    const Blas& blas;

public:
    explicit OneThread(const Blas& b) : blas(b)
    {
        if (!blas.set_threads) return;
        const std::lock_guard<std::mutex> held(lock);
        Setting& setting = settings[blas.set_threads];
        if (setting.launches++) return;
        setting.before = reinterpret_cast<int (*)()>(blas.get_threads)();
        if (setting.before != 1) reinterpret_cast<void (*)(int)>(blas.set_threads)(1);
    }
    ~OneThread()
    {
        if (!blas.set_threads) return;
        const std::lock_guard<std::mutex> held(lock);
        Setting& setting = settings[blas.set_threads];
        if (--setting.launches || setting.before == 1) return;
        reinterpret_cast<void (*)(int)>(blas.set_threads)(setting.before);
    }
    OneThread(const OneThread&) = delete;
    OneThread& operator=(const OneThread&) = delete;
};

}  // namespace onward
