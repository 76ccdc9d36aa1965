// Work shared among threads, and memory in huge pages.

#pragma once

#include <cstdint>

#include "tiles.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

typedef void Parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags);

constexpr int MOST_THREADS = 256;
constexpr int64_t WORTH_SHARING = 1 << 15;  // numbers

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

}  // namespace
