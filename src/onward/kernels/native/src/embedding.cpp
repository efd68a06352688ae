// Rows of a table by number, and their gradient.
#include "annotations.h"

#include <cstdint>
#include <cstring>

namespace {

// True where all numbers are in range; else the flag is (1, the first that is not).
bool all_within(const int64_t* ids, int64_t count, int64_t least, int64_t rows, int64_t* flag) {
    const auto strange = [=](int64_t id) { return int64_t(id < least) | int64_t(id >= rows); };
    int64_t found = 0;
    #pragma omp simd reduction(| : found)
    for (int64_t i = 0; i < count; ++i) found |= strange(ids[i]);
    if (!found) return true;
    while (!strange(*ids)) ++ids;
    flag[0] = 1;
    flag[1] = *ids;
    return false;
}

}  // namespace

// y[count, width] = table[ids]. A negative id is out of range, as in PyTorch's embedding: -100 in
// the place of a token is a mistake, not the hundredth row from the end. Where one is out of range
// only the flag is written.
extern "C" void onward_gather_rows(
    const float* OF(rows * width) table, int64_t rows, int64_t width, const int64_t* OF(count) ids,
    int64_t count, float* OF(count * width) y, int64_t* OF(2) flag)
{
    if (!all_within(ids, count, 0, rows, flag)) return;
    #pragma omp parallel for schedule(static) if (count * width > 8192)
    for (int64_t i = 0; i < count; ++i)
        std::memcpy(y + i * width, table + ids[i] * width, size_t(width) * sizeof(float));
}

// y[rows, width] = data, then y[ids[i]] += updates[i]. data: null where it already lies in y;
// `uniform` where it is one number. An id counts from the end where negative. Each thread owns
// columns, and adds in the order of the ids. Where one is out of range only the flag is written.
extern "C" void onward_add_rows(
    const float* OPTIONAL data, int64_t uniform, float* OF(rows * width) y, int64_t rows,
    int64_t width, const int64_t* OF(count) ids, const float* OF(count * width) updates,
    int64_t count, int64_t* OF(2) flag)
{
    if (!all_within(ids, count, -rows, rows, flag)) return;
    if (data) {
        const int64_t n = rows * width;
        constexpr int64_t PIECE = 16384;
        #pragma omp parallel for schedule(static)
        for (int64_t start = 0; start < n; start += PIECE) {
            const int64_t end = start + PIECE < n ? start + PIECE : n;
            if (uniform) {
                for (int64_t i = start; i < end; ++i) y[i] = data[0];
            } else {
                std::memcpy(y + start, data + start, size_t(end - start) * sizeof(float));
            }
        }
    }
    constexpr int64_t COLUMNS = 64;
    #pragma omp parallel for schedule(static) if (count * width > 8192)
    for (int64_t start = 0; start < width; start += COLUMNS) {
        const int64_t end = start + COLUMNS < width ? start + COLUMNS : width;
        for (int64_t i = 0; i < count; ++i) {
            float* row = y + (ids[i] < 0 ? ids[i] + rows : ids[i]) * width;
            const float* added = updates + i * width;
            #pragma omp simd
            for (int64_t j = start; j < end; ++j) row[j] += added[j];
        }
    }
}
