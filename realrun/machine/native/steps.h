/* A step: STEP neighbouring weights of a row, times as many values, added to sums of float32; one version for each kind
 * of processor. */
#pragma once

#include <limits.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 8")
#endif

INLINE float float_of(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

/* Round to nearest, ties to even. */
INLINE uint16_t bfloat16_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float rounded(float value) { return float_of(bfloat16_of(value)); }

/* ROWS weight rows and TOKENS vectors form a tile, with as many sums as there are registers. Up to FEW vectors are
 * multiplied row by row, since memory is read fastest sequentially. For more than ONLY_UP_TO rows of an expert torch is
 * faster (figures: benchmarks/cpu_kernel.md). On x86 without AVX512-BF16 it never is: if these are disabled
 * (ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2), torch 2.13 computes bfloat16 at half of this kernel's rate for
 * any number of rows. */
#define TOKENS 4
#define MOST_TOKENS 32 /* for which weights are read once */

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

#else /* vector extensions of GCC and Clang, for any processor; a bfloat16 is the upper half of a float */

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
#define ONLY_UP_TO FEW /* not measured on processors for which torch has bfloat16 kernels, such as ARM */
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
