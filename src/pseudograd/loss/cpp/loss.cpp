// The loss on a CPU: values and pseudo-gradients of many examples, in one pass over the logits.
//
// Labels follow the paper's Eq. 5, soft targets its extension. `pseudograd.rules.paper` has both in
// PyTorch, `pseudograd.loss.triton` in Triton, `pseudograd.jax` in JAX. `cpu.py` calls these
// functions, which do not depend on Python or PyTorch.
//
// Work is done in tiles, whose steps are vectors of N numbers (N = 16 floats with AVX-512):
//   - in a column tile, each lane is an example and each step a class;
//   - a row tile is one example, whose classes fill the steps in order.
// Both run the same code; in a row tile, sums and maxima are also reduced over the lanes.
// Columns suit few classes and layouts like (N, C, H, W), rows suit many classes.

#include <cstdlib>

#include "binary.h"
#include "labels.h"
#include "soft.h"
#include "threads.h"

namespace {

constexpr int64_t ROWS_FROM = 64;        // row tiles are faster from this many classes on
constexpr int64_t TILE_BYTES = 1 << 14;  // of stack for the tiles of a batch; larger ones are allocated

template <class S, bool SOFT>
struct Job {
    const Problem &p;
    const int parts;
    const double scale;
    int next = 0;
    double sums[MOST_THREADS] = {};
    int64_t wrong[MOST_THREADS] = {};

    // Inlined, rows and columns would share their registers, and take 3 to 6% longer.
    template <bool ROW>
    __attribute__((noinline)) int64_t run(int64_t start, int64_t stop, Power power, doubles &sum) {
        using T = std::conditional_t<SOFT, double, Working<S>>;
        constexpr int N = LANES<T>;
        const int64_t steps = ROW ? (p.classes.size + N - 1) / N : p.classes.size;
        const int64_t tile = BYTES * (!SOFT ? 1 : power == Power::ANY ? 3 : 2) * steps;
        int64_t at_once = ROW ? TILE_BYTES / tile : MOST;
        at_once = at_once < 1 ? 1 : at_once > MOST ? MOST : at_once;
        const int64_t size = tile * (ROW ? at_once : MOST / N);
        alignas(BYTES) char little[TILE_BYTES];
        void *const memory = size <= TILE_BYTES ? little : std::aligned_alloc(BYTES, size);
        int64_t found = memory ? RIGHT : NO_MEMORY;
        while (start < stop && found == RIGHT) {
            Place place(p, start);
            int64_t left = place.left < stop - start ? place.left : stop - start;
            for (start += left; left > 0 && found == RIGHT; left -= at_once) {
                const int count = int(left < at_once ? left : at_once);
                found = SOFT ? soft_batch<S, ROW>(p, memory, place, count, power, scale, sum)
                             : labels_batch<S, ROW>(p, memory, place, count, power, scale, sum);
                place.move(p.dimensions[DIMENSIONS - 1], count);
            }
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
        const bool rows = p.classes.size >= ROWS_FROM && p.classes.logits == 1 &&
                          (!p.gradient || p.classes.gradient == 1) &&
                          (!p.probabilities || p.classes.probabilities == 1);
        doubles sum{};
        wrong[part] = rows ? run<true>(start, stop, power, sum) : run<false>(start, stop, power, sum);
        keep_sum<true>(sums, part, &sum);
    }
};

// The sum of the labels' weights: the divisor of a mean.
INLINE double weight_of(const Problem &p) {
    if (!p.labels) return double(p.examples);
    double sum = 0;
    int64_t counted = 0;
    for (int64_t i = 0; i < p.examples && !p.weight; ++i) counted += p.labels[i] != p.ignore_index;
    for (int64_t i = 0; i < p.examples && p.weight; ++i) {
        const int64_t y = p.labels[i];
        if (y != p.ignore_index && uint64_t(y) < uint64_t(p.classes.size)) sum += p.weight[y];
    }
    return sum + double(counted);
}

template <class S, bool SOFT>
INLINE int64_t run(const Problem &p, Parallel *parallel, int64_t threads) {
    const double divisor = p.mean ? weight_of(p) : 1.0;
    const int64_t numbers = p.examples * p.classes.size;
    if (p.gradient && p.gradient != p.logits) prefer_huge_pages(p.gradient, numbers * sizeof(S));
    const int parts = parts_of(p.examples, numbers, parallel, threads);
    Job<S, SOFT> job{p, parts, divisor == 0 ? 0.0 : 1 / divisor};
    return run_parts<Working<S>>(job, parallel, divisor);
}

template <class S>
INLINE int64_t run(const Problem &p, Parallel *parallel, int64_t threads) {
    const bool soft = p.probabilities || p.smoothing > 0;
    return soft ? run<S, true>(p, parallel, threads) : run<S, false>(p, parallel, threads);
}

}  // namespace

extern "C" {

const char *source() { return SOURCE; }  // a hash of the sources, by which Python detects a stale build

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
