// The counter-based generator of graph/ops/random.py: the same constants, the same bits.
#pragma once
#include <cstdint>

namespace onward {

constexpr uint32_t M1 = 0x21F0AAADu, M2 = 0x735A2D97u;
constexpr uint32_t SPREAD = 0x3C6EF373u;
constexpr uint32_t SITE_A = 0x1B873593u, SITE_B = 0x2C1B3C6Du;

inline uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * M1;
    x = (x ^ (x >> 15)) * M2;
    return x ^ (x >> 15);
}

// Two words per row: a chain over the row's logical indices, started by seed and site.
struct RowKey {
    uint32_t first, second;

    static RowKey start(const int64_t* seed, int64_t site) {
        return {mix(uint32_t(seed[0]) ^ uint32_t(site) * SITE_A),
                mix(uint32_t(seed[1]) ^ uint32_t(site) * SITE_B)};
    }
    RowKey at(uint32_t index) const { return {mix(first ^ index), mix(second ^ index)}; }

    // Of the features counted from `start`: its word(j) is word(start + j).
    RowKey behind(uint32_t start) const { return {first + start * SPREAD, second}; }

    // The word of one feature. Branch-free in 32-bit words, so that a loop over it vectorises.
    uint32_t word(uint32_t feature) const {
        uint32_t h = feature * SPREAD + first;
        h = (h ^ (h >> 16)) * M1 ^ second;
        h = (h ^ (h >> 15)) * M2;
        return h ^ (h >> 15);
    }
};

// What all elements of one Dropout share. An element is kept where its word >= threshold.
struct Mask {
    RowKey start;
    uint32_t threshold;
    float scale;  // 1 / (1 - ratio)

    Mask(const int64_t* seed, int64_t site, int64_t threshold_, float scale_)
        : start(RowKey::start(seed, site)), threshold(uint32_t(threshold_)), scale(scale_) {}
};

// Row number -> its key. `sizes[rank]` are the dims before the feature. Where `coordinates` are
// given, [sizes[0]][width], they are the logical indices that dim 0 stands for. The logical dim
// `sample_dim` is counted from `offset` (null: from 0).
struct Rows {
    const int64_t* sizes;
    int64_t rank, sample_dim;
    uint32_t offset;
    const int64_t* coordinates;
    int64_t width;

    Rows(const int64_t* sizes_, int64_t rank_, int64_t sample_dim_, const int64_t* offset_,
         const int64_t* coordinates_, int64_t width_)
        : sizes(sizes_), rank(rank_), sample_dim(sample_dim_),
          offset(offset_ ? uint32_t(*offset_) : 0u), coordinates(coordinates_), width(width_) {}

    RowKey key(const RowKey& start, int64_t row) const {
        int64_t inner = 1, logical = 0;
        for (int64_t d = 0; d < rank; ++d) inner *= sizes[d];
        RowKey k = start;
        const auto append = [&](int64_t index) {
            k = k.at(uint32_t(index) + (logical++ == sample_dim ? offset : 0u));
        };
        for (int64_t d = 0; d < rank; ++d) {
            inner /= sizes[d];
            const int64_t index = row / inner % sizes[d];
            if (d > 0 || !coordinates) append(index);
            else for (int64_t i = 0; i < width; ++i) append(coordinates[index * width + i]);
        }
        return k;
    }
};

}  // namespace onward
