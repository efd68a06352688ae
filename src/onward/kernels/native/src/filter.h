// Attention's masks, biases, soft caps and dropout, a row of scores at a time; and which keys of a
// block of keys a block of queries sees.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "element.h"
#include "math.h"
#include "random.h"
#include "segments.h"
#include "tile.h"

namespace onward {

constexpr float HIDDEN = -1e30f;  // scores are far above, and what hides them is far below

// What is added to the scores, restricts and thins them: at most one of the masks is given. E: of
// the elements of what is added.
template <class E> struct Filter {
    Strided<const uint8_t> allowed;
    Strided<const E> added;
    Strided<const E> bias;  // by positions, its rows one number after the other; hides no key
    const int64_t *seed, *offset;
    int64_t site, threshold, sample_dim;
    float scale;  // 1 / (1 - ratio); 1 without dropout
    float softcap;  // 0: scores stay
    int64_t first_head;   // the number of head 0 in the model, by which dropout draws
    // What `allowed` puts in the place of hidden scores; null: it hides them. Behind it 1 where that
    // number is added, so that hidden scores have a gradient.
    const float* filled;

    bool drops() const { return seed != nullptr; }
    bool adds() const { return added.data || bias.data; }

    // A hidden score, if no number fills it. What is added may itself be the lowest number, above
    // which a hidden score must not be.
    float hidden() const { return adds() ? -INFINITY : -FLT_MAX; }

    // Words of key j where positions are counted: word(j), of those that are listed: word(place).
    RowKey key(const Segment& g, int64_t h, int64_t q, int64_t k) const {
        const uint32_t start = offset ? uint32_t(*offset) : 0u;
        const RowKey row = RowKey::start(seed, site)
            .at(uint32_t(g.sequence) + (sample_dim == 0 ? start : 0u))
            .at(uint32_t(h + first_head) + (sample_dim == 1 ? start : 0u))
            .at(uint32_t(g.position(q)) + (sample_dim == 2 ? start : 0u));
        return g.places ? row : row.behind(uint32_t(g.first + k));
    }

    // s := softcap tanh(s / softcap); `slope`: of it, unless null.
    void cap(int64_t n, float* s, float* slope) const {
        if (softcap == 0.0f) return;
        const float inverse = 1.0f / softcap;
        #pragma omp simd
        for (int64_t j = 0; j < n; ++j) s[j] = math::tanh(s[j] * inverse);
        for (int64_t j = 0; slope && j < n; ++j) slope[j] = 1.0f - s[j] * s[j];
        for (int64_t j = 0; j < n; ++j) s[j] *= softcap;
    }

    // t, the gradient of scores under `mask`, becomes that of those before `cap`; on the way it is
    // added to that of the bias.
    void undo(const Segment& g, int64_t h, int64_t q, int64_t k, int64_t n, float peak,
              const float* slope, float* t, const Strided<float>& dbias) const
    {
        // where the peak is higher, hidden keys have no weight at all
        if (filled && filled[1] == 0.0f && peak - *filled <= 90.0f) {
            const uint8_t* m = allowed.at(g.b, h, q) + k * allowed.col();
            for (int64_t j = 0; j < n; ++j) t[j] = m[j * allowed.col()] ? t[j] : 0.0f;
        }
        if (dbias.data) {
            float* d = dbias.at(g.b, h, g.position(q));
            if (g.places)
                for (int64_t j = 0; j < n; ++j) d[g.places[k + j]] += t[j];
            else
                for (int64_t j = 0; j < n; ++j) d[g.first + k + j] += t[j];
        }
        if (softcap != 0.0f)
            for (int64_t j = 0; j < n; ++j) t[j] *= slope[j];
    }

    // Scores s[n] of query q against keys k, k+1, ... with what is added to them, and masked.
    void mask(const Segment& g, int64_t h, int64_t q, int64_t k, int64_t n, float* s) const {
        if (bias.data) {
            const E* m = bias.at(g.b, h, g.position(q));
            if (g.places)
                for (int64_t j = 0; j < n; ++j) s[j] += m[g.places[k + j]];
            else
                for (int64_t j = 0; j < n; ++j) s[j] += m[g.first + k + j];
        }
        if (allowed.data || g.visible) {
            const int64_t step = g.visible ? 1 : allowed.col();
            const float none = filled ? *filled : hidden();
            const uint8_t* m = (g.visible ? g.visible : allowed.at(g.b, h, q)) + k * step;
            if (step == 1)
                for (int64_t j = 0; j < n; ++j) s[j] = m[j] ? s[j] : none;
            else
                for (int64_t j = 0; j < n; ++j) s[j] = m[j * step] ? s[j] : none;
        } else if (added.data) {
            const int64_t step = added.col();
            const E* m = added.at(g.b, h, q) + k * step;
            if (step == 1)
                for (int64_t j = 0; j < n; ++j) s[j] += m[j];
            else
                for (int64_t j = 0; j < n; ++j) s[j] += m[j * step];
        }
    }

    // Whether keys that a mask hides can be told to have no weight, without their scores.
    bool scans(const Segment& g) const {
        if (g.visible || (filled && *filled > HIDDEN)) return false;
        return (allowed.data && allowed.col() == 1) || (added.data && added.col() == 1);
    }

    // Query q's keys k + low, ..., k + high - 1 of a block hold all that have weight. Before, `high`
    // is the block's keys. They stay where that is not known: a row of which all is hidden sees all
    // keys alike, or by what is added. `peak`: the row's highest score; null: not known yet.
    void shown(const Segment& g, int64_t h, int64_t q, int64_t k, const float* peak, int64_t& low,
               int64_t& high) const
    {
        int64_t a = 0, b = high;
        if (allowed.data) {
            const uint8_t* m = allowed.at(g.b, h, q) + k;
            const auto none = [&](int64_t j) {
                uint64_t eight;
                std::memcpy(&eight, m + j, 8);
                return eight == 0;
            };
            while (b - a >= 8 && none(a)) a += 8;
            while (a < b && !m[a]) ++a;
            while (b - a >= 8 && none(b - 8)) b -= 8;
            while (a < b && !m[b - 1]) --b;
        } else {
            const E* m = added.at(g.b, h, q) + k;
            while (a < b && m[a] <= HIDDEN) ++a;
            while (a < b && m[b - 1] <= HIDDEN) --b;
        }
        const bool hides = allowed.data && !filled;  // whatever else the row sees
        const bool seen = a < b && !bias.data;  // a bias may hide what a mask shows
        const bool sees = peak ? *peak > HIDDEN : seen && (added.data || high == g.keys);
        if (hides || sees) {
            low = a;
            high = b;
        }
    }

    // Whether a row with this highest score has nothing to attend to. A packed row that sees any
    // key sees its segment's first one, which is never hidden.
    // What is added hides a whole row where it is -infinity throughout.
    bool nothing(float peak) const {
        return ((allowed.data && !filled) || adds()) && peak == hidden();
    }
};

// Which of a block's keys its queries may see: those from `first` on, row i the first count[i], of
// which no row has more than `cols`, nor row i more than i + 1 + diagonal. `peaks`: of the rows,
// where they are known.
struct Below {
    int64_t first = 0, count[QUERIES], cols = 0, diagonal = UNBOUNDED;

    template <class E>
    Below(const Segment& g, const Filter<E>& filter, bool causal, int64_t h, int64_t q0, int64_t m,
          int64_t k0, int64_t keys, const float* peaks)
    {
        if (!causal && !filter.scans(g)) {
            for (int64_t i = 0; i < m; ++i) count[i] = keys;
            cols = keys;
            return;
        }
        diagonal = -UNBOUNDED;
        first = keys;
        for (int64_t i = 0; i < m; ++i) {
            int64_t low = 0, high = keys;
            if (filter.scans(g))
                filter.shown(g, h, q0 + i, k0, peaks ? peaks + i : nullptr, low, high);
            if (causal) high = std::clamp(g.reach(q0 + i) - k0, int64_t(0), high);
            count[i] = low < high ? high : 0;
            if (low >= high) continue;
            first = std::min(first, low);
            cols = std::max(cols, high);
            diagonal = std::max(diagonal, high - 1 - i);
        }
        first = cols > 0 ? first / COLS * COLS : 0;
        for (int64_t i = 0; i < m; ++i) count[i] = std::max(count[i] - first, int64_t(0));
        cols -= first;
        diagonal -= first;
    }
};

}  // namespace onward
