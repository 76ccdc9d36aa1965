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

// A dimension of the examples, with the strides of each array. Labels, k, factors and values share theirs.
struct Dimension {
    int64_t size, logits, gradient, probabilities, labels;
};

constexpr int DIMENSIONS = 4;  // missing ones come first, with the size 1

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
    int64_t examples;
    Dimension classes, dimensions[DIMENSIONS];
    double k_of_all, factor_of_all, smoothing;
};

// Where an example is: offsets into the arrays. `left` counts the examples from it to the end of the last
// dimension, along which a batch lies.
struct Place {
    int64_t logits = 0, gradient = 0, probabilities = 0, labels = 0, left = 0;

    INLINE Place(const Problem &p, int64_t example) {
        for (int d = DIMENSIONS; d-- > 0; example /= p.dimensions[d].size) {
            const int64_t index = example % p.dimensions[d].size;
            if (d == DIMENSIONS - 1) left = p.dimensions[d].size - index;
            move(p.dimensions[d], index);
        }
    }

    INLINE void move(const Dimension &by, int64_t count) {
        logits += by.logits * count, gradient += by.gradient * count;
        probabilities += by.probabilities * count, labels += by.labels * count;
    }
};

// --- tiles ----------------------------------------------------------------------------------------

// A batch has up to MOST examples, in column tiles or in a row tile each. Each example has a lane, its
// index in arrays of MOST numbers.
constexpr int MOST = 2 * LANES<float>;

// The numbers of a tile's lanes; the same number in all lanes of a row tile.
template <bool ROW, class T>
INLINE Vector<T> lanes(const T *of, int tile) {
    if constexpr (ROW) return all(of[tile]);
    Vector<T> x;
    std::memcpy(&x, of + tile * LANES<T>, sizeof x);
    return x;
}

template <class T>
INLINE Vector<T> lanes(const T *of, int part) {
    return lanes<false>(of, part);
}

template <class T>
INLINE void keep(T *of, Vector<T> x, int part) {
    std::memcpy(of + part * LANES<T>, &x, sizeof x);
}

INLINE void keep_as(double *of, doubles x, int part) { keep(of, x, part); }
INLINE void keep_as(float *of, doubles x, int part) {
    const some_floats y = __builtin_convertvector(x, some_floats);
    std::memcpy(of + part * LANES<double>, &y, sizeof y);
}

template <bool ROW>
INLINE void keep_sum(double *of, int tile, const doubles *x, int parts = 1) {
    if (!ROW) {
        for (int i = 0; i < parts; ++i) keep(of, x[i], tile * parts + i);
        return;
    }
    doubles sum = x[0];
    for (int i = 1; i < parts; ++i) sum += x[i];
    of[tile] = sum[0];
    for (int l = 1; l < LANES<double>; ++l) of[tile] += sum[l];
}

template <bool ROW, class T>
INLINE void keep_largest(T *of, int tile, Vector<T> x) {
    if (!ROW) return keep(of, x, tile);
    of[tile] = x[0];
    for (int l = 1; l < LANES<T>; ++l) of[tile] = x[l] > of[tile] ? x[l] : of[tile];
}

// The element of a class in the tile of a lane.
template <bool ROW, class T>
INLINE T &at(Vector<T> *tile, int64_t c, int lane) {
    return reinterpret_cast<T *>(tile)[ROW ? c : c * LANES<T> + lane % LANES<T>];
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

// Fills `tiles` column tiles, which are `apart` vectors apart, and unused lanes with the padding. Tiles are
// filled together, because a cache line may belong to two of them. The next batch is prefetched: images
// have a stream of memory for each class, more than the processor follows by itself.
template <class T, class S>
INLINE void load_columns(Vector<T> *tile, int64_t apart, int tiles, const S *from, int64_t by_example,
                         int64_t by_class, int64_t classes, int count, T padding) {
    constexpr int N = LANES<T>;
    const int full = by_example == 1 ? count / N : 0;
    for (int64_t c = 0; c < classes; ++c)
        for (int t = 0; t < full; ++t) {
            __builtin_prefetch(from + c * by_class + count + t * N, 0, 2);
            tile[t * apart + c] = read<T>(from + c * by_class + t * N);
        }
    if (count == full * N) return;
    for (int t = full; t < tiles && count < tiles * N; ++t)
        for (int64_t c = 0; c < classes; ++c) tile[t * apart + c] = all(padding);
    const auto copy = [&](int l, int64_t c) {
        at<false, T>(tile + l / N * apart, c, l) = T(Working<S>(from[l * by_example + c * by_class]));
    };
    if (by_class == 1)
        for (int l = full * N; l < count; ++l)
            for (int64_t c = 0; c < classes; ++c) copy(l, c);
    else
        for (int64_t c = 0; c < classes; ++c)
            for (int l = full * N; l < count; ++l) copy(l, c);
}

template <class T, class S>
INLINE void store_columns(S *to, Vector<T> *tile, int64_t apart, int64_t by_example,
                          int64_t by_class, int64_t classes, int count) {
    constexpr int N = LANES<T>;
    const int full = by_example == 1 ? count / N : 0;
    for (int64_t c = 0; c < classes; ++c)
        for (int t = 0; t < full; ++t) {
            __builtin_prefetch(to + c * by_class + count + t * N, 1, 2);
            write<S, T>(to + c * by_class + t * N, tile[t * apart + c]);
        }
    const auto copy = [&](int l, int64_t c) {
        to[l * by_example + c * by_class] = S(Working<S>(at<false, T>(tile + l / N * apart, c, l)));
    };
    if (by_class == 1)
        for (int l = full * N; l < count; ++l)
            for (int64_t c = 0; c < classes; ++c) copy(l, c);
    else
        for (int64_t c = 0; c < classes; ++c)
            for (int l = full * N; l < count; ++l) copy(l, c);
}

template <class T, class S>
INLINE void load_row(Vector<T> *tile, const S *from, int64_t classes, T padding) {
    constexpr int N = LANES<T>;
    int64_t c = 0;
    for (; c + N <= classes; c += N) *tile++ = read<T>(from + c);
    if (c == classes) return;
    *tile = all(padding);
    for (int l = 0; c + l < classes; ++l) (*tile)[l] = T(Working<S>(from[c + l]));
}

template <class T, class S>
INLINE void store_row(S *to, Vector<T> *tile, int64_t classes) {
    constexpr int N = LANES<T>;
    int64_t c = 0;
    for (; c + N <= classes; c += N) write<S, T>(to + c, *tile++);
    for (int l = 0; c + l < classes; ++l) to[c + l] = S(Working<S>((*tile)[l]));
}

// The examples of a batch, with their labels, weights, k and factors.
template <class S, class T, bool ROW>
struct Batch {
    static constexpr int N = LANES<T>;
    const Problem &p;
    const Place &place;  // of the first example
    const Dimension &by = p.dimensions[DIMENSIONS - 1];
    const int64_t classes = p.classes.size, steps = ROW ? (classes + N - 1) / N : classes;  // vectors in a tile
    const int count, tiles = ROW ? count : (count + N - 1) / N;
    alignas(BYTES) int64_t y[MOST] = {}, ignored[MOST];  // ignored: all bits of the lanes without an example too
    alignas(BYTES) double weight[MOST], k[MOST], factor[MOST];
    bool any_ignored = false;

    INLINE Batch(const Problem &p, const Place &place, int count) : p(p), place(place), count(count) {}

    // Returns RIGHT, WRONG_K, or the index of an example with an invalid label.
    INLINE int64_t prepare(double scale) {
        const int64_t *const labels = p.labels + place.labels;
        if (p.labels && by.labels == 1 && count == MOST)
            std::memcpy(y, labels, sizeof y);
        else
            for (int l = 0; l < count && p.labels; ++l) y[l] = labels[l * by.labels];
        longs some{}, wrong{};
        for (int i = 0; i < MOST / LANES<double>; ++i) {
            const longs label = lanes(y, i), empty = FIRST + i * LANES<double> >= count;
            const longs skipped = p.labels ? label == p.ignore_index : longs{};
            some |= skipped;
            wrong |= ~(skipped | empty) & (longs)((words)label >= uint64_t(classes));
            keep(y, label & ~(skipped | empty), i);
            keep(ignored, skipped | empty, i);
            keep(weight, skipped | empty ? doubles{} : all(1.0), i);
            keep(k, all(p.k_of_all), i);
            keep(factor, all(p.factor_of_all * scale), i);
        }
        any_ignored = any(some);
        if (any(wrong))
            for (int l = 0; l < count; ++l)
                if (!ignored[l] && uint64_t(y[l]) >= uint64_t(classes)) return place.labels + l * by.labels;
        for (int l = 0; l < count && p.labels && p.weight; ++l) weight[l] *= p.weight[y[l]];
        for (int l = 0; l < count && p.factor; ++l) factor[l] = p.factor[place.labels + l * by.labels] * scale;
        for (int l = 0; l < count && p.k; ++l) {
            const int64_t i = place.labels + l * by.labels;
            k[l] = p.double_k ? static_cast<const double *>(p.k)[i] : static_cast<const float *>(p.k)[i];
        }
        for (int i = 0; i < MOST / LANES<double>; ++i)
            wrong |= ~((lanes(k, i) >= 0x1p-100) & (lanes(k, i) <= 0x1p100));
        return any(wrong) ? WRONG_K : RIGHT;
    }

    // The tiles begin `apart` vectors after each other.
    INLINE void load_logits(Vector<T> *tile, int64_t apart) const {
        const S *const from = static_cast<const S *>(p.logits) + place.logits;
        load(tile, apart, from, by.logits, p.classes.logits, T(-INF));
    }

    template <class Q>
    INLINE void load_probabilities(Vector<T> *tile, int64_t apart) const {
        const Q *const from = static_cast<const Q *>(p.probabilities) + place.probabilities;
        load(tile, apart, from, by.probabilities, p.classes.probabilities, T(0));
    }

    template <class Q>
    INLINE void load(Vector<T> *tile, int64_t apart, const Q *from, int64_t by_example, int64_t by_class,
                     T padding) const {
        if (!ROW) load_columns<T>(tile, apart, tiles, from, by_example, by_class, classes, count, padding);
        for (int t = 0; t < tiles && ROW; ++t) load_row<T>(tile + t * apart, from + t * by_example, classes, padding);
    }

    INLINE void store_gradient(Vector<T> *tile, int64_t apart) const {
        S *const to = static_cast<S *>(p.gradient) + place.gradient;
        if (!ROW) store_columns<T>(to, tile, apart, by.gradient, p.classes.gradient, classes, count);
        for (int t = 0; t < tiles && ROW; ++t) store_row<T>(to + t * by.gradient, tile + t * apart, classes);
    }

    INLINE void add_values(const double *value, doubles &sum) const {
        for (int i = 0; i < MOST / LANES<double>; ++i)
            sum += lanes(ignored, i) == 0 ? lanes(value, i) : doubles{};
        for (int l = 0; l < count && p.value; ++l)
            static_cast<Working<S> *>(p.value)[place.labels + l * by.labels] = Working<S>(ignored[l] ? 0.0 : value[l]);
    }
};

}  // namespace
