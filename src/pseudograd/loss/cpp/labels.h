// Eq. 5: values and gradients of a batch of examples with labels.

#pragma once

#include "tiles.h"

namespace {

enum class Power { ONE, HALF, TWO, ANY };  // k; the first three need one exponential per class

// With m = z_y - log sum exp(other logits), Eq. 5 is
//   f_y = -A,   f_j = A softmax(k z over the others)_j,   A = (1 - p_y)^k = exp(-k log(1 + exp m)).
template <class S, bool ROW>
INLINE int64_t labels_batch(const Problem &p, void *memory, int64_t first, int count, Power power,
                            double scale, double &value_sum) {
    using T = Working<S>;
    using V = Vector<T>;
    constexpr int N = LANES<T>, P = PARTS<T>;
    Batch<S, T, ROW> batch(p, first, count);
    const int64_t wrong = batch.prepare(scale), steps = batch.steps;
    if (wrong != RIGHT) return wrong;
    V *const tiles = static_cast<V *>(memory);
    alignas(BYTES) double own[N] = {}, others[N] = {}, powers[N] = {}, value[N];
    alignas(BYTES) T top[N] = {}, exponent[N], share[N], at_label[N], silent[N];
    for (int l = 0; l < N; ++l) exponent[l] = T(power == Power::TWO ? 1.0 : batch.k[l]);

    for (int t = 0; t < batch.tiles; ++t) {
        V *const tile = tiles + t * steps;
        batch.load_logits(tile, t);
        for (int l = batch.begin(t); l < batch.end(t); ++l) {
            T &label = at<ROW, T>(tile, batch.y[l], l);
            own[l] = label;
            label = T(-INF);
        }
        V largest = all(T(-INF));
        for (int64_t s = 0; s < steps; ++s) largest = larger(tile[s], largest);
        keep_largest<ROW>(top, t, largest);
    }
    // If there is no other class, any finite number works.
    keep(top, lanes(top) == T(-INF) ? V{} : lanes(top));

    for (int t = 0; t < batch.tiles; ++t) {
        V *const tile = tiles + t * steps;
        const V highest = lanes<ROW>(top, t), k = lanes<ROW>(exponent, t);
        // k multiplies the rounding errors, so groups of four are added up in float64.
        doubles sum[P] = {}, sum_k[P] = {};
        for (int64_t from = 0; from < steps; from += 4) {
            const int64_t to = from + 4 < steps ? from + 4 : steps;
            V some{}, some_k{};
            if (power == Power::ONE || !p.gradient) {
                for (int64_t s = from; s < to; ++s) some += tile[s] = exp(tile[s] - highest);
            } else if (power == Power::HALF) {
                for (int64_t s = from; s < to; ++s) {
                    some_k += tile[s] = exp(k * (tile[s] - highest));
                    some += tile[s] * tile[s];
                }
            } else if (power == Power::TWO) {
                for (int64_t s = from; s < to; ++s) {
                    const V e = exp(tile[s] - highest);
                    some += e;
                    some_k += tile[s] = e * e;
                }
            } else {
                for (int64_t s = from; s < to; ++s) {
                    const V d = tile[s] - highest;
                    some += exp(d);
                    some_k += tile[s] = exp(k * d);
                }
            }
            for (int i = 0; i < P; ++i) sum[i] += widened(some, i), sum_k[i] += widened(some_k, i);
        }
        keep_sum<ROW>(others, t, sum, P);
        keep_sum<ROW>(powers, t, power == Power::ONE ? sum : sum_k, P);
    }

    for (int i = 0; i < P; ++i) {
        const doubles z_y = lanes(own, i), weight = lanes(batch.weight, i), sum_k = lanes(powers, i);
        doubles margin = (z_y - widened(lanes(top), i)) - log(lanes(others, i));
        margin = z_y < double(INF) ? margin : all(NOT_A_NUMBER);
        const doubles tail = log1p(exp(margin < 0.0 ? margin : -margin));
        keep(value, weight * (margin < 0.0 ? tail - margin : tail), i);
        const doubles doubt = margin > 0.0 ? -tail - margin : -tail;  // log(1 - p_y)
        const doubles factor = lanes(batch.factor, i);
        const doubles push = factor * weight * exp(lanes(batch.k, i) * doubt);
        const doubles each = sum_k == 0.0 ? 0.0 * push : push / sum_k;  // keeps NaN
        // Examples that do not count have the gradient 0, even if their logits are NaN.
        const longs nothing = (factor == 0.0) | (weight == 0.0) | (doubt == -double(INF));
        for (int j = 0, l = i * LANES<double>; j < LANES<double>; ++j, ++l)
            share[l] = T(each[j]), at_label[l] = T(-push[j]), silent[l] = T(nothing[j]);
    }
    batch.add_values(value, value_sum);
    if (!p.gradient) return RIGHT;

    for (int t = 0; t < batch.tiles; ++t) {
        V *const tile = tiles + t * steps;
        const V times = lanes<ROW>(share, t), none = lanes<ROW>(silent, t);
        for (int64_t s = 0; s < steps; ++s) tile[s] = none == T(0) ? tile[s] * times : V{};
        for (int l = batch.begin(t); l < batch.end(t); ++l)
            at<ROW, T>(tile, batch.y[l], l) = silent[l] == 0 ? at_label[l] : T(0);
        batch.store_gradient(tile, t);
    }
    return RIGHT;
}

}  // namespace
