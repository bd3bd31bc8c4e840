/* Products of weight rows in blocks of 32 and a few vectors that are also converted to blocks, as in ggml: exact sums
 * of small integers, times both scales. Formats: ggml/src/ggml-common.h, block_q8_0 and block_q4_0. */
#pragma once

#include <math.h>
#include <stdlib.h>
#include "steps.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define BLOCK 32 /* neighbouring weights of a row */

enum format { BF16, Q8_0, Q4_0 }; /* as in FORMATS of weight_formats.py */

INLINE long bytes_of(enum format format) { return format == Q8_0 ? 34 : 18; } /* a block: 16-bit scale, then weights */

typedef struct {
    int16_t *values; /* tokens vectors of `length` values each, -127 to 127; scales: one for each block */
    float *scales;
    long length;
    int tokens;
} blocks_t;

/* Convert BLOCK values from number `first` on, as quantize_row_q8_0 of ggml. */
static void put_block(blocks_t *blocks, int token, long first, const float *values) {
    float largest = 0;
    for (int at = 0; at < BLOCK; at++) largest = fmaxf(largest, fabsf(values[at]));
    float scale = largest / 127, inverse = largest > 0 ? 127 / largest : 0;
    int16_t *into = blocks->values + token * blocks->length + first;
    for (int at = 0; at < BLOCK; at++) into[at] = (int16_t)lrintf(values[at] * inverse);
    blocks->scales[(token * blocks->length + first) / BLOCK] = scale;
}

INLINE float float_of_half(const uint8_t *half) {
    uint16_t bits;
    memcpy(&bits, half, sizeof bits);
#if defined(__AVX2__) && defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    uint32_t moved = (uint32_t)(bits & 0x7fff) << 13;
    float result;
    memcpy(&result, &moved, sizeof result);
    return (bits & 0x8000 ? -0x1p112f : 0x1p112f) * result; /* exponents of float32 begin 112 lower */
#endif
}

/* The weights of a block as signed bytes; in Q4_0, the first half of them is in the lower halves of the bytes. */
#if defined(__AVX2__)
INLINE __m256i bytes_at(const uint8_t *block, enum format format) {
    if (format == Q8_0) return _mm256_loadu_si256((const __m256i *)(block + 2));
    __m128i pairs = _mm_loadu_si128((const __m128i *)(block + 2));
    __m256i spread = _mm256_set_m128i(_mm_srli_epi16(pairs, 4), pairs);
    return _mm256_sub_epi8(_mm256_and_si256(spread, _mm256_set1_epi8(15)), _mm256_set1_epi8(8));
}
#endif

#if defined(__AVX512BW__)

typedef __m512 block_sums_t;
typedef __m512i block_t;
INLINE block_t block_at(const uint8_t *block, enum format format) {
    return _mm512_cvtepi8_epi16(bytes_at(block, format));
}
INLINE block_sums_t add_block(block_sums_t sums, block_t weights, const int16_t *values, float scale) {
    __m512i products = _mm512_madd_epi16(weights, _mm512_loadu_si512(values));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), _mm512_set1_ps(scale), sums);
}
INLINE float block_total(block_sums_t sums) { return _mm512_reduce_add_ps(sums); }

#elif defined(__AVX2__) && defined(__FMA__)

typedef __m256 block_sums_t;
typedef struct { __m256i first, last; } block_t;
INLINE block_t block_at(const uint8_t *block, enum format format) {
    __m256i bytes = bytes_at(block, format);
    __m128i first = _mm256_castsi256_si128(bytes), last = _mm256_extracti128_si256(bytes, 1);
    return (block_t){_mm256_cvtepi8_epi16(first), _mm256_cvtepi8_epi16(last)};
}
INLINE block_sums_t add_block(block_sums_t sums, block_t weights, const int16_t *values, float scale) {
    __m256i first = _mm256_madd_epi16(weights.first, _mm256_loadu_si256((const __m256i *)values));
    __m256i last = _mm256_madd_epi16(weights.last, _mm256_loadu_si256((const __m256i *)(values + BLOCK / 2)));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(first, last)), _mm256_set1_ps(scale), sums);
}
INLINE float block_total(block_sums_t sums) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(half) + _mm_cvtss_f32(_mm_movehdup_ps(half));
}

#else

typedef float block_sums_t;
typedef struct { int16_t values[BLOCK]; } block_t;
INLINE block_t block_at(const uint8_t *block, enum format format) {
    block_t weights;
    for (int at = 0; at < BLOCK; at++) {
        uint8_t byte = block[2 + (format == Q8_0 ? at : at % (BLOCK / 2))];
        weights.values[at] = format == Q8_0 ? (int8_t)byte : (at < BLOCK / 2 ? byte & 15 : byte >> 4) - 8;
    }
    return weights;
}
INLINE block_sums_t add_block(block_sums_t sums, block_t weights, const int16_t *values, float scale) {
    int32_t sum = 0;
    for (int at = 0; at < BLOCK; at++) sum += weights.values[at] * values[at];
    return sums + (float)sum * scale;
}
INLINE float block_total(block_sums_t sums) { return sums; }

#endif

/* The products of a row and `tokens` vectors from number `first` on. */
INLINE void block_row(
    const uint8_t *row, enum format format, const blocks_t *vectors, int first, int tokens, float *out) {
    long count = vectors->length / BLOCK;
    const float *scales = vectors->scales + first * count;
    const int16_t *values = vectors->values + first * vectors->length;
    block_sums_t sums[TOKENS] = {0};
    for (long at = 0; at < count; at++) {
        const uint8_t *block = row + at * bytes_of(format);
        block_t weights = block_at(block, format);
        float scale = float_of_half(block);
        UNROLLED for (int token = 0; token < tokens; token++)
            sums[token] = add_block(
                sums[token], weights, values + token * vectors->length + at * BLOCK, scale * scales[token * count + at]);
    }
    for (int token = 0; token < tokens; token++) out[first + token] = block_total(sums[token]);
}

INLINE void block_rows(
    const uint8_t *matrix, enum format format, long first, long end, const blocks_t *vectors,
    float out[][MOST_TOKENS]) {
    long bytes = vectors->length / BLOCK * bytes_of(format);
    for (long row = first; row < end; row++)
        for (int token = 0; token < vectors->tokens; token += TOKENS) {
            const uint8_t *weights = matrix + row * bytes;
            switch (vectors->tokens - token) {
                case 1: block_row(weights, format, vectors, token, 1, out[row - first]); break;
                case 2: block_row(weights, format, vectors, token, 2, out[row - first]); break;
                case 3: block_row(weights, format, vectors, token, 3, out[row - first]); break;
                default: block_row(weights, format, vectors, token, TOKENS, out[row - first]);
            }
        }
}

/* out[row][token] of up to BLOCK rows of a matrix, from row `first` on. */
static void block_product(
    const uint8_t *matrix, enum format format, long first, long end, const blocks_t *vectors,
    float out[][MOST_TOKENS]) {
    end = end < first + BLOCK ? end : first + BLOCK;
    if (format == Q8_0) block_rows(matrix, Q8_0, first, end, vectors, out);
    else block_rows(matrix, Q4_0, first, end, vectors, out);
}

static int blocks_of(blocks_t *blocks, long length, int tokens) {
    *blocks = (blocks_t){.length = length, .tokens = tokens};
    blocks->values = malloc((size_t)(length * tokens) * sizeof *blocks->values);
    blocks->scales = malloc((size_t)(length * tokens / BLOCK) * sizeof *blocks->scales);
    return blocks->values != NULL && blocks->scales != NULL;
}
