// A few queries per row of a key/value cache, every row with its own length: what SDPA computes over padded rows, without reading
// the padding. Sums are made in an order that depends on nothing but the keys that a query sees: its result is to the bit what it is
// beside other queries, or with keys between and behind that its mask hides.

#include <math.h>
#include <stdint.h>
#include <string.h>

#define KEYS 64          // that share a rescaling
#define MOST_QUERIES 24  // that share a reading of the keys
#define MOST_SIZE 256

typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));

static inline float sum_of(vec x) {
  for (int step = WIDTH / 2; step; step /= 2) {
    ints places;
    for (int i = 0; i < WIDTH; i++) places[i] = i ^ step;
    x += __builtin_shuffle(x, places);  // GCC's
  }
  return x[0];
}

// exp(x) for x <= 0: 2^n times a polynomial, to 2e-7 of its value; 0 below -87.
static inline float exp_of_negative(float x) {
  const float bounded = x < -87.0f ? -87.0f : x;
  const float whole = __builtin_floorf(bounded * 1.44269504f + 0.5f);
  const float f = (bounded * 1.44269504f - whole) * 0.693147181f;
  const float p = 1.0f + f * (1.0f + f * (0.5f + f * (0.166666667f + f * (0.0416666667f + f * (0.00833333333f + f * 0.00138888889f)))));
  const int32_t bits_of_power = ((int32_t)whole + 127) << 23;
  float power;
  memcpy(&power, &bits_of_power, sizeof power);
  return x < -87.0f ? 0.0f : p * power;
}

static inline __attribute__((always_inline)) float dot(const float *a, const float *b, const int64_t size) {
  vec sum = {0};
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) sum += *(const vec *)(a + i) * *(const vec *)(b + i);
  float rest = 0.0f;
  for (; i < size; i++) rest += a[i] * b[i];
  return sum_of(sum) + rest;
}

// What a query has gathered so far.
typedef struct {
  float most, total;
  float sum[MOST_SIZE];
} gathered;

// Take in the scores of up to KEYS keys that lie at k + places[t] * size (or one after the other, without places).
static inline __attribute__((always_inline)) void take(gathered *g, float *s, int64_t count, const float *v, const int32_t *places,
                                                       const int64_t size) {
  for (int64_t t = count; t < KEYS; t++) s[t] = -INFINITY;
  float best = g->most, lanes[WIDTH];
  for (int j = 0; j < WIDTH; j++) lanes[j] = best;
  for (int64_t t = 0; t < KEYS; t += WIDTH)
    for (int j = 0; j < WIDTH; j++) lanes[j] = s[t + j] > lanes[j] ? s[t + j] : lanes[j];
  for (int j = 0; j < WIDTH; j++) best = lanes[j] > best ? lanes[j] : best;
  for (int64_t t = 0; t < KEYS; t++) s[t] = exp_of_negative(s[t] - best);
  vec added = {0};
  for (int64_t t = 0; t < KEYS; t += WIDTH) added += *(const vec *)(s + t);
  const float shrink = exp_of_negative(g->most - best);
  g->most = best;
  g->total = g->total * shrink + sum_of(added);
  for (int64_t d = 0; d < size; d++) g->sum[d] *= shrink;
  if (v)
    for (int64_t t = 0; t < count; t++) {
      const float *value = v + (places ? places[t] : t) * size;
      for (int64_t d = 0; d < size; d++) g->sum[d] += s[t] * value[d];
    }
}

// The keys that a mask leaves are taken in as if the others were not there: a branch of a tree as if it stood alone.
static inline __attribute__((always_inline)) void attend_some(const float *q, const float *k, const float *v, float *out,
                                                              int64_t length, const int64_t queries, const int64_t size, float scale,
                                                              const float *mask, int64_t first, int64_t positions, int64_t longest) {
  float scores[MOST_QUERIES][KEYS];
  gathered all[MOST_QUERIES];
  for (int64_t g = 0; g < queries; g++) {
    all[g].most = -1e30f;
    all[g].total = 0.0f;
    for (int64_t d = 0; d < size; d++) all[g].sum[d] = 0.0f;
  }
  int64_t shared = length;  // keys in front that all of these queries see
  if (mask) {
    for (int64_t g = 0; g < queries; g++) {
      const float *seen = mask + (first + g) % positions * longest;
      int64_t t = 0;
      while (t < shared && seen[t] == 0.0f) t++;
      shared = t;
    }
    shared -= shared % KEYS;
  }
  for (int64_t start = 0; start < shared; start += KEYS) {
    const int64_t count = shared - start < KEYS ? shared - start : KEYS;
    for (int64_t t = 0; t < count; t++)
      for (int64_t g = 0; g < queries; g++) scores[g][t] = dot(q + g * size, k + (start + t) * size, size) * scale;
    for (int64_t g = 0; g < queries; g++) take(all + g, scores[g], count, 0, 0, size);
    for (int64_t t = 0; t < count; t++) {
      const float *value = v + (start + t) * size;
      for (int64_t g = 0; g < queries; g++)
        for (int64_t d = 0; d < size; d++) all[g].sum[d] += scores[g][t] * value[d];
    }
  }
  if (mask)
    for (int64_t g = 0; g < queries; g++) {
      const float *seen = mask + (first + g) % positions * longest;
      int32_t places[KEYS];
      int64_t count = 0;
      for (int64_t t = shared; t < length; t++) {
        if (seen[t] == -INFINITY) continue;
        places[count] = t;
        scores[0][count++] = dot(q + g * size, k + t * size, size) * scale + seen[t];
        if (count == KEYS) take(all + g, scores[0], count, v, places, size), count = 0;
      }
      if (count) take(all + g, scores[0], count, v, places, size);
    }
  for (int64_t g = 0; g < queries; g++)
    for (int64_t d = 0; d < size; d++) out[g * size + d] = all[g].sum[d] / all[g].total;
}

// queries [rows, heads, group, size], keys and values [rows, heads, capacity, size] with the strides given, out like queries; mask,
// if any, [rows, positions, longest] is added to the scores: query g of a group looks at its row g % positions.
void attend_rows(const float *queries, const float *keys, const float *values, float *out, const int32_t *lengths, const float *mask,
                 int64_t rows, int64_t heads, int64_t group, int64_t size, int64_t row_stride, int64_t head_stride, int64_t positions,
                 int64_t longest, int64_t mask_stride, float scale) {
  const int64_t tiles = (group + MOST_QUERIES - 1) / MOST_QUERIES;
#pragma omp parallel for collapse(3) schedule(dynamic, 1)
  for (int64_t r = 0; r < rows; r++)
    for (int64_t h = 0; h < heads; h++)
      for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t first = tile * MOST_QUERIES, count = group - first < MOST_QUERIES ? group - first : MOST_QUERIES;
        const int64_t at = ((r * heads + h) * group + first) * size, cached = r * row_stride + h * head_stride;
        const float *m = mask ? mask + r * mask_stride : 0;
#define SOME(count, size) \
  attend_some(queries + at, keys + cached, values + cached, out + at, lengths[r], count, size, scale, m, first, positions, longest)
        // The usual sizes as constants, so that the compiler unrolls their loops.
        if (size == 64 && count == 3)
          SOME(3, 64);
        else if (size == 64 && count == MOST_QUERIES)
          SOME(MOST_QUERIES, 64);
        else if (size == 64)
          SOME(count, 64);
        else if (size == 128)
          SOME(count, 128);
        else
          SOME(count, size);
      }
}
