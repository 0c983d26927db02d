/* A few queries per row of a key/value cache, every row with its own length: what SDPA computes over padded rows, without reading
   the padding. Built by kernels.py; float32.

   queries [rows, heads, group, size], keys and values [rows, heads, capacity, size] with the strides given, out like queries;
   mask, if any, [rows, count, longest] is added to the scores: query g of a group looks at its row g % count. */

#include <stdint.h>
#include <string.h>

#define BLOCK 64
#define MOST_QUERIES 24
#define MOST_SIZE 256

static inline float power_of_e(float x) {
    /* exp(x) for x <= 0: 2^n times a polynomial on [-0.5, 0.5], to 2e-7 of its value. */
    x = x < -87.0f ? -87.0f : x;
    float scaled = x * 1.44269504f;
    float whole = __builtin_floorf(scaled + 0.5f);
    float f = (scaled - whole) * 0.693147181f;
    float p = 1.0f + f * (1.0f + f * (0.5f + f * (0.166666667f + f * (0.0416666667f + f * (0.00833333333f + f * 0.00138888889f)))));
    int32_t bits = ((int32_t)whole + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

static inline __attribute__((always_inline)) void attend_one(
    const float *q, const float *k, const float *v, float *out, int64_t length, int64_t group, const int64_t size, float scale,
    const float *mask, int64_t first, int64_t positions, int64_t longest) {
    float scores[MOST_QUERIES][BLOCK], most[MOST_QUERIES], total[MOST_QUERIES], sum[MOST_QUERIES][MOST_SIZE];
    for (int64_t g = 0; g < group; g++) {
        most[g] = -1e30f;
        total[g] = 0.0f;
        for (int64_t d = 0; d < size; d++) sum[g][d] = 0.0f;
    }
    for (int64_t start = 0; start < length; start += BLOCK) {
        int64_t count = length - start < BLOCK ? length - start : BLOCK;
        for (int64_t t = 0; t < count; t++) {
            const float *key = k + (start + t) * size;
            for (int64_t g = 0; g < group; g++) {
                float dot = 0.0f;
                for (int64_t d = 0; d < size; d++) dot += q[g * size + d] * key[d];
                scores[g][t] = dot * scale;
            }
        }
        if (mask)
            for (int64_t g = 0; g < group; g++) {
                const float *seen = mask + (first + g) % positions * longest + start;
                for (int64_t t = 0; t < count; t++) scores[g][t] += seen[t];
            }
        for (int64_t g = 0; g < group; g++) {
            float best = most[g];
            for (int64_t t = 0; t < count; t++) best = scores[g][t] > best ? scores[g][t] : best;
            float shrink = power_of_e(most[g] - best);
            float added = 0.0f;
            for (int64_t t = 0; t < count; t++) {
                scores[g][t] = power_of_e(scores[g][t] - best);
                added += scores[g][t];
            }
            most[g] = best;
            total[g] = total[g] * shrink + added;
            for (int64_t d = 0; d < size; d++) sum[g][d] *= shrink;
        }
        for (int64_t t = 0; t < count; t++) {
            const float *value = v + (start + t) * size;
            for (int64_t g = 0; g < group; g++)
                for (int64_t d = 0; d < size; d++) sum[g][d] += scores[g][t] * value[d];
        }
    }
    for (int64_t g = 0; g < group; g++)
        for (int64_t d = 0; d < size; d++) out[g * size + d] = sum[g][d] / total[g];
}

#define TILE MOST_QUERIES /* queries that share a reading of the keys */

void attend_rows(
    const float *queries, const float *keys, const float *values, float *out, const int32_t *lengths, const float *mask,
    int64_t rows, int64_t heads, int64_t group, int64_t size, int64_t row_stride, int64_t head_stride, int64_t positions,
    int64_t longest, int64_t mask_stride, float scale) {
    const int64_t tiles = (group + TILE - 1) / TILE;
#pragma omp parallel for collapse(3) schedule(dynamic, 1)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t tile = 0; tile < tiles; tile++) {
                const int64_t first = tile * TILE, count = group - first < TILE ? group - first : TILE;
                const float *q = queries + ((r * heads + h) * group + first) * size;
                float *o = out + (q - queries);
                const float *k = keys + r * row_stride + h * head_stride, *v = values + r * row_stride + h * head_stride;
                const float *m = mask ? mask + r * mask_stride : 0;
                /* The usual sizes as constants, so that the compiler unrolls their loops. */
                if (size == 64 && count == 3)
                    attend_one(q, k, v, o, lengths[r], 3, 64, scale, m, first, positions, longest);
                else if (size == 64 && count == TILE)
                    attend_one(q, k, v, o, lengths[r], TILE, 64, scale, m, first, positions, longest);
                else if (size == 64)
                    attend_one(q, k, v, o, lengths[r], count, 64, scale, m, first, positions, longest);
                else if (size == 128)
                    attend_one(q, k, v, o, lengths[r], count, 128, scale, m, first, positions, longest);
                else
                    attend_one(q, k, v, o, lengths[r], count, size, scale, m, first, positions, longest);
            }
}
