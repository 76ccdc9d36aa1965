// Tiles of logits: reading examples and writing their gradients, in any layout and dtype.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "vectors.h"

namespace {

constexpr int64_t RIGHT = -1, NO_MEMORY = -2, WRONG_K = -3;

// --- dtypes ---------------------------------------------------------------------------------------

struct bfloat16 {
    uint16_t high;
    bfloat16() = default;
    explicit bfloat16(float x) {  // rounds to nearest, ties to even
        uint32_t b;
        std::memcpy(&b, &x, 4);
        const uint32_t to_nearest_even = (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16;
        high = uint16_t(x == x ? to_nearest_even : 0x7FC0u);
    }
    explicit operator float() const {
        const uint32_t b = uint32_t(high) << 16;
        float x;
        std::memcpy(&x, &b, 4);
        return x;
    }
};
typedef _Float16 float16;

template <class S>
using Working = std::conditional_t<std::is_same_v<S, double>, double, float>;

// --- a problem, as packed by Python: 8 bytes per field -------------------------------------------

struct Strides {
    int64_t outer, position, classes;
};

struct Problem {
    const void *logits;
    void *gradient;               // may be the logits themselves; null: values only
    const int64_t *labels;        // null: the target is probabilities
    const void *probabilities;    // null: the target is labels; see half_probabilities
    const double *weight;         // per class; null: none
    const void *k;                // per example, float or double; null: k_of_all
    const double *factor;         // of the gradient, per example; null: factor_of_all
    void *value;                  // per example; null: not requested
    void *reduced;                // the sum or mean of all values; null: not requested
    int64_t mean, ignore_index;
    int64_t half_probabilities;            // 1: of the logits' half type; 0: of the working dtype
    int64_t double_k;
    int64_t examples, positions, classes;  // an example has the index outer * positions + position
    Strides of_logits, of_gradient, of_probabilities;
    double k_of_all, factor_of_all, smoothing;
};

// --- tiles ----------------------------------------------------------------------------------------

// A batch has up to N examples: in one column tile, or in a row tile each. Each example has a lane, its
// index in arrays of N numbers.

// The numbers of a tile's lanes; the same number in all lanes of a row tile.
template <bool ROW, class T>
INLINE Vector<T> lanes(const T *of, int tile, int part = 0) {
    if (ROW) return all(of[tile]);
    Vector<T> x;
    std::memcpy(&x, of + part * LANES<T>, sizeof x);
    return x;
}

template <class T>
INLINE Vector<T> lanes(const T *of, int part = 0) {
    return lanes<false>(of, 0, part);
}

template <class T>
INLINE void keep(T *of, Vector<T> x, int part = 0) {
    std::memcpy(of + part * LANES<T>, &x, sizeof x);
}

template <bool ROW>
INLINE void keep_sum(double *of, int tile, const doubles *x, int parts = 1) {
    if (!ROW) {
        for (int i = 0; i < parts; ++i) keep(of, x[i], i);
        return;
    }
    doubles sum = x[0];
    for (int i = 1; i < parts; ++i) sum += x[i];
    of[tile] = sum[0];
    for (int l = 1; l < LANES<double>; ++l) of[tile] += sum[l];
}

template <bool ROW, class T>
INLINE void keep_largest(T *of, int tile, Vector<T> x) {
    if (!ROW) return keep(of, x);
    of[tile] = x[0];
    for (int l = 1; l < LANES<T>; ++l) of[tile] = x[l] > of[tile] ? x[l] : of[tile];
}

// The element of a class in a tile, for the example in a lane.
template <bool ROW, class T>
INLINE T &at(Vector<T> *tile, int64_t c, int lane) {
    return reinterpret_cast<T *>(tile)[ROW ? c : c * LANES<T> + lane];
}

template <class T, class S>
INLINE Vector<T> read(const S *from) {
    T x[LANES<T>];
    Vector<T> v;
    for (int l = 0; l < LANES<T>; ++l) x[l] = T(Working<S>(from[l]));
    std::memcpy(&v, x, sizeof v);
    return v;
}

template <class S, class T>
INLINE void write(S *to, Vector<T> v) {
    T x[LANES<T>];
    std::memcpy(x, &v, sizeof v);
    for (int l = 0; l < LANES<T>; ++l) to[l] = S(Working<S>(x[l]));
}

// Compilers do not vectorize the conversion in the class bfloat16.
template <>
INLINE void write<bfloat16, float>(bfloat16 *to, floats v) {
    const uints b = (uints)v;
    const uints to_nearest_even = (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16;
    const shorts high = __builtin_convertvector(v == v ? to_nearest_even : uints{} + 0x7FC0u, shorts);
    std::memcpy(static_cast<void *>(to), &high, sizeof high);
}

// Fills a tile with logits or probabilities, and unused lanes with the padding.
template <bool ROW, class T, class S>
INLINE void load(Vector<T> *tile, const S *from, Strides by, int64_t classes, int count, T padding) {
    constexpr int N = LANES<T>;
    if (ROW) {
        int64_t c = 0;
        for (; c + N <= classes; c += N) *tile++ = read<T>(from + c);
        if (c == classes) return;
        *tile = all(padding);
        for (int l = 0; c + l < classes; ++l) (*tile)[l] = T(Working<S>(from[c + l]));
    } else if (by.position == 1 && count == N) {
        for (int64_t c = 0; c < classes; ++c) tile[c] = read<T>(from + c * by.classes);
    } else {
        if (count < N)
            for (int64_t c = 0; c < classes; ++c) tile[c] = all(padding);
        for (int l = 0; l < count; ++l)
            for (int64_t c = 0; c < classes; ++c)
                at<false, T>(tile, c, l) = T(Working<S>(from[l * by.position + c * by.classes]));
    }
}

template <bool ROW, class T, class S>
INLINE void store(S *to, Vector<T> *tile, Strides by, int64_t classes, int count) {
    constexpr int N = LANES<T>;
    if (ROW) {
        int64_t c = 0;
        for (; c + N <= classes; c += N) write<S, T>(to + c, *tile++);
        for (int l = 0; c + l < classes; ++l) to[c + l] = S(Working<S>((*tile)[l]));
    } else if (by.position == 1 && count == N) {
        for (int64_t c = 0; c < classes; ++c) write<S, T>(to + c * by.classes, tile[c]);
    } else {
        for (int l = 0; l < count; ++l)
            for (int64_t c = 0; c < classes; ++c)
                to[l * by.position + c * by.classes] = S(Working<S>(at<false, T>(tile, c, l)));
    }
}

// The examples of a batch, with their labels, weights, k and factors.
template <class S, class T, bool ROW>
struct Batch {
    static constexpr int N = LANES<T>;
    const Problem &p;
    const int64_t first, steps;  // the first example; vectors in a tile
    const int count, tiles;
    int64_t y[N] = {};
    alignas(BYTES) double weight[N] = {}, k[N] = {}, factor[N] = {};
    bool ignored[N] = {};

    INLINE Batch(const Problem &p, int64_t first, int count)
        : p(p), first(first), steps(ROW ? (p.classes + N - 1) / N : p.classes), count(count),
          tiles(ROW ? count : 1) {}

    // Returns RIGHT, WRONG_K, or the index of an example with an invalid label.
    INLINE int64_t prepare(double scale) {
        for (int l = 0; l < N; ++l) {
            const int64_t i = first + (l < count ? l : 0), label = p.labels ? p.labels[i] : 0;
            ignored[l] = p.labels && label == p.ignore_index;
            if (!ignored[l] && uint64_t(label) >= uint64_t(p.classes)) return i;
            y[l] = ignored[l] ? 0 : label;
            weight[l] = ignored[l] ? 0.0 : p.labels && p.weight ? p.weight[label] : 1.0;
            k[l] = !p.k           ? p.k_of_all
                   : p.double_k ? static_cast<const double *>(p.k)[i]
                                : static_cast<const float *>(p.k)[i];
            if (!(k[l] >= 0x1p-100 && k[l] <= 0x1p100)) return WRONG_K;
            factor[l] = (p.factor ? p.factor[i] : p.factor_of_all) * scale;
        }
        return RIGHT;
    }

    // The lanes of a tile.
    INLINE int begin(int tile) const { return ROW ? tile : 0; }
    INLINE int end(int tile) const { return ROW ? tile + 1 : N; }

    template <class D>
    INLINE D *start_of(const void *data, Strides by, int tile) const {
        const int64_t outer = first / p.positions, position = first % p.positions + (ROW ? tile : 0);
        return const_cast<D *>(static_cast<const D *>(data)) + outer * by.outer + position * by.position;
    }

    INLINE void load_logits(Vector<T> *tile, int t) const {
        const S *from = start_of<S>(p.logits, p.of_logits, t);
        load<ROW, T>(tile, from, p.of_logits, p.classes, count, T(-INF));
    }

    template <class Q>
    INLINE void load_probabilities(Vector<T> *tile, int t) const {
        const Q *from = start_of<Q>(p.probabilities, p.of_probabilities, t);
        load<ROW, T>(tile, from, p.of_probabilities, p.classes, count, T(0));
    }

    INLINE void store_gradient(Vector<T> *tile, int t) const {
        S *to = start_of<S>(p.gradient, p.of_gradient, t);
        store<ROW, T>(to, tile, p.of_gradient, p.classes, count);
    }

    INLINE void add_values(const double *value, double &sum) const {
        for (int l = 0; l < count; ++l) {
            const double v = ignored[l] ? 0.0 : value[l];
            sum += v;
            if (p.value) static_cast<Working<S> *>(p.value)[first + l] = Working<S>(v);
        }
    }
};

}  // namespace
