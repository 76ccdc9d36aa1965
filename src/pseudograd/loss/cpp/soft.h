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

// Returns where a row begins, to prefetch it: while a batch is computed, the processor fetches no rows by
// itself. The address is only a hint, and may lie outside of the array.
INLINE const char *row_at(const void *of, int64_t offset, size_t size) {
    return static_cast<const char *>(of) + offset * int64_t(size);
}

// With e = p - t / W, for a target t with the sum W, the rule is
//   f_j = W sign(e_j) S^k |e_j|^k / sum of |e_i|^k with the same sign,   S = sum of e_j > 0.
// Where p and t / W agree, their difference cancels, so everything is computed in float64.
template <class S, bool ROW>
INLINE int64_t soft_batch(const Problem &p, void *memory, const Place &place, int count, Power power,
                          double scale, doubles &value_sum) {
    constexpr int N = LANES<double>;
    using T = Working<S>;
    Batch<S, double, ROW> batch(p, place, count);
    const int64_t wrong = batch.prepare(scale), steps = batch.steps;
    if (wrong != RIGHT) return wrong;
    alignas(BYTES) double top[MOST] = {}, whole[MOST] = {}, rest[MOST] = {}, tops[MOST] = {}, distance[MOST] = {};
    alignas(BYTES) double strength[MOST] = {}, above[MOST] = {}, below[MOST] = {}, value[MOST] = {};
    // A tile has z - top, then log |e| (for Power::ANY only); z, then exp(z - top), then e; and t.
    doubles *const tiles = static_cast<doubles *>(memory);
    const int64_t kept = power == Power::ANY && p.gradient ? steps : 0, size = 2 * steps + kept;
    const int64_t classes = batch.classes;
    const double spread = p.smoothing / double(classes);
    // The vectors of the examples, for what is done once for each.
    const int parts = (count + N - 1) / N;

    batch.load_logits(tiles + kept, size);
    if (p.probabilities && p.half_probabilities) batch.template load_probabilities<S>(tiles + kept + steps, size);
    if (p.probabilities && !p.half_probabilities) batch.template load_probabilities<T>(tiles + kept + steps, size);
    for (int t = 0; t < batch.tiles; ++t) {
        doubles *const z = tiles + t * size + kept, *const target = z + steps;
        if (p.probabilities) {
            if (p.smoothing > 0)
                for (int64_t s = 0; s < steps; ++s) target[s] = target[s] * (1 - p.smoothing) + spread;
        } else {
            const doubles of_label = all(1 - p.smoothing + spread), of_other = all(spread);
            for (int64_t s = 0; s < steps && ROW; ++s) target[s] = of_other;
            if (ROW) at<ROW, double>(target, batch.y[t], t) = of_label[0];
            for (int64_t s = 0; s < steps && !ROW; ++s)
                target[s] = lanes(batch.y, t) == s ? of_label : of_other;
        }
        if (p.weight) {
            if (ROW)
                for (int64_t c = 0; c < classes; ++c) at<ROW, double>(target, c, 0) *= p.weight[c];
            else
                for (int64_t c = 0; c < classes; ++c) target[c] *= p.weight[c];
        }
        if (ROW)
            for (int64_t c = classes; c < steps * N; ++c) at<ROW, double>(target, c, 0) = 0;
        for (int64_t s = 0; s < steps && batch.any_ignored; ++s)
            target[s] = lanes<ROW>(batch.ignored, t) == 0 ? target[s] : doubles{};

        doubles sum{}, largest = all(-double(INF));
        for (int64_t s = 0; s < steps; ++s) sum += target[s], largest = larger(z[s], largest);
        keep_sum<ROW>(whole, t, &sum);
        keep_largest<ROW>(top, t, largest);
    }

    for (int t = 0; t < batch.tiles; ++t) {
        doubles *const distances = tiles + t * size, *const e = distances + kept, *const target = e + steps;
        const doubles highest = lanes<ROW>(top, t);
        doubles small{}, equal{}, away{};
        const size_t target_size = p.half_probabilities ? sizeof(S) : sizeof(T);
        const char *const next_logits = row_at(p.logits, place.logits + (count + t) * batch.by.logits, sizeof(S));
        const char *const next_target =
            row_at(p.probabilities, place.probabilities + (count + t) * batch.by.probabilities, target_size);
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
    alignas(BYTES) double total[MOST] = {}, of_total[MOST] = {}, of_whole[MOST] = {}, log_total[MOST] = {};
    for (int i = 0; i < parts; ++i) {
        const doubles w = lanes(whole, i), beyond = (lanes(tops, i) - 1.0) + lanes(rest, i), sum = beyond + 1.0;
        keep(value, (w == 0.0 ? doubles{} : w * log1p<T>(beyond)) - lanes(distance, i), i);
        if (!p.gradient) continue;
        keep(total, sum, i);
        keep(of_total, 1.0 / sum, i);
        keep(of_whole, 1.0 / w, i);
        if (power == Power::ANY) keep(log_total, log(sum), i);
    }
    batch.add_values(value, value_sum);
    if (!p.gradient) return RIGHT;

    alignas(BYTES) double above_top[MOST] = {}, below_top[MOST] = {};  // the largest log |e| of each side
    const auto find_biases = [&](auto constant) {
        constexpr Power POWER = constant;
        for (int t = 0; t < batch.tiles; ++t) {
            doubles *const sizes = tiles + t * size, *const e = sizes + kept, *const target = e + steps;
            const doubles by_total = lanes<ROW>(of_total, t), by_whole = lanes<ROW>(of_whole, t);
            const doubles all_of_it = lanes<ROW>(whole, t), logarithm = lanes<ROW>(log_total, t);
            const doubles none = all(-double(INF));
            doubles sum{}, positive{}, negative{}, highest = none, lowest = none;
            const char *const written = row_at(p.gradient, place.gradient + t * batch.by.gradient, sizeof(S));
            for (int64_t s = 0; s < steps; ++s) {
                if (ROW) __builtin_prefetch(written + s * N * sizeof(S), 1, 2);
                doubles bias = e[s] * by_total - target[s] * by_whole;
                // A class with the whole target is alone on its side, so its e must not round to 0.
                bias = target[s] == all_of_it ? all(-1.0) : bias;
                sum += larger(bias, doubles{});
                if constexpr (POWER == Power::ANY) {
                    const doubles of_size = log_of<T>(abs(bias));
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

    alignas(BYTES) double of_strength[MOST] = {}, dead[MOST] = {};
    for (int i = 0; i < parts; ++i) {
        const doubles sum = lanes(strength, i);
        if (power == Power::ONE) keep(of_strength, sum, i);
        if (power == Power::HALF) keep(of_strength, sqrt(sum), i);
        if (power == Power::TWO) keep(of_strength, sum * sum, i);
        if (power != Power::ANY) continue;
        doubles log_strength = log(sum);
        // If the strength is tiny, some e have underflowed, so it is summed in log space instead.
        for (int l = i * N; l < i * N + N && l < count; ++l) {
            if (!(strength[l] < 1e-290)) continue;
            const int t = ROW ? l : i;
            doubles *const sizes = tiles + t * size, *const e = sizes + kept;
            alignas(BYTES) double sums[MOST] = {};
            doubles some{};
            for (int64_t s = 0; s < steps; ++s)
                some += e[s] >= 0.0 ? exp(sizes[s] - lanes<ROW>(above_top, t)) : doubles{};
            keep_sum<ROW>(sums, t, &some);
            log_strength[l % N] = above_top[l] + log(all(sums[l]))[0];
        }
        const longs empty = (lanes(above_top, i) == -double(INF)) | (lanes(below_top, i) == -double(INF));
        keep(dead, empty ? all(1.0) : doubles{}, i);
        // Rounding may put it above 0, which a large k would make infinite.
        log_strength = (log_strength < 1e-9) & (log_strength > 0.0) ? doubles{} : log_strength;
        const doubles exponent = lanes(batch.k, i) * log_strength;
        keep(of_strength, exponent > 709.0 ? all(double(INF)) : exp(exponent), i);
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

    alignas(BYTES) double up_share[MOST] = {}, down_share[MOST] = {}, silent[MOST] = {};
    for (int i = 0; i < parts; ++i) {
        const doubles factor = lanes(batch.factor, i), w = lanes(whole, i), push = factor * w * lanes(of_strength, i);
        doubles up = push / lanes(above, i), down = push / lanes(below, i);
        // If one side is empty, the other must not push alone (Eq. 4).
        const longs alone = (lanes(above, i) == 0.0) | (lanes(below, i) == 0.0) | (lanes(dead, i) != 0.0);
        up = alone ? doubles{} : up, down = alone ? doubles{} : down;
        const longs known = lanes(total, i) + abs(w) < double(INF);
        keep(up_share, known ? up : all(NOT_A_NUMBER), i);
        keep(down_share, known ? down : all(NOT_A_NUMBER), i);
        // Without a target or an upstream gradient, the gradient is 0 even if the logits are NaN.
        keep(silent, (factor == 0.0) | (w == 0.0) | (alone & known) ? all(1.0) : doubles{}, i);
    }
    for (int t = 0; t < batch.tiles; ++t) {
        doubles *const e = tiles + t * size + kept;
        const doubles none = lanes<ROW>(silent, t), of_up = lanes<ROW>(up_share, t), of_down = lanes<ROW>(down_share, t);
        for (int64_t s = 0; s < steps; ++s)
            e[s] = none == 0.0 ? e[s] * (e[s] < 0.0 ? of_down : of_up) : doubles{};
    }
    batch.store_gradient(tiles + kept, size);
    return RIGHT;
}

}  // namespace
