// Attention's segments: rows that attend to one another, the samples of a batch or the sequences of
// packed rows. And the tasks that a launch shares out.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "strided.h"

namespace onward {

// Rows of a block: of queries, of keys in the forward and in the backward. native/attention.py
// knows these numbers too.
constexpr int64_t QUERIES = 64, SEEN = 1024, KEYS = 256;

struct Sizes {
    int64_t batch, heads, queries, keys, width, values, causal;
    int64_t groups;  // heads of keys and values: each serves heads / groups of the queries'

    int64_t shared() const { return heads / groups; }
};

// Rows that attend to one another.
struct Segment {
    int64_t b;                // the sample; 0 where rows are packed
    int64_t sequence;         // as dropout counts it
    int64_t q0, queries, k0, keys;
    const int64_t* q_at;      // coordinates of the queries; null: their positions count from 0
    int64_t first;            // position of the first key
    const int32_t* places;    // positions of the keys; null: they count on from the first
    const uint8_t* visible;   // null: no key is hidden

    int64_t position(int64_t q) const { return q_at ? q_at[2 * q + 1] : q; }

    // How many keys lie at or before query q.
    int64_t reach(int64_t q) const {
        const int64_t at = position(q);
        if (!places) return std::clamp(at - first + 1, int64_t(0), keys);
        return std::upper_bound(places, places + keys, at) - places;
    }
};

// The segments of a launch, in scratch; and its tasks, in the order of the segments.
struct Table {
    enum Kind : int32_t { COUNTED, LISTED, HIDDEN };  // the keys' positions; some hidden as well
    struct Entry {
        int32_t q0, k0, k1, kind, task;  // the first of its tasks
    };

    const Sizes& n;
    const int64_t *q_at, *k_at;  // coordinates of packed rows; null: a batch
    Entry* entries;              // behind the last one two more, of no rows
    int32_t* places;
    uint8_t* visible;
    int64_t count = 0;

    Table(const Sizes& n_, const int64_t* q_at_, const int64_t* k_at_, int32_t* scratch)
        : n(n_), q_at(q_at_), k_at(k_at_), entries((Entry*)scratch),
          places((int32_t*)(entries + (q_at ? n.queries : n.batch) + 2)),
          visible((uint8_t*)(places + n.keys + 16))  // whole vectors of places are read
    {
        if (q_at) find();
        else
            for (; count < n.batch; ++count) entries[count] = {0, 0, int32_t(n.keys), COUNTED, 0};
        const int32_t queries = int32_t(n.queries), keys = int32_t(n.keys);
        entries[count] = entries[count + 1] = {queries, keys, keys, COUNTED, 0};
    }

    // Sequences ascend along the rows. A segment's keys go from its first to its last one; rows of
    // other sequences, and hidden ones (-1) before and behind, are no segment's.
    void find() {
        int64_t k = 0;
        for (int64_t q = 0; q < n.queries; ++count) {
            const int64_t sequence = q_at[2 * q];
            Entry& e = entries[count];
            e.q0 = int32_t(q);
            while (q < n.queries && q_at[2 * q] == sequence) ++q;
            while (k < n.keys && k_at[2 * k] < sequence) ++k;
            int64_t end = k;
            bool hidden = false;
            e.kind = COUNTED;
            for (int64_t j = k; j < n.keys; ++j) {
                visible[j] = k_at[2 * j] == sequence;
                if (visible[j]) {
                    places[j] = int32_t(k_at[2 * j + 1]);
                    if (hidden) e.kind = HIDDEN;
                    else if (j > k && places[j] != places[j - 1] + 1) e.kind = LISTED;
                    end = j + 1;
                } else if (k_at[2 * j] < 0) {
                    places[j] = places[j - 1];  // the row before, so that they ascend
                    hidden = true;
                } else {
                    break;
                }
            }
            e.k0 = int32_t(k);
            e.k1 = int32_t(end);
            k = end;
        }
    }

    Segment segment(int64_t i) const {
        if (!q_at) return {i, i, 0, n.queries, 0, n.keys, nullptr, 0, nullptr, nullptr};
        const Entry& e = entries[i];
        const int64_t queries = entries[i + 1].q0 - e.q0, keys = e.k1 - e.k0;
        return {0, queries ? q_at[2 * e.q0] : 0, e.q0, queries, e.k0, keys, q_at + 2 * e.q0,
                keys ? places[e.k0] : 0, e.kind == COUNTED ? nullptr : places + e.k0,
                e.kind == HIDDEN ? visible + e.k0 : nullptr};
    }

    // Plans one task for each head of a segment, or several where there are few: then blocks of
    // queries are shared out too, and each part packs keys and values anew. Returns their number.
    int64_t share(int64_t threads) {
        const auto work = [&](int64_t i) {
            const Segment s = segment(i);
            return double(s.queries) * double(s.keys);
        };
        double all = 0.0;
        for (int64_t i = 0; i < count; ++i) all += work(i);
        const double task = all * double(n.heads) / double(2 * threads);
        int64_t tasks = 0;
        for (int64_t i = 0; i < count; ++i) {
            entries[i].task = int32_t(tasks);
            const int64_t blocks = (segment(i).queries + QUERIES - 1) / QUERIES;
            const double parts = task > 0.0 ? std::ceil(work(i) / task) : 1.0;
            const bool whole = threads == 1 || parts <= 1.0;
            tasks += n.heads * (whole ? 1 : std::min(blocks, int64_t(parts)));
        }
        entries[count].task = int32_t(tasks);
        return tasks;
    }

    // The segment of a task as shared out.
    int64_t of(int64_t task) const {
        const auto later = [](int64_t t, const Entry& e) { return t < e.task; };
        return std::upper_bound(entries, entries + count, task, later) - entries - 1;
    }
};

}  // namespace onward
