// Work split among threads, and huge pages for large gradients.

#pragma once

#include <cstdint>

#include "tiles.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

typedef void Parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags);

constexpr int MOST_THREADS = 256;
constexpr int64_t WORTH_SHARING = 1 << 15;  // elements

// Requests huge pages, because page faults take much of the time of a large gradient: from 32 MB on,
// glibc maps new memory for every allocation.
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

INLINE int parts_of(int64_t examples, int64_t numbers, Parallel *parallel, int64_t threads) {
    threads = threads < examples ? threads : examples;
    threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    return !parallel || threads <= 1 || numbers < WORTH_SHARING ? 1 : int(threads);
}

// Returns RIGHT or an error: NO_MEMORY, WRONG_K, or the index of an example with an invalid label.
template <class T, class J>
INLINE int64_t run_parts(J &job, Parallel *parallel, double divisor) {
    if (job.parts > 1)
        parallel([](void *data) { static_cast<J *>(data)->run_part(); }, &job, unsigned(job.parts), 0);
    while (job.next < job.parts) job.run_part();  // OpenMP may provide fewer threads than requested
    double sum = 0;
    for (int part = 0; part < job.parts; ++part) {
        if (job.wrong[part] != RIGHT) return job.wrong[part];
        sum += job.sums[part];
    }
    // The mean of no examples is NaN, as in PyTorch.
    if (job.p.reduced) *static_cast<T *>(job.p.reduced) = T(divisor == 0 ? NOT_A_NUMBER : sum / divisor);
    return RIGHT;
}

}  // namespace
