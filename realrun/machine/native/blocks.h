/* Products of weight rows in blocks, as in ggml, and a few vectors that are also converted to blocks: exact sums of
 * small integers, times both scales. Formats: ggml/src/ggml-common.h, block_q8_0, block_q4_0 and block_q4_K.
 *
 * A band of BAND rows is stored block by block, and of each block first the scales of all rows, then four bytes of
 * each row, the next four, and so on (weight_formats.py). A register then holds four neighbouring weights of several
 * rows, a row's sum stays in one place, and all are scaled at once. */
#pragma once

#include <math.h>
#include <stdlib.h>
#include "steps.h"
#include "lanes.h"

#define BLOCK 32        /* neighbouring values with one scale: of a vector, and of a row but for Q4_K */
#define SUPER_BLOCK 256 /* weights of a block of Q4_K: 8 times 32, whose scales and minima have a scale each */
#define BAND 16         /* rows */
#define AHEAD 6144      /* bytes that are prefetched: the best of 1 to 18 KB on an EPYC of the fourth generation */

enum format { BF16, Q8_0, Q4_0, Q4_K }; /* as in FORMATS of weight_formats.py */

/* A block of one row: a 16-bit scale, then weights; in Q4_K two scales, 12 bytes with 8 scales and minima of 6 bits. */
INLINE long bytes_of(enum format format) { return format == Q8_0 ? 34 : format == Q4_0 ? 18 : 144; }
INLINE long weights_of(enum format format) { return format == Q4_K ? SUPER_BLOCK : BLOCK; }

/* What weights are too large by in registers: q4_0 counts from -8; for those of q8_0 see lanes.h. */
INLINE int shift_of(enum format format) { return format == Q4_0 ? 8 : format == Q8_0 && UNSIGNED ? 128 : 0; }

typedef struct {
    int8_t *values; /* tokens vectors of `length` values each, -127 to 127; the others: one for each block */
    float *scales, *sums; /* of the values, and of their sum */
    int32_t *shifts;      /* the sum of the values in whole numbers, times `shift` */
    long length;
    int tokens, shift;
} blocks_t;

/* Convert BLOCK values from number `first` on, as quantize_row_q8_0 of ggml. */
static void put_block(blocks_t *blocks, int token, long first, const float *values) {
    int32_t largest = 0, sum = 0;
    for (int at = 0; at < BLOCK; at++) {
        int32_t bits;
        memcpy(&bits, &values[at], sizeof bits);
        bits &= 0x7fffffff; /* numbers without sign are ordered as their bits are */
        largest = bits > largest ? bits : largest;
    }
    float most;
    memcpy(&most, &largest, sizeof most);
    float inverse = most > 0 ? 127 / most : 0;
    int8_t *into = blocks->values + token * blocks->length + first;
    for (int at = 0; at < BLOCK; at++) {
        int32_t number = (int32_t)rintf(values[at] * inverse);
        into[at] = (int8_t)number;
        sum += number;
    }
    long place = (token * blocks->length + first) / BLOCK;
    blocks->scales[place] = most / 127;
    blocks->sums[place] = most / 127 * (float)sum;
    blocks->shifts[place] = blocks->shift * sum;
}

static void free_blocks(blocks_t *blocks) {
    free(blocks->values);
    free(blocks->scales);
    free(blocks->sums);
    free(blocks->shifts);
}

static int blocks_of(blocks_t *blocks, enum format format, long length, int tokens) {
    size_t values = (size_t)(length * tokens), count = values / BLOCK;
    *blocks = (blocks_t){.length = length, .tokens = tokens, .shift = shift_of(format)};
    blocks->values = malloc(values);
    blocks->scales = malloc(count * sizeof *blocks->scales);
    blocks->sums = malloc(count * sizeof *blocks->sums);
    blocks->shifts = malloc(count * sizeof *blocks->shifts);
    return blocks->values != NULL && blocks->scales != NULL && blocks->sums != NULL && blocks->shifts != NULL;
}

/* Products of ABREAST rows of a band, from `row` on, and `tokens` of the vectors, from `first` on. */
typedef struct {
    const blocks_t *vectors;
    int row, first, tokens;
} tile_t;

INLINE long place_of(const tile_t *tile, int token, long at) {
    return (tile->first + token) * (tile->vectors->length / BLOCK) + at;
}

/* Column `at` of the four bytes of each row; and a 16-bit float of each row. */
INLINE ints_t column(const tile_t *tile, const uint8_t *columns, long at) {
    return ints_at(columns + 4 * (BAND * at + tile->row));
}
INLINE floats_t halves(const tile_t *tile, const uint8_t *each) { return floats_of_halves(each + 2 * tile->row); }

/* sums[token] += the products of 32 weights of each row and block `at` of a vector. */
INLINE void add_block(
    const tile_t *tile, long at, const ints_t *weights, floats_t scales, enum format format, floats_t *sums) {
    UNROLLED for (int token = 0; token < tile->tokens; token++) {
        long place = place_of(tile, token, at);
        ints_t whole = products(weights, tile->vectors->values + place * BLOCK, format == Q8_0);
        if (shift_of(format) != 0) whole -= tile->vectors->shifts[place];
        sums[token] += floats_of(whole) * (scales * tile->vectors->scales[place]);
    }
}

INLINE void add_q8_0(const tile_t *tile, const uint8_t *block, long at, floats_t *sums) {
    ints_t weights[8];
    UNROLLED for (int four = 0; four < 8; four++)
        weights[four] = column(tile, block + BAND * 2, four) ^ (UNSIGNED ? (int32_t)0x80808080 : 0);
    add_block(tile, at, weights, halves(tile, block), Q8_0, sums);
}

INLINE void add_q4_0(const tile_t *tile, const uint8_t *block, long at, floats_t *sums) {
    ints_t weights[8];
    UNROLLED for (int four = 0; four < 4; four++) {
        ints_t pairs = column(tile, block + BAND * 2, four);
        weights[four] = lower(pairs);
        weights[4 + four] = upper(pairs);
    }
    add_block(tile, at, weights, halves(tile, block), Q4_0, sums);
}

/* Subtract a minimum that 32 weights of each row share. */
INLINE void subtract(const tile_t *tile, long at, floats_t least, floats_t *sums) {
    UNROLLED for (int token = 0; token < tile->tokens; token++)
        sums[token] -= least * tile->vectors->sums[place_of(tile, token, at)];
}

/* The numbers of scales and minima are those of get_scale_min_k4 of ggml. */
INLINE void add_q4_k(const tile_t *tile, const uint8_t *block, long at, floats_t *sums) {
    const uint8_t *packed = block + BAND * 4, *pairs = block + BAND * 16;
    floats_t scale = halves(tile, block), least = halves(tile, block + BAND * 2);
    ints_t low = column(tile, packed, 0), middle = column(tile, packed, 1), high = column(tile, packed, 2);
    ints_t scales[2] = {six_bits(low), with_top(lower(high), low)};
    ints_t leasts[2] = {six_bits(middle), with_top(upper(high), middle)};
    UNROLLED for (int number = 0; number < 8; number++) {
        ints_t weights[8];
        UNROLLED for (int four = 0; four < 8; four++) {
            ints_t both = column(tile, pairs, number / 2 * 8 + four);
            weights[four] = number % 2 ? upper(both) : lower(both);
        }
        add_block(tile, at + number, weights, scale * floats_of(byte_of(scales[number / 4], number % 4)), Q4_K, sums);
        subtract(tile, at + number, least * floats_of(byte_of(leasts[number / 4], number % 4)), sums);
    }
}

/* Into the cache of the second level. With few vectors the processor prefetches far enough by itself. */
INLINE void prefetch(const uint8_t *bytes, long count) {
    for (long at = 0; at < count; at += 64) __builtin_prefetch(bytes + at, 0, 2);
}

INLINE void add_up(
    const uint8_t *band, int row, enum format format, const blocks_t *vectors, int first, int tokens,
    float out[][BLOCK]) {
    tile_t tile = {.vectors = vectors, .row = row, .first = first, .tokens = tokens};
    floats_t sums[TOKENS] = {0};
    for (long at = 0; at < vectors->length / BLOCK; at += weights_of(format) / BLOCK) {
        if (first == 0 && vectors->tokens > (format == Q4_K ? 1 : 2)) prefetch(band + AHEAD, BAND * bytes_of(format));
        if (format == Q8_0) add_q8_0(&tile, band, at, sums);
        else if (format == Q4_0) add_q4_0(&tile, band, at, sums);
        else add_q4_k(&tile, band, at, sums);
        band += BAND * bytes_of(format);
    }
    for (int token = 0; token < tokens; token++) memcpy(out[first + token], &sums[token], sizeof sums[token]);
}

/* All vectors; weights are read from memory once. */
INLINE void some_rows(
    const uint8_t *band, int row, enum format format, const blocks_t *vectors, float out[][BLOCK]) {
    for (int first = 0; first < vectors->tokens; first += TOKENS)
        switch (vectors->tokens - first) {
            case 1: add_up(band, row, format, vectors, first, 1, out); break;
            case 2: add_up(band, row, format, vectors, first, 2, out); break;
            case 3: add_up(band, row, format, vectors, first, 3, out); break;
            default: add_up(band, row, format, vectors, first, TOKENS, out);
        }
}

/* out[token][row] of BLOCK rows of a matrix, from row `first` on. */
static void block_product(
    const uint8_t *matrix, enum format format, long first, const blocks_t *vectors, float out[][BLOCK]) {
    long row_bytes = vectors->length / weights_of(format) * bytes_of(format);
    for (long row = 0; row < BLOCK; row += ABREAST) {
        const uint8_t *band = matrix + (first + row / BAND * BAND) * row_bytes;
        float (*into)[BLOCK] = (float (*)[BLOCK])(&out[0][row]); /* of all tokens, from `row` on */
        int within = (int)(row % BAND);
        if (format == Q8_0) some_rows(band, within, Q8_0, vectors, into);
        else if (format == Q4_0) some_rows(band, within, Q4_0, vectors, into);
        else some_rows(band, within, Q4_K, vectors, into);
    }
}
