// The rule for soft targets: values and gradients of a batch of examples.

#pragma once

#include "labels.h"

namespace {

template <Power POWER>
using Constant = std::integral_constant<Power, POWER>;

// Returns sign(e) |e|^k, and adds |e|^k to the sum of its side.
INLINE doubles powered(doubles e, Power power, doubles &positive, doubles &negative) {
    if (power == Power::HALF) e = with_sign_of(e, sqrt(abs(e)));
    if (power == Power::TWO) e *= abs(e);
    positive += larger(e, doubles{});
    negative += larger(-e, doubles{});
    return e;
}

// log x for x >= 0, as precise as results in T need.
template <class T>
INLINE doubles log_of(doubles x) {
    const doubles normal = larger(x, all(0x1p-1022));
    const doubles y = std::is_same_v<T, double> ? log(normal) : rough_log(normal);
    return x > 0.0 ? y : all(-double(INF));
}

// Returns where the row of an example begins, to prefetch it: while a batch is computed, the processor
// fetches no rows by itself. The address is only a hint, and may lie outside of the array.
INLINE const char *row_of(const void *of, int64_t example, const Strides &strides, size_t size) {
    return static_cast<const char *>(of) + example * strides.position * int64_t(size);
}

// With e = p - t / W, for a target t with the sum W, the rule is
//   f_j = W sign(e_j) S^k |e_j|^k / sum of |e_i|^k with the same sign,   S = sum of e_j > 0.
// Where p and t / W agree, their difference cancels, so everything is computed in float64.
template <class S, bool ROW>
INLINE int64_t soft_batch(const Problem &p, void *memory, int64_t first, int count, Power power,
                          double scale, double &value_sum) {
    constexpr int N = LANES<double>;
    Batch<S, double, ROW> batch(p, first, count);
    const int64_t wrong = batch.prepare(scale), steps = batch.steps;
    if (wrong != RIGHT) return wrong;
    alignas(BYTES) double top[N] = {}, whole[N] = {}, rest[N] = {}, tops[N] = {}, distance[N] = {};
    alignas(BYTES) double strength[N] = {}, above[N] = {}, below[N] = {}, value[N];
    // A tile has z - top, then log |e| (for Power::ANY only); z, then exp(z - top), then e; and t.
    doubles *const tiles = static_cast<doubles *>(memory);
    const int64_t kept = power == Power::ANY && p.gradient ? steps : 0, size = 2 * steps + kept;
    const double spread = p.smoothing / double(p.classes);

    for (int t = 0; t < batch.tiles; ++t) {
        doubles *const z = tiles + t * size + kept, *const target = z + steps;
        batch.load_logits(z, t);
        if (p.probabilities) {
            if (p.half_probabilities)
                batch.template load_probabilities<S>(target, t);
            else
                batch.template load_probabilities<Working<S>>(target, t);
            if (p.smoothing > 0)
                for (int64_t s = 0; s < steps; ++s) target[s] = target[s] * (1 - p.smoothing) + spread;
        } else {
            for (int64_t s = 0; s < steps; ++s) target[s] = all(spread);
            for (int l = batch.begin(t); l < batch.end(t); ++l)
                at<ROW, double>(target, batch.y[l], l) += 1 - p.smoothing;
        }
        if (p.weight) {
            if (ROW)
                for (int64_t c = 0; c < p.classes; ++c) at<ROW, double>(target, c, 0) *= p.weight[c];
            else
                for (int64_t c = 0; c < p.classes; ++c) target[c] *= p.weight[c];
        }
        if (ROW)
            for (int64_t c = p.classes; c < steps * N; ++c) at<ROW, double>(target, c, 0) = 0;
        for (int l = batch.begin(t); l < batch.end(t); ++l)
            if (batch.ignored[l])
                for (int64_t c = 0; c < (ROW ? steps * N : steps); ++c) at<ROW, double>(target, c, l) = 0;

        doubles sum{}, largest = all(-double(INF));
        for (int64_t s = 0; s < steps; ++s) sum += target[s], largest = larger(z[s], largest);
        keep_sum<ROW>(whole, t, &sum);
        keep_largest<ROW>(top, t, largest);
    }

    for (int t = 0; t < batch.tiles; ++t) {
        doubles *const distances = tiles + t * size, *const e = distances + kept, *const target = e + steps;
        const doubles highest = lanes<ROW>(top, t);
        doubles small{}, equal{}, away{};
        const size_t target_size = p.half_probabilities ? sizeof(S) : sizeof(Working<S>);
        const char *const next_logits = row_of(p.logits, first + count + t, p.of_logits, sizeof(S));
        const char *const next_target =
            row_of(p.probabilities, first + count + t, p.of_probabilities, target_size);
        for (int64_t s = 0; s < steps; ++s) {
            if (ROW) __builtin_prefetch(next_logits + s * N * sizeof(S), 0, 2);
            if (ROW) __builtin_prefetch(next_target + s * N * target_size, 0, 2);
            const doubles d = e[s] - highest, power_of_e = exp_or_nearly_0(d);
            small += d == 0.0 ? doubles{} : power_of_e;  // without the top, next to which they would be rounded
            equal += d == 0.0 ? all(1.0) : doubles{};
            away += target[s] == 0.0 ? doubles{} : target[s] * d;  // 0 · inf counts as 0
            if (kept) distances[s] = d;
            e[s] = power_of_e;
        }
        keep_sum<ROW>(rest, t, &small);
        keep_sum<ROW>(tops, t, &equal);
        keep_sum<ROW>(distance, t, &away);
    }
    const doubles w = lanes(whole), beyond = (lanes(tops) - 1.0) + lanes(rest), total = beyond + 1.0;
    keep(value, (w == 0.0 ? doubles{} : w * log1p(beyond)) - lanes(distance));
    batch.add_values(value, value_sum);
    if (!p.gradient) return RIGHT;

    alignas(BYTES) double of_total[N], of_whole[N], log_total[N];
    alignas(BYTES) double above_top[N] = {}, below_top[N] = {};  // the largest log |e| of each side
    keep(of_total, 1.0 / total);
    keep(of_whole, 1.0 / w);
    keep(log_total, log(total));
    const auto find_biases = [&](auto constant) {
        constexpr Power POWER = constant;
        for (int t = 0; t < batch.tiles; ++t) {
            doubles *const sizes = tiles + t * size, *const e = sizes + kept, *const target = e + steps;
            const doubles by_total = lanes<ROW>(of_total, t), by_whole = lanes<ROW>(of_whole, t);
            const doubles all_of_it = lanes<ROW>(whole, t), logarithm = lanes<ROW>(log_total, t);
            const doubles none = all(-double(INF));
            doubles sum{}, positive{}, negative{}, highest = none, lowest = none;
            const char *const written = row_of(p.gradient, first + t, p.of_gradient, sizeof(S));
            for (int64_t s = 0; s < steps; ++s) {
                if (ROW) __builtin_prefetch(written + s * N * sizeof(S), 1, 2);
                doubles bias = e[s] * by_total - target[s] * by_whole;
                // A class with the whole target is alone on its side, so its e must not round to 0.
                bias = target[s] == all_of_it ? all(-1.0) : bias;
                sum += larger(bias, doubles{});
                if constexpr (POWER == Power::ANY) {
                    const doubles of_size = log_of<Working<S>>(abs(bias));
                    // Where the target is 0, this is log p, which does not underflow.
                    sizes[s] = target[s] == 0.0 ? sizes[s] - logarithm : of_size;
                    highest = larger(bias < 0.0 ? none : sizes[s], highest);
                    lowest = larger(bias < 0.0 ? sizes[s] : none, lowest);
                } else {
                    bias = powered(bias, POWER, positive, negative);
                }
                e[s] = bias;
            }
            keep_sum<ROW>(strength, t, &sum);
            keep_sum<ROW>(above, t, &positive);
            keep_sum<ROW>(below, t, &negative);
            keep_largest<ROW>(above_top, t, highest);
            keep_largest<ROW>(below_top, t, lowest);
        }
    };
    if (power == Power::ONE) find_biases(Constant<Power::ONE>{});
    if (power == Power::HALF) find_biases(Constant<Power::HALF>{});
    if (power == Power::TWO) find_biases(Constant<Power::TWO>{});
    if (power == Power::ANY) find_biases(Constant<Power::ANY>{});

    doubles dead = {}, of_strength = lanes(strength);
    if (power == Power::HALF) of_strength = sqrt(of_strength);
    if (power == Power::TWO) of_strength *= of_strength;
    if (power == Power::ANY) {
        doubles log_strength = log(lanes(strength));
        // If the strength is tiny, some e have underflowed, so it is summed in log space instead.
        const longs tiny = lanes(strength) < 1e-290;
        for (int t = 0; t < batch.tiles; ++t) {
            if (ROW && !tiny[t]) continue;
            doubles *const sizes = tiles + t * size, *const e = sizes + kept;
            bool any = ROW;
            for (int l = 0; l < N; ++l) any |= bool(tiny[l]);
            if (!any) continue;
            alignas(BYTES) double sums[N] = {};
            doubles sum{};
            for (int64_t s = 0; s < steps; ++s)
                sum += e[s] >= 0.0 ? exp(sizes[s] - lanes<ROW>(above_top, t)) : doubles{};
            keep_sum<ROW>(sums, t, &sum);
            for (int l = batch.begin(t); l < batch.end(t); ++l) {
                if (tiny[l]) log_strength[l] = above_top[l] + log(all(sums[l]))[0];
            }
        }
        const longs empty = (lanes(above_top) == -double(INF)) | (lanes(below_top) == -double(INF));
        dead = empty ? all(1.0) : doubles{};
        // Rounding may put it above 0, which a large k would make infinite.
        log_strength = (log_strength < 1e-9) & (log_strength > 0.0) ? doubles{} : log_strength;
        const doubles exponent = lanes(batch.k) * log_strength;
        of_strength = exponent > 709.0 ? all(double(INF)) : exp(exponent);
    }
    for (int t = 0; t < batch.tiles && power == Power::ANY; ++t) {
        doubles *const sizes = tiles + t * size, *const e = sizes + kept;
        const doubles k = lanes<ROW>(batch.k, t), up = lanes<ROW>(above_top, t), down = lanes<ROW>(below_top, t);
        doubles positive{}, negative{};
        for (int64_t s = 0; s < steps; ++s) {
            const doubles size = exp(k * (sizes[s] - (e[s] < 0.0 ? down : up)));
            positive += e[s] < 0.0 ? doubles{} : size;
            negative += e[s] < 0.0 ? size : doubles{};
            e[s] = with_sign_of(e[s], size);
        }
        keep_sum<ROW>(above, t, &positive);
        keep_sum<ROW>(below, t, &negative);
    }

    const doubles factor = lanes(batch.factor), push = factor * w * of_strength;
    doubles up = push / lanes(above), down = push / lanes(below);
    // If one side is empty, the other must not push alone (Eq. 4).
    const longs alone = (lanes(above) == 0.0) | (lanes(below) == 0.0) | (dead != 0.0);
    up = alone ? doubles{} : up, down = alone ? doubles{} : down;
    const longs known = total + abs(w) < double(INF);
    up = known ? up : all(NOT_A_NUMBER), down = known ? down : all(NOT_A_NUMBER);
    alignas(BYTES) double up_share[N], down_share[N], silent[N];
    keep(up_share, up);
    keep(down_share, down);
    // Without a target or an upstream gradient, the gradient is 0 even if the logits are NaN.
    keep(silent, (factor == 0.0) | (w == 0.0) | (alone & known) ? all(1.0) : doubles{});
    for (int t = 0; t < batch.tiles; ++t) {
        doubles *const e = tiles + t * size + kept;
        const doubles none = lanes<ROW>(silent, t), of_up = lanes<ROW>(up_share, t), of_down = lanes<ROW>(down_share, t);
        for (int64_t s = 0; s < steps; ++s)
            e[s] = none == 0.0 ? e[s] * (e[s] < 0.0 ? of_down : of_up) : doubles{};
        batch.store_gradient(e, t);
    }
    return RIGHT;
}

}  // namespace
