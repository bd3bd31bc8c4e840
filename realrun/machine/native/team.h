/* Teams of threads, one for each calling thread. Between calls they spin for a moment, and then sleep. */
#pragma once

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#define SPINS 1000 /* 10 to 40 us: longer than the time between two experts, but short for waiting threads */

static inline void spin(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Wait until `value` is `wanted`: spin, and after a while yield the core. */
static void await(atomic_long *value, long wanted) {
    for (long spins = 0; atomic_load_explicit(value, memory_order_acquire) != wanted; spins++)
        spins < SPINS ? spin() : (void)sched_yield();
}

/* Takes the blocks from *first to the returned one, which no thread has begun: many at first, since neighbours are read
 * fastest in sequence, and single ones in the end, so that a delayed thread does not delay the others. */
static long take(atomic_long *begun, long blocks, int threads, long *first) {
    *first = atomic_load(begun);
    for (;;) {
        long share = (blocks - *first) / (2 * threads), end = *first + (share > 1 ? share : 1);
        if (*first >= blocks || atomic_compare_exchange_weak(begun, first, end)) return end < blocks ? end : blocks;
    }
}

typedef void share_t(void *job, int threads); /* a thread's share of a job */

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    atomic_long calls, busy; /* number of calls; threads at work on the last one */
    share_t *share;          /* of each thread */
    void *job;               /* NULL: done, so that a thread that wakes late is not awaited */
    int ends, others;
    pthread_t threads[];
} team_t;

static void *serve(void *argument) {
    team_t *team = argument;
    for (long seen = 0;;) {
        for (long spins = 0; atomic_load(&team->calls) == seen && spins < SPINS; spins++) spin();
        pthread_mutex_lock(&team->lock);
        while (atomic_load(&team->calls) == seen) pthread_cond_wait(&team->wake, &team->lock);
        seen = atomic_load(&team->calls);
        share_t *share = team->share;
        void *job = team->job;
        int ends = team->ends;
        if (job != NULL) atomic_fetch_add(&team->busy, 1);
        pthread_mutex_unlock(&team->lock);
        if (ends) return NULL;
        if (job == NULL) continue;
        share(job, team->others + 1);
        atomic_fetch_sub(&team->busy, 1);
    }
}

static void call(team_t *team, share_t *share, void *job) {
    pthread_mutex_lock(&team->lock);
    team->share = share;
    team->job = job;
    team->ends = job == NULL;
    atomic_fetch_add(&team->calls, 1);
    pthread_cond_broadcast(&team->wake);
    pthread_mutex_unlock(&team->lock);
}

/* Returns when all parts of a job that were begun have ended. */
static void work_together(team_t *team, share_t *share, void *job) {
    if (team->others > 0) call(team, share, job);
    share(job, team->others + 1);
    pthread_mutex_lock(&team->lock);
    team->job = NULL;
    pthread_mutex_unlock(&team->lock);
    await(&team->busy, 0);
}

/* Ends the team's threads. */
void team_end(team_t *team) {
    call(team, NULL, NULL);
    for (int thread = 0; thread < team->others; thread++) pthread_join(team->threads[thread], NULL);
    free(team);
}

/* A team of `threads`, including the caller, on the caller's cores; NULL if the system has no more threads. */
team_t *team_of(int threads) {
    team_t *team = calloc(1, sizeof *team + (size_t)threads * sizeof(pthread_t));
    if (team == NULL) return NULL;
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->wake, NULL);
    for (; team->others < threads - 1; team->others++)
        if (pthread_create(&team->threads[team->others], NULL, serve, team) != 0) {
            team_end(team);
            return NULL;
        }
    return team;
}
