// Eq. 5: values and gradients of a batch of examples with labels.

#pragma once

#include "tiles.h"

namespace {

enum class Power { ONE, HALF, TWO, ANY };  // k; the first three need one exponential per class

// Eq. 5 is
//   f_y = -A,   f_j = A softmax(k z over the others)_j,   A = (1 - p_y)^k = exp(-k log(1 + p_y / (1 - p_y))).
template <class S, bool ROW>
INLINE int64_t labels_batch(const Problem &p, void *memory, const Place &place, int count, Power power,
                            double scale, doubles &value_sum) {
    using T = Working<S>;
    using V = Vector<T>;
    using Index = std::conditional_t<std::is_same_v<T, float>, int32_t, int64_t>;
    constexpr int P = PARTS<T>;
    Batch<S, T, ROW> batch(p, place, count);
    const int64_t wrong = batch.prepare(scale), steps = batch.steps;
    if (wrong != RIGHT) return wrong;
    V *const tiles = static_cast<V *>(memory);
    alignas(BYTES) double others[MOST] = {}, powers[MOST] = {}, value[MOST] = {};
    alignas(BYTES) T own[MOST] = {}, top[MOST] = {}, exponent[MOST], share[MOST], at_label[MOST], silent[MOST];
    alignas(BYTES) Index label[MOST];
    for (int l = 0; l < MOST; ++l)
        label[l] = Index(batch.y[l]), exponent[l] = T(power == Power::TWO ? 1.0 : batch.k[l]);

    batch.load_logits(tiles, steps);
    for (int t = 0; t < batch.tiles; ++t) {
        V *const tile = tiles + t * steps;
        V largest = all(T(-INF)), of_label = largest;
        if (ROW) {
            T &logit = at<ROW, T>(tile, batch.y[t], t);
            own[t] = logit;
            logit = T(-INF);
            for (int64_t s = 0; s < steps; ++s) largest = larger(tile[s], largest);
        } else {
            for (int64_t s = 0; s < steps; ++s) {
                const auto here = lanes(label, t) == Index(s);
                of_label = here ? tile[s] : of_label;
                tile[s] = here ? all(T(-INF)) : tile[s];
                largest = larger(tile[s], largest);
            }
            keep(own, of_label, t);
        }
        // If there is no other class, any finite number works.
        keep_largest<ROW>(top, t, largest);
    }
    for (int t = 0; t < MOST / LANES<T>; ++t) keep(top, lanes(top, t) == T(-INF) ? V{} : lanes(top, t), t);

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

    const int parts = (count + LANES<double> - 1) / LANES<double>;
    for (int i = 0; i < parts; ++i) {
        const doubles z_y = widened(lanes(own, i / P), i % P), highest = widened(lanes(top, i / P), i % P);
        const doubles weight = lanes(batch.weight, i), factor = lanes(batch.factor, i);
        const doubles sum = lanes(others, i), sum_k = lanes(powers, i);
        doubles d = z_y - highest;
        d = z_y < double(INF) ? d : all(NOT_A_NUMBER);
        d = sum == 0.0 ? d - d : d;  // no other class: 0 or NaN
        const longs ahead = d > 0.0;
        // Beyond a gap of 600, the smaller exponential does not count beside the other one.
        const doubles gap = abs(d) > 600.0 ? all(600.0) : abs(d), small = exp_or_nearly_0(-gap);
        // The exponentials of the label, the others and all, divided by the larger one of label and top.
        const doubles ours = ahead ? all(1.0) : small, theirs = ahead ? sum * small : sum;
        const doubles beyond_1 = ahead ? theirs : (sum - 1.0) + small;
        keep(value, weight * (log1p<T>(beyond_1) - (ahead ? doubles{} : d)), i);
        doubles push;  // (1 - p_y)^k
        if (power == Power::ANY) {
            push = exp(lanes(batch.k, i) * ((ahead ? gap - d : doubles{}) - log1p<T>(ours / theirs)));
        } else {
            push = theirs / (beyond_1 + 1.0);
            if (power == Power::HALF) push = sqrt(push);
            if (power == Power::TWO) push *= push;
        }
        push *= factor * weight;
        const doubles each = sum_k == 0.0 ? 0.0 * push : push / sum_k;  // keeps NaN
        // Examples that do not count have the gradient 0, even if their logits are NaN.
        const longs nothing = (factor == 0.0) | (weight == 0.0) | ((sum == 0.0) & (d == 0.0));
        keep_as(share, each, i);
        keep_as(at_label, nothing ? doubles{} : -push, i);
        keep_as(silent, nothing ? all(1.0) : doubles{}, i);
    }
    batch.add_values(value, value_sum);
    if (!p.gradient) return RIGHT;

    for (int t = 0; t < batch.tiles; ++t) {
        V *const tile = tiles + t * steps;
        const V times = lanes<ROW>(share, t), none = lanes<ROW>(silent, t);
        if (ROW) {
            for (int64_t s = 0; s < steps; ++s) tile[s] = none == T(0) ? tile[s] * times : V{};
            at<ROW, T>(tile, batch.y[t], t) = at_label[t];
        } else {
            for (int64_t s = 0; s < steps; ++s) {
                const V other = none == T(0) ? tile[s] * times : V{};
                tile[s] = lanes(label, t) == Index(s) ? lanes(at_label, t) : other;
            }
        }
    }
    batch.store_gradient(tiles, steps);
    return RIGHT;
}

}  // namespace
