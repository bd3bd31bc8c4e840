/* Registers with a number for each of ABREAST rows: vector extensions of GCC and Clang, for any processor, and what
 * those do not say: sums of products of bytes, and 16-bit floats. */
#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define ABREAST 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define ABREAST 8
#else
#define ABREAST 4
#endif

typedef int32_t ints_t __attribute__((vector_size(ABREAST * 4)));
typedef float floats_t __attribute__((vector_size(ABREAST * 4)));

INLINE ints_t ints_at(const uint8_t *bytes) {
    ints_t values;
    memcpy(&values, bytes, sizeof values);
    return values;
}

INLINE floats_t floats_of(ints_t values) { return __builtin_convertvector(values, floats_t); }

/* Of four bytes in each number: their lower halves, their upper ones, and six bits, also as four and two. */
INLINE ints_t lower(ints_t bytes) { return bytes & 0x0f0f0f0f; }
INLINE ints_t upper(ints_t bytes) { return bytes >> 4 & 0x0f0f0f0f; }
INLINE ints_t six_bits(ints_t bytes) { return bytes & 0x3f3f3f3f; }
INLINE ints_t with_top(ints_t four_bits, ints_t top) { return four_bits | (top >> 2 & 0x30303030); }
INLINE ints_t byte_of(ints_t bytes, int at) { return bytes >> 8 * at & 255; }

#if ABREAST == 16

INLINE floats_t floats_of_halves(const uint8_t *halves) {
    return (floats_t)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)halves));
}

#elif ABREAST == 8

INLINE floats_t floats_of_halves(const uint8_t *halves) {
    return (floats_t)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)halves));
}

#else

INLINE floats_t floats_of_halves(const uint8_t *halves) {
    uint16_t bits[ABREAST];
    floats_t result;
    memcpy(bits, halves, sizeof bits);
    for (int row = 0; row < ABREAST; row++) {
        uint32_t moved = (uint32_t)(bits[row] & 0x7fff) << 13;
        float value;
        memcpy(&value, &moved, sizeof value);
        result[row] = (bits[row] & 0x8000 ? -0x1p112f : 0x1p112f) * value; /* exponents of float32 begin 112 lower */
    }
    return result;
}

#endif

INLINE int32_t four_at(const int8_t *values, int four) {
    int32_t bits;
    memcpy(&bits, values + 4 * four, sizeof bits);
    return bits;
}

/* The sum of the products of 32 weights of each row, 8 registers, and 32 values. Weights of Q8_0 are signed. The
 * instructions for it want one side without sign: those weights then have to be UNSIGNED, 128 larger or, where products
 * are added in pairs of 16 bits, give their sign to the values. 16 bits also hold 16 products of weights up to 15. */
#if ABREAST == 16 || (ABREAST == 8 && defined(__AVXVNNI__))

#define UNSIGNED 1
INLINE ints_t products(const ints_t *weights, const int8_t *values, int is_signed) {
    (void)is_signed;
    ints_t sums = {0};
    UNROLLED for (int four = 0; four < 8; four++)
#if ABREAST == 16
        sums = (ints_t)_mm512_dpbusd_epi32(
            (__m512i)sums, (__m512i)weights[four], _mm512_set1_epi32(four_at(values, four)));
#else
        sums = (ints_t)_mm256_dpbusd_avx_epi32(
            (__m256i)sums, (__m256i)weights[four], _mm256_set1_epi32(four_at(values, four)));
#endif
    return sums;
}

#elif ABREAST == 8

#define UNSIGNED 0
INLINE ints_t products(const ints_t *weights, const int8_t *values, int is_signed) {
    __m256i ones = _mm256_set1_epi16(1), sums = _mm256_setzero_si256();
    UNROLLED for (int four = 0; four < 8; four++) {
        __m256i bytes = (__m256i)weights[four], factors = _mm256_set1_epi32(four_at(values, four));
        if (is_signed) factors = _mm256_sign_epi8(factors, bytes), bytes = _mm256_abs_epi8(bytes);
        __m256i pairs = _mm256_maddubs_epi16(bytes, factors);
        sums = is_signed ? _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, ones)) : _mm256_add_epi16(sums, pairs);
    }
    return (ints_t)(is_signed ? sums : _mm256_madd_epi16(sums, ones));
}

#elif defined(__ARM_FEATURE_DOTPROD)

#define UNSIGNED 0
INLINE ints_t products(const ints_t *weights, const int8_t *values, int is_signed) {
    (void)is_signed;
    int32x4_t sums = vdupq_n_s32(0);
    UNROLLED for (int four = 0; four < 8; four++)
        sums = vdotq_s32(sums, (int8x16_t)weights[four], (int8x16_t)vdupq_n_s32(four_at(values, four)));
    return (ints_t)sums;
}

#else

#define UNSIGNED 0
INLINE ints_t products(const ints_t *weights, const int8_t *values, int is_signed) {
    ints_t sums = {0};
    UNROLLED for (int four = 0; four < 8; four++)
        UNROLLED for (int at = 0; at < 4; at++) {
            ints_t bytes = is_signed ? weights[four] << 8 * (3 - at) >> 24 : byte_of(weights[four], at);
            sums += bytes * values[4 * four + at];
        }
    return sums;
}

#endif
