// The binary loss: two classes with the logits (0, z), elementwise.

#pragma once

#include "threads.h"

namespace {

struct BinaryProblem {
    const void *logits;
    void *gradient;  // null: values only
    const void *target;
    const void *pos_weight, *weight, *k;  // of each logit; null: 1, 1, and the same for all, below
    void *value, *reduced;                // one of them is null
    int64_t count, mean;
    double k_of_all;
};

template <class T>
struct BinaryJob {
    const BinaryProblem &p;
    const int parts;
    const double scale;
    int next = 0;
    double sums[MOST_THREADS] = {};
    int64_t wrong[MOST_THREADS] = {};

    INLINE doubles read_some(const void *data, int64_t i, int count, double otherwise) const {
        const T *from = static_cast<const T *>(data);
        doubles x = all(otherwise);
        if (data && count == LANES<double>) return read<double>(from + i);
        for (int l = 0; data && l < count; ++l) x[l] = from[i + l];
        return x;
    }

    // With the masses w t and 1 - t of a target, their sum W, and e = sigmoid(z) - w t / W, the rule
    // is W sign(e) |e|^k. Without the cancellation of 1 - t or of 1 - sigmoid(z), e is
    // no sigmoid(z) - yes sigmoid(-z), where yes and no are the shares of the masses.
    INLINE bool some(int64_t i, int count, double &sum) const {
        const doubles z = read_some(p.logits, i, count, 0.0), t = read_some(p.target, i, count, 0.0);
        const doubles weight = read_some(p.weight, i, count, 1.0);
        const doubles k = read_some(p.k, i, count, p.k_of_all);
        const doubles positive = t * read_some(p.pos_weight, i, count, 1.0), negative = 1.0 - t;
        const doubles all_of_it = positive + negative, size = abs(z), tail = log1p(exp(-size));
        const doubles log_yes = (z < 0.0 ? z : doubles{}) - tail;   // log sigmoid(z)
        const doubles log_no = (z > 0.0 ? -z : doubles{}) - tail;   // log sigmoid(-z)
        const doubles value = (positive == 0.0 ? doubles{} : -positive * log_yes) +
                              (negative == 0.0 ? doubles{} : -negative * log_no);
        bool right = true;
        for (int l = 0; l < count; ++l) {
            right &= k[l] >= 0x1p-100 && k[l] <= 0x1p100;
            const double v = weight[l] * value[l];
            sum += v;
            if (p.value) static_cast<T *>(p.value)[i + l] = T(v);
        }
        if (!p.gradient) return right;

        longs up = positive == 0.0;
        doubles log_bias = up ? log_yes : log_no;
        bool labels = true;
        for (int l = 0; l < count; ++l) labels &= positive[l] == 0 || negative[l] == 0;
        if (!labels) {
            const doubles yes = positive / all_of_it, no = negative / all_of_it;
            const doubles bias = no * exp(log_yes) - yes * exp(log_no);
            up = ((bias > 0.0) | (yes == 0.0)) & (no > 0.0);
            const doubles away = up ? log_yes : log_no, back = up ? log_no : log_yes;
            const doubles missing = exp(back) + (up ? yes : no);  // 1 - |e|
            const doubles soft = missing < 0.5 ? log1p(-missing) : log(abs(bias));
            log_bias = (yes == 0.0) | (no == 0.0) ? away : soft;
        }
        const doubles push = all_of_it * weight * scale * exp(k * log_bias);
        const doubles f = all_of_it == 0.0 ? doubles{} : up ? push : -push;
        for (int l = 0; l < count; ++l) static_cast<T *>(p.gradient)[i + l] = T(f[l]);
        return right;
    }

    void run_part() {
        const int part = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
        if (part >= parts) return;
        const int64_t stop = p.count * (part + 1) / parts;
        double sum = 0;
        bool right = true;
        for (int64_t i = p.count * part / parts; i < stop; i += LANES<double>) {
            const int64_t left = stop - i;
            right &= some(i, left < LANES<double> ? int(left) : LANES<double>, sum);
        }
        sums[part] = sum;
        wrong[part] = right ? RIGHT : WRONG_K;
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
