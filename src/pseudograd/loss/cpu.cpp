// The loss on a CPU: values and pseudo-gradients of many examples, in one pass over the logits.
//
// Labels follow the paper's Eq. 5, soft targets its extension. `pseudograd.rules.paper` has both in
// PyTorch, `pseudograd.loss.triton` in Triton, `pseudograd.jax` in JAX. `cpu.py` calls these
// functions; nothing here knows of Python or PyTorch.
//
// All work is done in tiles, whose steps are vectors of N numbers (N = 16 floats with AVX-512):
//   - in a column tile, each lane is an example and each step a class;
//   - a row tile is one example, whose classes fill the steps in order.
// Both run the same code; in a row tile, sums and maxima are then taken over the lanes as well.
// Columns suit few classes and layouts like (N, C, H, W), rows suit many classes.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#define INLINE inline __attribute__((always_inline))

// Low and high half of a vector of floats, by the registers of the processor compiled for.
#if defined(__AVX512F__)
#define BYTES 64
#define LOW 0, 1, 2, 3, 4, 5, 6, 7
#define HIGH 8, 9, 10, 11, 12, 13, 14, 15
#elif defined(__AVX2__)
#define BYTES 32
#define LOW 0, 1, 2, 3
#define HIGH 4, 5, 6, 7
#else
#define BYTES 16
#define LOW 0, 1
#define HIGH 2, 3
#endif

namespace {

typedef float floats __attribute__((vector_size(BYTES)));
typedef int32_t ints __attribute__((vector_size(BYTES)));
typedef uint32_t uints __attribute__((vector_size(BYTES)));
typedef uint16_t shorts __attribute__((vector_size(BYTES / 2)));
typedef double doubles __attribute__((vector_size(BYTES)));
typedef int64_t longs __attribute__((vector_size(BYTES)));
typedef uint64_t words __attribute__((vector_size(BYTES)));

template <class T>
struct VectorOf {
    typedef floats type;
};
template <>
struct VectorOf<double> {
    typedef doubles type;
};
template <class T>
using Vector = typename VectorOf<T>::type;

template <class T>
constexpr int LANES = BYTES / sizeof(T);
template <class T>
constexpr int PARTS = sizeof(double) / sizeof(T);  // vectors of doubles for one of T

constexpr int64_t ROWS_FROM = 64;  // classes for which row tiles are faster
constexpr float INF = __builtin_inff();
constexpr double NOT_A_NUMBER = __builtin_nan("");
constexpr int64_t RIGHT = -1, NO_MEMORY = -2, WRONG_K = -3;

// --- elementary functions on vectors -------------------------------------------------------------

INLINE floats all(float x) { return x - floats{}; }
INLINE doubles all(double x) { return x - doubles{}; }

// exp(x) for x <= 0 to an ulp; 0 below -88. Cephes' coefficients.
INLINE floats exp(floats x) {
    const floats round = all(12582912.0f);  // 1.5 * 2^23 leaves integers in the last bits
    x = x < -88.0f ? all(-88.0f) : x;
    const floats shifted = x * 1.44269504f + round;
    const floats n = shifted - round;
    const floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (floats)(((ints)shifted << 23) + 0x3F800000);
}

// exp(x) for x <= 0 to 3e-16 of it; below -708 a negligible 3e-308. Taylor's coefficients.
INLINE doubles exp_or_nearly_0(doubles x) {
    const doubles round = all(6755399441055744.0);  // 1.5 * 2^52 leaves integers in the last bits
    x = x < -708.0 ? all(-708.0) : x;
    const doubles shifted = x * 1.4426950408889634 + round;
    const doubles n = shifted - round;
    const doubles r = (x - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6;
    doubles p = r * (1 / 479001600.0) + 1 / 39916800.0;
    p = p * r + 1 / 3628800.0;
    p = p * r + 1 / 362880.0;
    p = p * r + 1 / 40320.0;
    p = p * r + 1 / 5040.0;
    p = p * r + 1 / 720.0;
    p = p * r + 1 / 120.0;
    p = p * r + 1 / 24.0;
    p = p * r + 1 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    return p * (doubles)(((words)shifted << 52) + 0x3FF0000000000000);
}

INLINE doubles exp(doubles x) { return x < -708.0 ? doubles{} : exp_or_nearly_0(x); }

// log(x) for x >= 0 to 1e-15, by the series of log((1 + s) / (1 - s)).
INLINE doubles log(doubles x) {
    const uint64_t one = 0x3FF0000000000000, root_of_half = 0x3FE6A09E667F3BCD;
    const words n = ((words)x - root_of_half + one) >> 52;  // the exponent plus 1023
    const doubles m = (doubles)((words)x - (n << 52) + one);  // from sqrt(1/2) to sqrt(2)
    const doubles s = (m - 1.0) / (m + 1.0), square = s * s;
    doubles p = square * (2.0 / 17) + 2.0 / 15;
    p = p * square + 2.0 / 13;
    p = p * square + 2.0 / 11;
    p = p * square + 2.0 / 9;
    p = p * square + 2.0 / 7;
    p = p * square + 2.0 / 5;
    p = p * square + 2.0 / 3;
    p = p * square + 2.0;
    const doubles exponent = (doubles)(n | 0x4330000000000000) - (4503599627370496.0 + 1023.0);
    const doubles y = exponent * 6.93145751953125e-1 + (exponent * 1.42860682030941723212e-6 + s * p);
    const doubles positive = x > 0.0 ? y : all(-double(INF));
    return x < double(INF) ? positive : x;  // infinity and NaN stay
}

// log(1 + x) for x >= 0.
INLINE doubles log1p(doubles x) {
    const doubles u = x + 1.0;
    return log(u) + (x - (u - 1.0)) / u;
}

INLINE doubles sqrt(doubles x) {
    for (size_t l = 0; l < sizeof x / sizeof(double); ++l) x[l] = __builtin_sqrt(x[l]);
    return x;
}

INLINE doubles abs(doubles x) { return (doubles)((words)x & 0x7FFFFFFFFFFFFFFF); }

// |size| with the sign of x.
INLINE doubles with_sign_of(doubles x, doubles size) {
    return (doubles)((words)size | ((words)x & 0x8000000000000000));
}

template <class V>
INLINE V larger(V a, V b) {
    return a > b ? a : b;
}

INLINE doubles widened(floats x, int part) {
    return part ? __builtin_convertvector(__builtin_shufflevector(x, x, HIGH), doubles)
                : __builtin_convertvector(__builtin_shufflevector(x, x, LOW), doubles);
}
INLINE doubles widened(doubles x, int) { return x; }

// --- dtypes ---------------------------------------------------------------------------------------

struct bfloat16 {
    uint16_t high;
    bfloat16() = default;
    explicit bfloat16(float x) {  // rounds to the nearest, ties to even
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

// --- a problem, as Python packs it: 8 bytes for each field ----------------------------------------

struct Strides {
    int64_t outer, position, classes;
};

struct Problem {
    const void *logits;
    void *gradient;               // may be the logits themselves; null: values only
    const int64_t *labels;        // null: probabilities
    const void *probabilities;    // null: labels; of the logits' dtype or float32
    const double *weight;         // of each class; null: none
    const void *k;                // of each example, float or double; null: the same for all, below
    const double *factor;         // of the gradient, of each example; likewise
    void *value;                  // of each example; null: not wanted
    void *reduced;                // the sum or mean of all values; null: not wanted
    int64_t mean, ignore_index;
    int64_t half_probabilities;            // of the logits' half type, not float32
    int64_t double_k;
    int64_t examples, positions, classes;  // an example has the index outer * positions + position
    Strides of_logits, of_gradient, of_probabilities;
    double k_of_all, factor_of_all, smoothing;
};

// --- tiles ----------------------------------------------------------------------------------------

// Examples come in batches of up to N: one column tile, or one row tile for each. Each example has
// a lane, its entry in arrays of N numbers.

// The numbers of a tile's lanes, all the same in a row tile.
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

// The place of a class in the tile of the example in a lane.
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

// Compilers do not vectorize bfloat16's own conversion.
template <>
INLINE void write<bfloat16, float>(bfloat16 *to, floats v) {
    const uints b = (uints)v;
    const uints to_nearest_even = (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16;
    const shorts high = __builtin_convertvector(v == v ? to_nearest_even : uints{} + 0x7FC0u, shorts);
    std::memcpy(static_cast<void *>(to), &high, sizeof high);
}

// Lanes without an example, and classes that a row tile has too many, get the padding.
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

// The examples of a batch, and what they bring with them.
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

    // Returns RIGHT, WRONG_K, or the index of an example whose label is no class.
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

// --- labels ---------------------------------------------------------------------------------------

enum class Power { ONE, HALF, TWO, ANY };  // k; of the first three, one exponential gives two

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
    // Without another class, any finite number will do.
    keep(top, lanes(top) == T(-INF) ? V{} : lanes(top));

    for (int t = 0; t < batch.tiles; ++t) {
        V *const tile = tiles + t * steps;
        const V highest = lanes<ROW>(top, t), k = lanes<ROW>(exponent, t);
        // Summed in float64, by fours before: k multiplies the rounding errors.
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
        const doubles each = sum_k == 0.0 ? 0.0 * push : push / sum_k;  // NaN stays
        // Where nothing counts, the gradient is 0 whatever the logits, even NaN.
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

// --- soft targets ---------------------------------------------------------------------------------

// sign(e) |e|^k, added to the sum of its side.
INLINE doubles powered(doubles e, Power power, doubles &positive, doubles &negative) {
    doubles size = abs(e);
    if (power == Power::HALF) size = sqrt(size);
    if (power == Power::TWO) size *= size;
    positive += e < 0.0 ? doubles{} : size;
    negative += e < 0.0 ? size : doubles{};
    return power == Power::ONE ? e : with_sign_of(e, size);
}

// With e = p - t / W, for a target t with the sum W, the rule is
//   f_j = W sign(e_j) S^k |e_j|^k / sum of |e_i|^k with the same sign,   S = sum of e_j > 0.
// Where p and t / W agree, their difference cancels, so everything is in float64.
template <class S, bool ROW>
INLINE int64_t soft_batch(const Problem &p, void *memory, int64_t first, int count, Power power,
                          double scale, double &value_sum) {
    constexpr int N = LANES<double>;
    Batch<S, double, ROW> batch(p, first, count);
    const int64_t wrong = batch.prepare(scale), steps = batch.steps;
    if (wrong != RIGHT) return wrong;
    alignas(BYTES) double top[N] = {}, whole[N] = {}, rest[N] = {}, tops[N] = {}, distance[N] = {};
    alignas(BYTES) double strength[N] = {}, above[N] = {}, below[N] = {}, value[N];
    // Tiles of z - top, of e (before that exp(z - top)), and of t (later log |e|).
    doubles *const tiles = static_cast<doubles *>(memory);
    const double spread = p.smoothing / double(p.classes);

    for (int t = 0; t < batch.tiles; ++t) {
        doubles *const z = tiles + 3 * t * steps, *const target = z + 2 * steps;
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
        doubles *const z = tiles + 3 * t * steps, *const e = z + steps, *const target = e + steps;
        const doubles highest = lanes<ROW>(top, t);
        doubles small{}, equal{}, away{};
        for (int64_t s = 0; s < steps; ++s) {
            const doubles d = z[s] - highest, power_of_e = exp_or_nearly_0(d);
            small += d == 0.0 ? doubles{} : power_of_e;  // apart: beside 1 they would be rounded
            equal += d == 0.0 ? all(1.0) : doubles{};
            away += target[s] == 0.0 ? doubles{} : target[s] * d;  // 0 times infinity is 0
            z[s] = d;
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

    alignas(BYTES) double of_total[N], of_whole[N];
    keep(of_total, 1.0 / total);
    keep(of_whole, 1.0 / w);
    for (int t = 0; t < batch.tiles; ++t) {
        doubles *const e = tiles + (3 * t + 1) * steps, *const target = e + steps;
        const doubles by_total = lanes<ROW>(of_total, t), by_whole = lanes<ROW>(of_whole, t);
        const doubles all_of_it = lanes<ROW>(whole, t);
        doubles sum{}, positive{}, negative{};
        for (int64_t s = 0; s < steps; ++s) {
            doubles bias = e[s] * by_total - target[s] * by_whole;
            // A class with the whole target has its side to itself, wherever its e is rounded to.
            bias = target[s] == all_of_it ? all(-1.0) : bias;
            sum += bias > 0.0 ? bias : doubles{};
            if (power != Power::ANY) bias = powered(bias, power, positive, negative);
            e[s] = bias;
        }
        keep_sum<ROW>(strength, t, &sum);
        keep_sum<ROW>(above, t, &positive);
        keep_sum<ROW>(below, t, &negative);
    }

    doubles dead = {}, of_strength = lanes(strength);
    if (power == Power::HALF) of_strength = sqrt(of_strength);
    if (power == Power::TWO) of_strength *= of_strength;
    alignas(BYTES) double above_top[N] = {}, below_top[N] = {}, log_total[N];
    if (power == Power::ANY) {
        alignas(BYTES) double most[N] = {}, least[N] = {};
        keep(log_total, log(total));
        for (int t = 0; t < batch.tiles; ++t) {
            doubles *const d = tiles + 3 * t * steps, *const e = d + steps, *const sizes = e + steps;
            const doubles logarithm = lanes<ROW>(log_total, t);
            doubles largest = all(-double(INF)), smallest = all(-double(INF));
            for (int64_t s = 0; s < steps; ++s) {
                const doubles size = abs(e[s]), of_size = log(larger(size, all(0x1p-1022)));
                // Off the target that is log p, which does not underflow.
                sizes[s] = sizes[s] == 0.0 ? d[s] - logarithm : size > 0.0 ? of_size : all(-double(INF));
                largest = larger(e[s], largest), smallest = larger(-e[s], smallest);
            }
            keep_largest<ROW>(most, t, largest);
            keep_largest<ROW>(least, t, smallest);
        }
        doubles log_strength = log(lanes(strength));
        keep(above_top, log(lanes(most)));
        keep(below_top, log(lanes(least)));
        // In a smaller sum some e have underflowed; the sum of their logarithms still has them.
        const longs tiny = lanes(strength) < 1e-290;
        for (int t = 0; t < batch.tiles; ++t) {
            if (ROW && !tiny[t]) continue;
            doubles *const e = tiles + (3 * t + 1) * steps, *const sizes = e + steps;
            bool any = ROW;
            for (int l = 0; l < N; ++l) any |= bool(tiny[l]);
            if (!any) continue;
            alignas(BYTES) double best[N] = {}, sums[N] = {};
            doubles largest = all(-double(INF)), sum{};
            for (int64_t s = 0; s < steps; ++s)
                largest = larger(e[s] >= 0.0 ? sizes[s] : all(-double(INF)), largest);
            keep_largest<ROW>(best, t, largest);
            for (int64_t s = 0; s < steps; ++s)
                sum += e[s] >= 0.0 ? exp(sizes[s] - lanes<ROW>(best, t)) : doubles{};
            keep_sum<ROW>(sums, t, &sum);
            for (int l = batch.begin(t); l < batch.end(t); ++l) {
                if (!tiny[l]) continue;
                above_top[l] = best[l];
                log_strength[l] = best[l] + log(all(sums[l]))[0];
            }
        }
        dead = (lanes(least) <= 0.0) | (lanes(above_top) == -double(INF)) ? all(1.0) : doubles{};
        // Rounded above 0, a large k would make it infinite.
        log_strength = (log_strength < 1e-9) & (log_strength > 0.0) ? doubles{} : log_strength;
        const doubles exponent = lanes(batch.k) * log_strength;
        of_strength = exponent > 709.0 ? all(double(INF)) : exp(exponent);
    }
    for (int t = 0; t < batch.tiles && power == Power::ANY; ++t) {
        doubles *const e = tiles + (3 * t + 1) * steps, *const sizes = e + steps;
        const doubles k = lanes<ROW>(batch.k, t), up = lanes<ROW>(above_top, t), down = lanes<ROW>(below_top, t);
        doubles positive{}, negative{};
        for (int64_t s = 0; s < steps; ++s) {
            const doubles exponent = k * (sizes[s] - (e[s] < 0.0 ? down : up));
            const doubles size = exp(exponent > 0.0 ? doubles{} : exponent);  // a rounded top may be low
            positive += e[s] < 0.0 ? doubles{} : size;
            negative += e[s] < 0.0 ? size : doubles{};
            e[s] = with_sign_of(e[s], size);
        }
        keep_sum<ROW>(above, t, &positive);
        keep_sum<ROW>(below, t, &negative);
    }

    const doubles factor = lanes(batch.factor), push = factor * w * of_strength;
    doubles up = push / lanes(above), down = push / lanes(below);
    // No side pushes alone (Eq. 4).
    const longs alone = (lanes(above) == 0.0) | (lanes(below) == 0.0) | (dead != 0.0);
    up = alone ? doubles{} : up, down = alone ? doubles{} : down;
    const longs known = total + abs(w) < double(INF);
    up = known ? up : all(NOT_A_NUMBER), down = known ? down : all(NOT_A_NUMBER);
    alignas(BYTES) double up_share[N], down_share[N], silent[N];
    keep(up_share, up);
    keep(down_share, down);
    // Without a target or an upstream gradient it is 0 whatever the logits, even NaN.
    keep(silent, (factor == 0.0) | (w == 0.0) | (alone & known) ? all(1.0) : doubles{});
    for (int t = 0; t < batch.tiles; ++t) {
        doubles *const e = tiles + (3 * t + 1) * steps;
        const doubles none = lanes<ROW>(silent, t), of_up = lanes<ROW>(up_share, t), of_down = lanes<ROW>(down_share, t);
        for (int64_t s = 0; s < steps; ++s)
            e[s] = none == 0.0 ? e[s] * (e[s] < 0.0 ? of_down : of_up) : doubles{};
        batch.store_gradient(e, t);
    }
    return RIGHT;
}

// --- all examples, on several threads -------------------------------------------------------------

typedef void Parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags);

constexpr int MOST_THREADS = 256;
constexpr int64_t WORTH_SHARING = 1 << 15;  // numbers
constexpr int64_t TILE_BYTES = 1 << 14;     // for the tiles of a batch, unless one takes more

template <class S, bool SOFT>
struct Job {
    const Problem &p;
    const int parts;
    const double scale;
    int next = 0;
    double sums[MOST_THREADS] = {};
    int64_t wrong[MOST_THREADS] = {};

    template <bool ROW>
    INLINE int64_t run(int64_t start, int64_t stop, Power power, double &sum) {
        using T = std::conditional_t<SOFT, double, Working<S>>;
        constexpr int N = LANES<T>;
        const int64_t tile = BYTES * (SOFT ? 3 : 1) * (ROW ? (p.classes + N - 1) / N : p.classes);
        int64_t at_once = ROW ? TILE_BYTES / tile : N;
        at_once = at_once < 1 ? 1 : at_once > N ? N : at_once;
        const int64_t size = ROW ? at_once * tile : tile;
        alignas(BYTES) char little[TILE_BYTES];
        void *const memory = size <= TILE_BYTES ? little : std::aligned_alloc(BYTES, size);
        int64_t found = memory ? RIGHT : NO_MEMORY;
        for (int64_t i = start, count; i < stop && found == RIGHT; i += count) {
            const int64_t left = p.positions - i % p.positions;
            count = left < stop - i ? left : stop - i;
            count = count < at_once ? count : at_once;
            found = SOFT ? soft_batch<S, ROW>(p, memory, i, int(count), power, scale, sum)
                         : labels_batch<S, ROW>(p, memory, i, int(count), power, scale, sum);
        }
        if (memory != little) std::free(memory);
        return found;
    }

    void run_part() {
        const int part = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
        if (part >= parts) return;
        const int64_t start = p.examples * part / parts, stop = p.examples * (part + 1) / parts;
        const double k = p.k ? 0.0 : p.k_of_all;
        const Power power = k == 1 ? Power::ONE : k == 0.5 ? Power::HALF : k == 2 ? Power::TWO : Power::ANY;
        const bool rows = p.classes >= ROWS_FROM && p.of_logits.classes == 1 &&
                          (!p.gradient || p.of_gradient.classes == 1) &&
                          (!p.probabilities || p.of_probabilities.classes == 1);
        double sum = 0;
        wrong[part] = rows ? run<true>(start, stop, power, sum) : run<false>(start, stop, power, sum);
        sums[part] = sum;
    }
};

// --- two classes ----------------------------------------------------------------------------------

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

// Ask for huge pages, which PyTorch does not: much of a large gradient's time goes to page faults.
// From 32 MB on, glibc gets new memory from the system each time.
INLINE void prefer_huge_pages(const void *memory, int64_t bytes) {
#if defined(__linux__)
    constexpr uintptr_t PAGE = 1 << 21;
    if (bytes < 1 << 25) return;
    const uintptr_t start = (reinterpret_cast<uintptr_t>(memory) + PAGE - 1) / PAGE * PAGE;
    const uintptr_t stop = (reinterpret_cast<uintptr_t>(memory) + uintptr_t(bytes)) / PAGE * PAGE;
    if (start < stop) madvise(reinterpret_cast<void *>(start), stop - start, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

// The sum of the labels' weights: the divisor of a mean.
INLINE double weight_of(const Problem &p) {
    if (!p.labels) return double(p.examples);
    double sum = 0;
    int64_t counted = 0;
    for (int64_t i = 0; i < p.examples && !p.weight; ++i) counted += p.labels[i] != p.ignore_index;
    for (int64_t i = 0; i < p.examples && p.weight; ++i) {
        const int64_t y = p.labels[i];
        if (y != p.ignore_index && uint64_t(y) < uint64_t(p.classes)) sum += p.weight[y];
    }
    return sum + double(counted);
}

INLINE int parts_of(int64_t examples, int64_t numbers, Parallel *parallel, int64_t threads) {
    threads = threads < examples ? threads : examples;
    threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    return !parallel || threads <= 1 || numbers < WORTH_SHARING ? 1 : int(threads);
}

// Returns RIGHT, or what is wrong: NO_MEMORY, WRONG_K, or the index of an example whose label is no
// class.
template <class T, class J>
INLINE int64_t run_parts(J &job, Parallel *parallel, double divisor) {
    if (job.parts > 1)
        parallel([](void *data) { static_cast<J *>(data)->run_part(); }, &job, unsigned(job.parts), 0);
    while (job.next < job.parts) job.run_part();  // fewer threads may come than were asked for
    double sum = 0;
    for (int part = 0; part < job.parts; ++part) {
        if (job.wrong[part] != RIGHT) return job.wrong[part];
        sum += job.sums[part];
    }
    // A mean of nothing is NaN, as in PyTorch.
    if (job.p.reduced) *static_cast<T *>(job.p.reduced) = T(divisor == 0 ? NOT_A_NUMBER : sum / divisor);
    return RIGHT;
}

template <class S, bool SOFT>
INLINE int64_t run(const Problem &p, Parallel *parallel, int64_t threads) {
    const double divisor = p.mean ? weight_of(p) : 1.0;
    const int64_t numbers = p.examples * p.classes;
    if (p.gradient && p.gradient != p.logits) prefer_huge_pages(p.gradient, numbers * sizeof(S));
    const int parts = parts_of(p.examples, numbers, parallel, threads);
    Job<S, SOFT> job{p, parts, divisor == 0 ? 0.0 : 1 / divisor};
    return run_parts<Working<S>>(job, parallel, divisor);
}

template <class T>
INLINE int64_t run_binary(const BinaryProblem &p, Parallel *parallel, int64_t threads) {
    const double divisor = p.mean ? double(p.count) : 1.0;
    if (p.gradient) prefer_huge_pages(p.gradient, p.count * sizeof(T));
    const int parts = parts_of(p.count, p.count, parallel, threads);
    BinaryJob<T> job{p, parts, divisor == 0 ? 0.0 : 1 / divisor};
    return run_parts<T>(job, parallel, divisor);
}

template <class S>
INLINE int64_t run(const Problem &p, Parallel *parallel, int64_t threads) {
    const bool soft = p.probabilities || p.smoothing > 0;
    return soft ? run<S, true>(p, parallel, threads) : run<S, false>(p, parallel, threads);
}

}  // namespace

extern "C" {

const char *source() { return SOURCE; }  // a hash of this file, by which Python knows an old build

int64_t loss_float32(const Problem *p, Parallel *parallel, int64_t threads) {
    return run<float>(*p, parallel, threads);
}
int64_t loss_float64(const Problem *p, Parallel *parallel, int64_t threads) {
    return run<double>(*p, parallel, threads);
}
int64_t loss_bfloat16(const Problem *p, Parallel *parallel, int64_t threads) {
    return run<bfloat16>(*p, parallel, threads);
}
int64_t loss_float16(const Problem *p, Parallel *parallel, int64_t threads) {
    return run<float16>(*p, parallel, threads);
}
int64_t binary_float32(const BinaryProblem *p, Parallel *parallel, int64_t threads) {
    return run_binary<float>(*p, parallel, threads);
}
int64_t binary_float64(const BinaryProblem *p, Parallel *parallel, int64_t threads) {
    return run_binary<double>(*p, parallel, threads);
}
}
