// SIMD vectors, as wide as the processor's registers, and elementary functions of them.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#define INLINE inline __attribute__((always_inline))

// The width of a register, and the lanes in the low and the high half of a vector of floats.
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
typedef float some_floats __attribute__((vector_size(BYTES / 2)));
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
template <>
struct VectorOf<int32_t> {
    typedef ints type;
};
template <>
struct VectorOf<int64_t> {
    typedef longs type;
};
template <class T>
using Vector = typename VectorOf<T>::type;

template <class T>
constexpr int LANES = BYTES / sizeof(T);
template <class T>
constexpr int PARTS = sizeof(double) / sizeof(T);  // vectors of doubles per vector of T

constexpr longs FIRST = {LOW};  // the indices of the lanes
constexpr float INF = __builtin_inff();
constexpr double NOT_A_NUMBER = __builtin_nan("");

// --- elementary functions on vectors -------------------------------------------------------------

INLINE floats all(float x) { return x - floats{}; }
INLINE doubles all(double x) { return x - doubles{}; }
INLINE longs all(int64_t x) { return x - longs{}; }

template <class V>
INLINE V larger(V a, V b) {
    return a > b ? a : b;
}

// exp(x) for x <= 0 within an ulp; 0 below -88. Cephes' coefficients.
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

// exp(x) for x <= 0 with a relative error of 5e-16; below -708 a negligible 3e-308. A Taylor series,
// summed in pairs to shorten the dependency chain.
INLINE doubles exp_or_nearly_0(doubles x) {
    const doubles round = all(6755399441055744.0);  // 1.5 * 2^52 leaves integers in the last bits
    x = x < -708.0 ? all(-708.0) : x;
#if defined(__AVX512F__)
    // 2^(n / 8) exp(r) with |r| < 0.044: a register holds the eight roots.
    const doubles roots = {1.0, 1.0905077326652577, 1.189207115002721, 1.2968395546510096,
                           1.4142135623730951, 1.5422108254079407, 1.681792830507429, 1.8340080864093424};
    const doubles shifted = x * (8 * 1.4426950408889634) + round;
    const doubles n = shifted - round;
    const doubles r = (x - n * (6.93145751953125e-1 / 8)) - n * (1.42860682030941723212e-6 / 8);
    const doubles square = r * r;
    const doubles high = (r * (1 / 5040.0) + 1 / 720.0) * square + (r * (1 / 120.0) + 1 / 24.0);
    const doubles p = (high * square + (r * (1 / 6.0) + 0.5)) * square + r;  // exp(r) - 1
    const doubles root = __builtin_shuffle(roots, (longs)shifted);
    const doubles scale = (doubles)((words)root + ((words)shifted >> 3 << 52));
    return p * scale + scale;
#else
    const doubles shifted = x * 1.4426950408889634 + round;
    const doubles n = shifted - round;
    const doubles r = (x - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6;
    const doubles square = r * r, fourth = square * square;
    const doubles tenth = (r * (1 / 39916800.0) + 1 / 3628800.0) + square * (1 / 479001600.0);
    const doubles eighth = tenth * square + (r * (1 / 362880.0) + 1 / 40320.0);
    const doubles sixth = r * (1 / 5040.0) + 1 / 720.0, to_fifth = r * (1 / 120.0) + 1 / 24.0;
    const doubles high = eighth * fourth + (sixth * square + to_fifth);
    const doubles p = (high * square + (r * (1 / 6.0) + 0.5)) * square + r + 1.0;
    return p * (doubles)(((words)shifted << 52) + 0x3FF0000000000000);
#endif
}

INLINE doubles exp(doubles x) { return x < -708.0 ? doubles{} : exp_or_nearly_0(x); }

// x = m 2^n with m from sqrt(1/2) to sqrt(2), for x > 0.
INLINE doubles exponent_of(doubles x, doubles &m) {
    const uint64_t one = 0x3FF0000000000000, root_of_half = 0x3FE6A09E667F3BCD;
    const words n = ((words)x - root_of_half + one) >> 52;  // plus 1023
    m = (doubles)((words)x - (n << 52) + one);
    return (doubles)(n | 0x4330000000000000) - (4503599627370496.0 + 1023.0);
}

// log(x) for x >= 0 within 1e-15, by the series of log((1 + s) / (1 - s)).
INLINE doubles log(doubles x) {
    doubles m;
    const doubles exponent = exponent_of(x, m), s = (m - 1.0) / (m + 1.0), square = s * s;
    doubles p = square * (2.0 / 17) + 2.0 / 15;
    p = p * square + 2.0 / 13;
    p = p * square + 2.0 / 11;
    p = p * square + 2.0 / 9;
    p = p * square + 2.0 / 7;
    p = p * square + 2.0 / 5;
    p = p * square + 2.0 / 3;
    p = p * square + 2.0;
    const doubles y = exponent * 6.93145751953125e-1 + (exponent * 1.42860682030941723212e-6 + s * p);
    const doubles positive = x > 0.0 ? y : all(-double(INF));
    return x < double(INF) ? positive : x;  // keeps infinity and NaN
}

// The same within 5e-9 and without a division, for normal x and float32 results. Cephes' coefficients.
INLINE doubles rough_log(doubles x) {
    doubles m;
    const doubles exponent = exponent_of(x, m), u = m - 1.0, square = u * u;
    const doubles low = (u * 2.0000714765e-1 - 2.4999993993e-1) * u + 3.3333331174e-1;
    const doubles middle = (u * -1.2420140846e-1 + 1.4249322787e-1) * u - 1.6668057665e-1;
    const doubles high = (u * 7.0376836292e-2 - 1.1514610310e-1) * u + 1.1676998740e-1;
    const doubles p = (high * square * u + middle) * square * u + low;
    return exponent * 0.6931471805599453 + ((p * u - 0.5) * square + u);
}

// log x for x >= 0, as precise as results in T need; -infinity for NaN.
template <class T>
INLINE doubles log_of(doubles x) {
    const doubles normal = larger(x, all(0x1p-1022));
    const doubles y = std::is_same_v<T, double> ? log(normal) : rough_log(normal);
    return x > 0.0 ? y : all(-double(INF));
}

// log(1 + x) for x >= 0, as precise as results in T need.
template <class T>
INLINE doubles log1p(doubles x) {
    const doubles u = x + 1.0, rounded = x - (u - 1.0);
    if (std::is_same_v<T, double>) return log(u) + rounded / u;
    return rough_log(u) + (x > 1.0 ? doubles{} : rounded);  // NaN is kept
}

INLINE doubles sqrt(doubles x) {
    for (size_t l = 0; l < sizeof x / sizeof(double); ++l) x[l] = __builtin_sqrt(x[l]);
    return x;
}

INLINE bool any(longs x) {
    int64_t found = 0;
    for (size_t l = 0; l < sizeof x / sizeof(double); ++l) found |= x[l];
    return found;
}

INLINE doubles abs(doubles x) { return (doubles)((words)x & 0x7FFFFFFFFFFFFFFF); }

// |size| with the sign of x.
INLINE doubles with_sign_of(doubles x, doubles size) {
    return (doubles)((words)size | ((words)x & 0x8000000000000000));
}

INLINE doubles widened(floats x, int part) {
    return part ? __builtin_convertvector(__builtin_shufflevector(x, x, HIGH), doubles)
                : __builtin_convertvector(__builtin_shufflevector(x, x, LOW), doubles);
}
INLINE doubles widened(doubles x, int) { return x; }

}  // namespace
