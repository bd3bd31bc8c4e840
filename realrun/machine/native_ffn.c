/* One expert of bfloat16 weights on the CPU, from its rows to their weighted results: for a few rows at a time, which
 * is when an expert takes as long as its weights take to be read.
 *
 * Sums are of float32; they are rounded to bfloat16 where torch's operations round, so that both differ by the order of
 * additions alone. A sum does not depend on how many rows or threads there are. Weights are read once for all rows.
 *
 * Compiled on first use for the processor at hand (native_library.py); native_ffn.py is the one caller.
 */
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 8")
#endif
#define SPINS 1000      /* 10 to 40 us: longer than from one expert to the next, and not long for others to wait */

INLINE float float_of(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

/* To nearest, ties to even. */
INLINE uint16_t bfloat16_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float rounded(float value) { return float_of(bfloat16_of(value)); }

/* ROWS weight rows and TOKENS vectors make a tile: as many sums as there are registers for. Up to FEW vectors are
 * multiplied row by row, as memory is read fastest: from one place on. For more than ONLY_UP_TO rows of an expert torch
 * is faster; on x86 it has matrix kernels for bfloat16 where there is AVX512-BF16, and never is elsewhere. Both are
 * measured (tests/bench/cpu_kernel.py). */
#define TOKENS 4
#define MOST_TOKENS 32 /* for which weights are read once */

/* --- a step: so many neighbouring weights of a row, times as many values ------------------------------------------ */

#if defined(__AVX512BF16__)

#include <immintrin.h>
#define KERNEL "native-avx512bf16"
#define STEP 32
#define ROWS 6
#define FEW 4
#define ONLY_UP_TO 32
typedef uint16_t value_t;
typedef __m512 sums_t;
typedef __m512bh weights_t;

INLINE weights_t weights_at(const uint16_t *row) { return (__m512bh)_mm512_loadu_si512(row); }
INLINE sums_t add_step(sums_t sums, weights_t weights, const value_t *values) {
    return _mm512_dpbf16_ps(sums, weights, (__m512bh)_mm512_loadu_si512(values));
}
INLINE float total(sums_t sums) { return _mm512_reduce_add_ps(sums); }
INLINE void put_value(value_t *values, long place, uint16_t value) { values[place] = value; }

#else /* vectors as GCC and Clang have them on every processor; a bfloat16 is the upper half of a float */

#if defined(__AVX512F__)
#define KERNEL "native-avx512"
#define ONLY_UP_TO INT_MAX
#define BYTES 64
#define ROWS 6
#elif defined(__AVX2__) && defined(__FMA__)
#define KERNEL "native-avx2"
#define ONLY_UP_TO INT_MAX
#define BYTES 32
#define ROWS 3
#else
#define KERNEL "native-generic"
#define ONLY_UP_TO FEW /* not measured where torch has kernels for bfloat16, such as ARM */
#define BYTES 16
#define ROWS 3
#endif
#define FEW 2
#define LANES (BYTES / 4)
#define STEP (2 * LANES)
typedef float value_t; /* of every step, first those at even places, then those at odd ones */
typedef float sums_t __attribute__((vector_size(BYTES)));
typedef uint32_t weights_t __attribute__((vector_size(BYTES)));

INLINE weights_t weights_at(const uint16_t *row) {
    weights_t weights;
    memcpy(&weights, row, sizeof weights);
    return weights;
}
INLINE sums_t add_step(sums_t sums, weights_t weights, const value_t *values) {
    sums_t even, odd;
    memcpy(&even, values, sizeof even);
    memcpy(&odd, values + LANES, sizeof odd);
    sums += (sums_t)(weights << 16) * even;
    return sums + (sums_t)(weights & 0xffff0000u) * odd;
}
INLINE float total(sums_t sums) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    return sum;
}
INLINE void put_value(value_t *values, long place, uint16_t value) {
    long in_step = place % STEP;
    values[place - in_step + in_step % 2 * LANES + in_step / 2] = float_of(value);
}

#endif

/* --- products ----------------------------------------------------------------------------------------------------- */

typedef struct {
    value_t *values; /* tokens vectors, `stride` apart, filled up with 0 to whole steps */
    long length, stride;
    int tokens;
} vectors_t;

/* out[row][token] of `rows` times vectors from the one with number `first` on. With more than two of them at once the
 * processor does not look far enough ahead by itself: it is told of the rows that come next. */
INLINE void tile(
    const uint16_t *const *rows, int count, const vectors_t *vectors, int first, int tokens, float out[][MOST_TOKENS]) {
    const value_t *values = vectors->values + first * vectors->stride;
    long at = 0, length = vectors->length, stride = vectors->stride;
    sums_t sums[ROWS][TOKENS] = {0};
    for (; at + STEP <= length; at += STEP) {
        UNROLLED for (int row = 0; row < count; row++) {
            weights_t weights = weights_at(rows[row] + at);
            if (tokens > 2 && first == 0) __builtin_prefetch(rows[row] + at + ROWS * length, 0, 2);
            UNROLLED for (int token = 0; token < tokens; token++)
                sums[row][token] = add_step(sums[row][token], weights, values + token * stride + at);
        }
    }
    if (at < length)
        UNROLLED for (int row = 0; row < count; row++) {
            uint16_t rest[STEP] = {0};
            memcpy(rest, rows[row] + at, (size_t)(length - at) * sizeof *rest);
            UNROLLED for (int token = 0; token < tokens; token++)
                sums[row][token] = add_step(sums[row][token], weights_at(rest), values + token * stride + at);
        }
    UNROLLED for (int row = 0; row < count; row++)
        UNROLLED for (int token = 0; token < tokens; token++) out[row][first + token] = total(sums[row][token]);
}

/* For each of up to TOKENS vectors from `first` on. */
INLINE void tile_of(
    const uint16_t *const *rows, int count, const vectors_t *vectors, int first, float out[][MOST_TOKENS]) {
    switch (vectors->tokens - first) {
        case 1: tile(rows, count, vectors, first, 1, out); break;
        case 2: tile(rows, count, vectors, first, 2, out); break;
        case 3: tile(rows, count, vectors, first, 3, out); break;
        default: tile(rows, count, vectors, first, TOKENS, out);
    }
}

/* out[row][token] of up to ROWS rows of a matrix, from row `first` on and before row `end`. */
static void product(const uint16_t *matrix, long first, long end, const vectors_t *vectors, float out[][MOST_TOKENS]) {
    const uint16_t *rows[ROWS];
    for (int row = 0; row < ROWS; row++)
        rows[row] = matrix + (first + row < end ? first + row : end - 1) * vectors->length;
    if (vectors->tokens <= FEW)
        for (int row = 0; row < ROWS && first + row < end; row++) tile_of(rows + row, 1, vectors, 0, out + row);
    else
        for (int token = 0; token < vectors->tokens; token += TOKENS) tile_of(rows, ROWS, vectors, token, out);
}

static int vectors_of(vectors_t *vectors, long length, int tokens) {
    long filled = (length + STEP - 1) / STEP * STEP;
    *vectors = (vectors_t){.length = length, .stride = filled + STEP, .tokens = tokens}; /* not a multiple of 4 KiB */
    vectors->values = calloc((size_t)vectors->stride * (size_t)tokens, sizeof(value_t));
    return vectors->values != NULL;
}

/* --- an expert ---------------------------------------------------------------------------------------------------- */

typedef struct {
    const uint16_t *first, *down; /* [width or, with a gate, 2 width, hidden], [hidden, width] */
    const uint16_t *x;            /* [.., hidden] */
    const int64_t *choices;       /* number n * top_k + j: of row n of x, weighted by weights[number] */
    const float *weights;
    float *out; /* [.., hidden]: rows in the order of the choices or, if `scattered`, each in the row of its number */
    int64_t hidden, width, rows, top_k;
    int32_t gated, scattered;
} expert_t;

typedef struct {
    const expert_t *expert;
    int64_t first; /* choice */
    vectors_t given, inner;
    atomic_long begun[2], ended; /* blocks of rows: begun of the first and the second product, ended of the first */
} job_t;

static long blocks_of(long rows) { return (rows + ROWS - 1) / ROWS; }

static float silu(float value) { return value / (1 + expf(-value)); }

static void first_block(job_t *job, long first) {
    const expert_t *e = job->expert;
    float gate[ROWS][MOST_TOKENS], up[ROWS][MOST_TOKENS];
    product(e->first, first, e->width, &job->given, gate);
    if (e->gated) product(e->first + e->width * e->hidden, first, e->width, &job->given, up);
    for (int row = 0; row < ROWS && first + row < e->width; row++)
        for (int token = 0; token < job->inner.tokens; token++) {
            float inner = rounded(silu(rounded(gate[row][token])));
            if (e->gated) inner *= rounded(up[row][token]);
            put_value(job->inner.values + token * job->inner.stride, first + row, bfloat16_of(inner));
        }
}

static void second_block(job_t *job, long first) {
    const expert_t *e = job->expert;
    float rows[ROWS][MOST_TOKENS];
    product(e->down, first, e->hidden, &job->inner, rows);
    for (int token = 0; token < job->inner.tokens; token++) {
        int64_t place = job->first + token, choice = e->choices[place];
        float *out = e->out + (e->scattered ? choice : place) * e->hidden;
        for (int row = 0; row < ROWS && first + row < e->hidden; row++)
            out[first + row] = rounded(rows[row][token]) * e->weights[choice];
    }
}

INLINE void spin(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Until `value` is `wanted`: by turning, and after a while with the core left to others. */
static void await(atomic_long *value, long wanted) {
    for (long spins = 0; atomic_load_explicit(value, memory_order_acquire) != wanted; spins++)
        spins < SPINS ? spin() : (void)sched_yield();
}

/* Blocks *first to the one returned, of those that no thread has begun: many at first, since neighbours are read fastest
 * one after another, and in the end one by one, so that a thread that is held up holds up no others. */
static long take(atomic_long *begun, long blocks, int threads, long *first) {
    *first = atomic_load(begun);
    for (;;) {
        long share = (blocks - *first) / (2 * threads), end = *first + (share > 1 ? share : 1);
        if (*first >= blocks || atomic_compare_exchange_weak(begun, first, end)) return end < blocks ? end : blocks;
    }
}

static void work(job_t *job, int threads) {
    long blocks = blocks_of(job->expert->width), block, end;
    while ((end = take(&job->begun[0], blocks, threads, &block)) > block) {
        for (long at = block; at < end; at++) first_block(job, at * ROWS);
        atomic_fetch_add_explicit(&job->ended, end - block, memory_order_release);
    }
    await(&job->ended, blocks);
    blocks = blocks_of(job->expert->hidden);
    while ((end = take(&job->begun[1], blocks, threads, &block)) > block)
        for (; block < end; block++) second_block(job, block * ROWS);
}

/* --- threads: a team of their own for each thread that calls; between calls they turn for a moment, and then sleep - */

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    atomic_long calls, busy; /* how many there were; threads at work on the last one */
    job_t *job;              /* NULL: done, so that whoever wakes too late is not waited for */
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
        job_t *job = team->job;
        int ends = team->ends;
        if (job != NULL) atomic_fetch_add(&team->busy, 1);
        pthread_mutex_unlock(&team->lock);
        if (ends) return NULL;
        if (job == NULL) continue;
        work(job, team->others + 1);
        atomic_fetch_sub(&team->busy, 1);
    }
}

static void call(team_t *team, job_t *job) {
    pthread_mutex_lock(&team->lock);
    team->job = job;
    team->ends = job == NULL;
    atomic_fetch_add(&team->calls, 1);
    pthread_cond_broadcast(&team->wake);
    pthread_mutex_unlock(&team->lock);
}

static void work_together(team_t *team, job_t *job) {
    if (team->others > 0) call(team, job);
    work(job, team->others + 1);
    pthread_mutex_lock(&team->lock);
    team->job = NULL;
    pthread_mutex_unlock(&team->lock);
    await(&team->busy, 0);
}

/* Ends the team's threads. */
void team_end(team_t *team) {
    call(team, NULL);
    for (int thread = 0; thread < team->others; thread++) pthread_join(team->threads[thread], NULL);
    free(team);
}

/* As many threads, the caller among them, on the cores that the caller may use; NULL where the system has no more. */
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

/* --- what is called ----------------------------------------------------------------------------------------------- */

const char *kernel_name(void) { return KERNEL; }

int only_up_to(void) { return ONLY_UP_TO; }

/* Up to MOST_TOKENS rows of one expert, from choice `first` on. */
static int compute_rows(team_t *team, const expert_t *expert, int64_t first) {
    int tokens = expert->rows - first < MOST_TOKENS ? (int)(expert->rows - first) : MOST_TOKENS;
    job_t job = {.expert = expert, .first = first};
    int there = vectors_of(&job.given, expert->hidden, tokens) & vectors_of(&job.inner, expert->width, tokens);
    if (there) {
        for (int token = 0; token < tokens; token++) {
            const uint16_t *x = expert->x + expert->choices[first + token] / expert->top_k * expert->hidden;
            for (long at = 0; at < expert->hidden; at++) put_value(job.given.values + token * job.given.stride, at, x[at]);
        }
        work_together(team, &job);
    }
    free(job.given.values);
    free(job.inner.values);
    return there;
}

/* The weighted rows of one expert; returns 0, or -1 where memory is short. */
int compute(team_t *team, const expert_t *expert) {
    for (int64_t first = 0; first < expert->rows; first += MOST_TOKENS)
        if (!compute_rows(team, expert, first)) return -1;
    return 0;
}
