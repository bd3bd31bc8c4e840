/* One expert of bfloat16 weights on the CPU, from its rows to their weighted results: for a few rows at a time, which
 * is when an expert takes as long as its weights take to be read.
 *
 * Sums are of float32; they are rounded to bfloat16 where torch's operations round, so that both differ by the order of
 * additions alone. Results do not depend on how many rows or threads there are.
 *
 * Compiled on first use for the processor at hand (native_library.py); native_ffn.py calls it.
 */
#include <math.h>

#include "products.h"
#include "team.h"

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

/* A thread's share. */
static void work(void *argument, int threads) {
    job_t *job = argument;
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
        work_together(team, work, &job);
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
