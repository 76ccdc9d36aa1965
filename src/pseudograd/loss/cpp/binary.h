// The binary loss: two classes with the logits (0, z), elementwise.

#pragma once

#include "threads.h"

namespace {

struct BinaryProblem {
    const void *logits;
    void *gradient;  // null: values only
    const void *target;
    const void *pos_weight, *weight, *k;  // per logit; null: 1, 1 and k_of_all
    void *value, *reduced;                // exactly one is null
    int64_t count, mean;
    double k_of_all;
};

template <class T>
struct BinaryJob {
    static constexpr int N = LANES<double>;
    static constexpr int64_t BLOCK = 512;  // logits; blocks with only labels take a faster path
    static constexpr bool ROUGH = std::is_same_v<T, float>;
    const BinaryProblem &p;
    const int parts;
    const double scale;
    int next = 0;
    double sums[MOST_THREADS] = {};
    int64_t wrong[MOST_THREADS] = {};

    // Reads `count` numbers, and fills the other lanes with `otherwise`.
    static INLINE doubles read_some(const void *data, int64_t i, int count, double otherwise) {
        const T *from = static_cast<const T *>(data);
        if (data && count == N) return read<double>(from + i);
        doubles x = all(otherwise);
        for (int l = 0; data && l < count; ++l) x[l] = from[i + l];
        return x;
    }

    static INLINE void write_some(void *data, int64_t i, int count, doubles x) {
        T *to = static_cast<T *>(data);
        if (count == N) return write<T, double>(to + i, x);
        for (int l = 0; l < count; ++l) to[i + l] = T(x[l]);
    }

    // A target has the masses w t and 1 - t. With their sum W and e = sigmoid(z) - w t / W, the rule is
    // W sign(e) |e|^k. To avoid cancellation, e is computed as no sigmoid(z) - yes sigmoid(-z), where
    // yes and no are the masses divided by W.
    template <bool LABELS>
    INLINE void some(int64_t i, int count, doubles &sum, longs &wrong_k) const {
        const doubles z = read_some(p.logits, i, count, 0.0), t = read_some(p.target, i, count, 0.0);
        const doubles weight = read_some(p.weight, i, count, 1.0);
        const doubles k = read_some(p.k, i, count, p.k_of_all);
        const doubles positive = t * read_some(p.pos_weight, i, count, 1.0), negative = 1.0 - t;
        const doubles all_of_it = p.pos_weight ? positive + negative : all(1.0), small = exp(-abs(z));
        const doubles tail = log1p<T>(small);
        const doubles log_yes = (z < 0.0 ? z : doubles{}) - tail;   // log sigmoid(z)
        const doubles log_no = (z > 0.0 ? -z : doubles{}) - tail;   // log sigmoid(-z)
        const doubles value = weight * ((positive == 0.0 ? doubles{} : -positive * log_yes) +
                                        (negative == 0.0 ? doubles{} : -negative * log_no));
        wrong_k |= ~((k >= 0x1p-100) & (k <= 0x1p100));
        if (count == N) sum += value;
        for (int l = 0; l < count && count < N; ++l) sum[l] += value[l];
        if (p.value) write_some(p.value, i, count, value);
        if (!p.gradient) return;

        longs up = positive == 0.0;
        doubles log_bias = up ? log_yes : log_no;
        if (!LABELS) {
            const doubles yes = p.pos_weight ? positive / all_of_it : positive;
            const doubles no = p.pos_weight ? negative / all_of_it : negative;
            const doubles large = 1.0 / (small + 1.0), other = small * large;
            const doubles of_yes = z < 0.0 ? other : large, of_no = z < 0.0 ? large : other;
            const doubles bias = no * of_yes - yes * of_no;
            up = ((bias > 0.0) | (yes == 0.0)) & (no > 0.0);
            // Near 1, |e| loses digits that 1 - |e| keeps.
            const doubles missing = (up ? of_no : of_yes) + (up ? yes : no);
            const longs near = missing < 0.5;
            const doubles size = near ? 1.0 - missing : abs(bias);
            const doubles rounded = near ? (1.0 - size) - missing : bias - bias;  // 0 or NaN
            const doubles logarithm = ROUGH ? rough_log(larger(size, all(0x1p-1022))) : log(size);
            const doubles soft = size == 0.0 ? all(-double(INF)) : logarithm + (ROUGH ? rounded : rounded / size);
            log_bias = (yes == 0.0) | (no == 0.0) ? (up ? log_yes : log_no) : soft;
        }
        const doubles push = all_of_it * weight * scale * exp(k * log_bias);
        write_some(p.gradient, i, count, all_of_it == 0.0 ? doubles{} : up ? push : -push);
    }

    INLINE bool are_labels(int64_t i, int64_t stop) const {
        const T *t = static_cast<const T *>(p.target), *w = static_cast<const T *>(p.pos_weight);
        int64_t others = 0;
        for (; i < stop; ++i) others += (t[i] != 0) & (t[i] != 1) & (!w || w[i] != 0);
        return !others;
    }

    void run_part() {
        const int part = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
        if (part >= parts) return;
        const int64_t stop = p.count * (part + 1) / parts;
        doubles sum{};
        longs wrong_k{};
        for (int64_t from = p.count * part / parts; from < stop; from += BLOCK) {
            const int64_t to = from + BLOCK < stop ? from + BLOCK : stop;
            const bool labels = are_labels(from, to);
            for (int64_t i = from; i < to; i += N) {
                const int count = to - i < N ? int(to - i) : N;
                labels ? some<true>(i, count, sum, wrong_k) : some<false>(i, count, sum, wrong_k);
            }
        }
        keep_sum<true>(sums, part, &sum);
        wrong[part] = RIGHT;
        for (int l = 0; l < N; ++l)
            if (wrong_k[l]) wrong[part] = WRONG_K;
    }
};

template <class T>
INLINE int64_t run_binary(const BinaryProblem &p, Parallel *parallel, int64_t threads) {
    const double divisor = p.mean ? double(p.count) : 1.0;
    if (p.gradient) prefer_huge_pages(p.gradient, p.count * sizeof(T));
    const int parts = parts_of(p.count, p.count, parallel, threads);
    BinaryJob<T> job{p, parts, divisor == 0 ? 0.0 : 1 / divisor};
    return run_parts<T>(job, parallel, divisor);
}

}  // namespace
