/* Products of a matrix's rows and some vectors by a function of ggml for one row and one vector, ggml_vec_dot_*. */
#include <stddef.h>
#include <stdint.h>

typedef void dot_t(int, float *, size_t, const void *, size_t, const void *, size_t, int);

void products(
    dot_t *dot, const uint8_t *matrix, int64_t rows, int columns, int64_t row_bytes, const uint8_t *vectors,
    int tokens, int64_t vector_bytes, float *out) {
    for (int64_t row = 0; row < rows; row++)
        for (int token = 0; token < tokens; token++)
            dot(columns, out, 0, matrix + row * row_bytes, 0, vectors + token * vector_bytes, 0, 1);
}
