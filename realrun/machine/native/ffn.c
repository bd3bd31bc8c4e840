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
    long each;                   /* rows of a matrix in a piece of work: ROWS or, in blocks, BLOCK */
    atomic_long begun[2], ended; /* pieces: begun of the first and the second product, ended of the first */
} job_t;

static long pieces_of(const job_t *job, long rows) { return (rows + job->each - 1) / job->each; }

/* value / (1 + exp(-value)), which compilers turn into vectors: exp to 2e-7 by powers of 2 and a sum of 7 terms. */
INLINE float silu(float value) {
    float power = value * -1.44269504f, bounded = power > 126 ? 126 : power < -126 ? -126 : power;
    float whole = rintf(bounded), rest = bounded - whole;
    float sum = 0.00133335581f + rest * 0.000154035304f;
    sum = 0.0555041087f + rest * (0.00961812911f + rest * sum);
    sum = 1 + rest * (0.693147181f + rest * (0.240226507f + rest * sum));
    int32_t bits = ((int32_t)whole + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return value / (1 + scale * sum);
}

static long end_of(const job_t *job, long first, long rows) {
    return first + job->each < rows ? first + job->each : rows;
}

static float *row_of(const job_t *job, int token, float *weight) {
    const expert_t *e = job->expert;
    int64_t place = job->first + token, choice = e->choices[place];
    *weight = e->weights[choice];
    return e->out + (e->scattered ? choice : place) * e->hidden;
}

/* --- a piece of both products, from row `first` on, with weights of bfloat16 and in blocks ------------------------ */

static void first_piece(job_t *job, long first) {
    const expert_t *e = job->expert;
    long end = end_of(job, first, e->width);
    float gate[ROWS][MOST_TOKENS], up[ROWS][MOST_TOKENS];
    product(e->first, first, end, &job->given, gate);
    if (e->gated) product(e->first, e->width + first, e->width + end, &job->given, up);
    for (int token = 0; token < job->tokens; token++)
        for (long row = first; row < end; row++) {
            float value = rounded(silu(rounded(gate[row - first][token])));
            if (e->gated) value *= rounded(up[row - first][token]);
            put_value(job->inner.values + token * job->inner.stride, row, bfloat16_of(value));
        }
}

static void second_piece(job_t *job, long first) {
    long end = end_of(job, first, job->expert->hidden);
    float rows[ROWS][MOST_TOKENS], weight;
    product(job->expert->down, first, end, &job->inner, rows);
    for (int token = 0; token < job->tokens; token++) {
        float *out = row_of(job, token, &weight);
        for (long row = first; row < end; row++) out[row] = rounded(rows[row - first][token]) * weight;
    }
}

static void first_block(job_t *job, long first) {
    const expert_t *e = job->expert;
    float gate[MOST_TOKENS][BLOCK], up[MOST_TOKENS][BLOCK], inner[BLOCK];
    block_product(e->first, e->format, first, &job->given_blocks, gate);
    if (e->gated) block_product(e->first, e->format, e->width + first, &job->given_blocks, up);
    for (int token = 0; token < job->tokens; token++) {
        for (int row = 0; row < BLOCK; row++) inner[row] = silu(gate[token][row]);
        if (e->gated)
            for (int row = 0; row < BLOCK; row++) inner[row] *= up[token][row];
        put_block(&job->inner_blocks, token, first, inner);
    }
}

static void second_block(job_t *job, long first) {
    float rows[MOST_TOKENS][BLOCK], weight;
    block_product(job->expert->down, job->expert->format, first, &job->inner_blocks, rows);
    for (int token = 0; token < job->tokens; token++) {
        float *out = row_of(job, token, &weight) + first;
        for (int row = 0; row < BLOCK; row++) out[row] = rows[token][row] * weight;
    }
}

/* A thread's share. */
static void work(void *argument, int threads) {
    job_t *job = argument;
    int plain = job->expert->format == BF16;
    long pieces = pieces_of(job, job->expert->width), piece, end;
    while ((end = take(&job->begun[0], pieces, threads, &piece)) > piece) {
        for (long at = piece; at < end; at++) (plain ? first_piece : first_block)(job, at * job->each);
        atomic_fetch_add_explicit(&job->ended, end - piece, memory_order_release);
    }
    await(&job->ended, pieces);
    pieces = pieces_of(job, job->expert->hidden);
    while ((end = take(&job->begun[1], pieces, threads, &piece)) > piece)
        for (; piece < end; piece++) (plain ? second_piece : second_block)(job, piece * job->each);
}

/* Allocate the inputs of both products; returns 0 if there is no memory. */
static int has_room(job_t *job) {
    long hidden = job->expert->hidden, width = job->expert->width;
    if (job->expert->format == BF16)
        return vectors_of(&job->given, hidden, job->tokens) & vectors_of(&job->inner, width, job->tokens);
    enum format format = job->expert->format;
    return blocks_of(&job->given_blocks, format, hidden, job->tokens)
        & blocks_of(&job->inner_blocks, format, width, job->tokens);
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
    free_blocks(&job->given_blocks);
    free_blocks(&job->inner_blocks);
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
