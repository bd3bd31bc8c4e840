/* One expert on the CPU, from its rows to their weighted results, for few rows, when the time of an expert is that of
 * reading its weights. Results do not depend on the number of rows or threads.
 *
 * Weights of bfloat16: sums are of float32, rounded to bfloat16 where torch's operations round, so that both differ
 * only by the order of additions. Weights in blocks, as in ggml: the values that they are multiplied with are rounded
 * to 8 bits, in blocks, as in llama.cpp; nothing else is rounded.
 *
 * Compiled on first use for this processor (native_library.py) and called by native_ffn.py.
 */
#include <math.h>

#include "blocks.h"
#include "products.h"
#include "team.h"

typedef struct {
    const void *first, *down; /* [width or, with a gate, 2 width, hidden], [hidden, width], in `format` */
    const uint16_t *x;        /* [.., hidden], bfloat16 */
    const int64_t *choices;   /* number n * top_k + j: row n of x, weighted by weights[number] */
    const float *weights;
    float *out; /* [.., hidden]: rows in the order of the choices or, if `scattered`, each in the row of its number */
    int64_t hidden, width, rows, top_k;
    int32_t gated, scattered, format;
} expert_t;

typedef struct {
    const expert_t *expert;
    int64_t first; /* choice */
    int tokens;
    vectors_t given, inner;             /* inputs of both products for bfloat16 */
    blocks_t given_blocks, inner_blocks; /* and for other formats */
    long each;                   /* rows of a matrix in a piece of work: at most BLOCK */
    atomic_long begun[2], ended; /* pieces: begun of the first and the second product, ended of the first */
} job_t;

static long pieces_of(const job_t *job, long rows) { return (rows + job->each - 1) / job->each; }

static float silu(float value) { return value / (1 + expf(-value)); }

/* out[row][token]: a piece of a product, rows from `first` on and before `end`. */
static void first_product(job_t *job, long first, long end, float out[][MOST_TOKENS]) {
    const expert_t *e = job->expert;
    if (e->format == BF16) product(e->first, first, end, &job->given, out);
    else block_product(e->first, e->format, first, end, &job->given_blocks, out);
}

static void second_product(job_t *job, long first, long end, float out[][MOST_TOKENS]) {
    const expert_t *e = job->expert;
    if (e->format == BF16) product(e->down, first, end, &job->inner, out);
    else block_product(e->down, e->format, first, end, &job->inner_blocks, out);
}

static void first_piece(job_t *job, long first) {
    const expert_t *e = job->expert;
    long end = first + job->each < e->width ? first + job->each : e->width;
    float gate[BLOCK][MOST_TOKENS], up[BLOCK][MOST_TOKENS], inner[BLOCK];
    first_product(job, first, end, gate);
    if (e->gated) first_product(job, e->width + first, e->width + end, up);
    for (int token = 0; token < job->tokens; token++)
        if (e->format == BF16)
            for (long row = first; row < end; row++) {
                float value = rounded(silu(rounded(gate[row - first][token])));
                if (e->gated) value *= rounded(up[row - first][token]);
                put_value(job->inner.values + token * job->inner.stride, row, bfloat16_of(value));
            }
        else {
            for (int row = 0; row < BLOCK; row++) inner[row] = silu(gate[row][token]) * (e->gated ? up[row][token] : 1);
            put_block(&job->inner_blocks, token, first, inner);
        }
}

static void second_piece(job_t *job, long first) {
    const expert_t *e = job->expert;
    long end = first + job->each < e->hidden ? first + job->each : e->hidden;
    float rows[BLOCK][MOST_TOKENS];
    second_product(job, first, end, rows);
    for (int token = 0; token < job->tokens; token++) {
        int64_t place = job->first + token, choice = e->choices[place];
        float *out = e->out + (e->scattered ? choice : place) * e->hidden;
        for (long row = first; row < end; row++) {
            float value = rows[row - first][token];
            out[row] = (e->format == BF16 ? rounded(value) : value) * e->weights[choice];
        }
    }
}

/* A thread's share. */
static void work(void *argument, int threads) {
    job_t *job = argument;
    long pieces = pieces_of(job, job->expert->width), piece, end;
    while ((end = take(&job->begun[0], pieces, threads, &piece)) > piece) {
        for (long at = piece; at < end; at++) first_piece(job, at * job->each);
        atomic_fetch_add_explicit(&job->ended, end - piece, memory_order_release);
    }
    await(&job->ended, pieces);
    pieces = pieces_of(job, job->expert->hidden);
    while ((end = take(&job->begun[1], pieces, threads, &piece)) > piece)
        for (; piece < end; piece++) second_piece(job, piece * job->each);
}

/* Allocate the inputs of both products; returns 0 if there is no memory. */
static int has_room(job_t *job) {
    long hidden = job->expert->hidden, width = job->expert->width;
    if (job->expert->format == BF16)
        return vectors_of(&job->given, hidden, job->tokens) & vectors_of(&job->inner, width, job->tokens);
    return blocks_of(&job->given_blocks, hidden, job->tokens) & blocks_of(&job->inner_blocks, width, job->tokens);
}

static void take_rows(job_t *job) {
    const expert_t *e = job->expert;
    for (int token = 0; token < job->tokens; token++) {
        const uint16_t *x = e->x + e->choices[job->first + token] / e->top_k * e->hidden;
        if (e->format == BF16)
            for (long at = 0; at < e->hidden; at++) put_value(job->given.values + token * job->given.stride, at, x[at]);
        else
            for (long first = 0; first < e->hidden; first += BLOCK) {
                float values[BLOCK];
                for (int at = 0; at < BLOCK; at++) values[at] = float_of(x[first + at]);
                put_block(&job->given_blocks, token, first, values);
            }
    }
}

static void free_room(job_t *job) {
    free(job->given.values);
    free(job->inner.values);
    free(job->given_blocks.values);
    free(job->given_blocks.scales);
    free(job->inner_blocks.values);
    free(job->inner_blocks.scales);
}

/* --- the interface ------------------------------------------------------------------------------------------------ */

const char *kernel_name(void) { return KERNEL; }

int only_up_to(void) { return ONLY_UP_TO; }

/* Compute the weighted rows of one expert; returns 0, or -1 if there is no memory. */
int compute(team_t *team, const expert_t *expert) {
    for (int64_t first = 0; first < expert->rows; first += MOST_TOKENS) {
        int64_t left = expert->rows - first;
        job_t job = {.expert = expert, .first = first, .tokens = left < MOST_TOKENS ? (int)left : MOST_TOKENS};
        job.each = expert->format == BF16 ? ROWS : BLOCK;
        int there = has_room(&job);
        if (there) {
            take_rows(&job);
            work_together(team, work, &job);
        }
        free_room(&job);
        if (!there) return -1;
    }
    return 0;
}
