/* Tiles of work divided between threads by what they cost. */
#ifndef LORAPLEX_SHARES_H
#define LORAPLEX_SHARES_H

#include "vector.h"

ALWAYS_INLINE long parts(long n, long size) { return (n + size - 1) / size; }

/* Tiles of one cost, side by side in memory. */
typedef struct {
    long count, cost;
} Run;

typedef struct {
    long first, last;
} Range;

/* Of the tiles of all runs, in order, those that begin in one thread's part of the whole cost. So each thread
 * reads long stretches of memory, and hardly writes beside another, whose core fetches ahead what lies behind
 * its own. */
typedef struct {
    long first, last, at;
} Share;

ALWAYS_INLINE long cost_of(Run run) { return run.count * run.cost; }

ALWAYS_INLINE Share share_of(long total, long thread, long threads) {
    return (Share){total * thread / threads, total * (thread + 1) / threads, 0};
}

/* The share's tiles of the next run. */
ALWAYS_INLINE Range take(Share *share, Run run) {
    long first = share->first - share->at, last = share->last - share->at;
    share->at += cost_of(run);
    if (run.count == 0 || last <= 0 || first >= cost_of(run)) return (Range){0, 0};
    return (Range){first <= 0 ? 0 : parts(first, run.cost), least(run.count, parts(last, run.cost))};
}

#endif
