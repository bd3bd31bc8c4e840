/* Products of weight rows and a few vectors; a sum does not depend on the number of rows or vectors. */
#pragma once

#include <stdlib.h>
#include "steps.h"

typedef struct {
    value_t *values; /* tokens vectors, `stride` apart, filled up with 0 to whole steps */
    long length, stride;
    int tokens;
} vectors_t;

/* out[row][token] of `rows` times vectors from the one with number `first` on. With more than two of them at once the
 * processor does not prefetch far enough by itself, so the next rows are prefetched explicitly. */
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

/* The same for each of up to TOKENS vectors from `first` on. */
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
