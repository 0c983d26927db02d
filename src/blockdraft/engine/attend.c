// A few queries per row of a key/value cache, every row with its own length: what SDPA computes over padded rows, without reading
// the padding. Sums are made in an order that depends on nothing but the keys that a query sees: its result is to the bit what it is
// beside other queries, or with keys between and behind that its mask hides.

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define KEYS 64          // that share a rescaling
#define MOST_QUERIES 24  // that share a reading of the keys
#define MOST_SIZE 256

typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));

// a * b + c. Said, not left to the compiler: it fuses in one copy of a loop and not in another, and what a query sees would depend on
// the queries beside it. (In linear.c it would spill registers if it were said.)
static inline __attribute__((always_inline)) vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
  return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

static inline __attribute__((always_inline)) vec every(float x) { return x - (vec){0}; }

// Lane i and lane i ^ step are added, for falling steps. The places are constants: computed ones cost more than the sum.
static inline __attribute__((always_inline)) float sum_of(vec x) {
#if WIDTH == 16
  x += __builtin_shuffle(x, (ints){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  x += __builtin_shuffle(x, (ints){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
  x += __builtin_shuffle(x, (ints){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
  x += __builtin_shuffle(x, (ints){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
#elif WIDTH == 8
  x += __builtin_shuffle(x, (ints){4, 5, 6, 7, 0, 1, 2, 3});
  x += __builtin_shuffle(x, (ints){2, 3, 0, 1, 6, 7, 4, 5});
  x += __builtin_shuffle(x, (ints){1, 0, 3, 2, 5, 4, 7, 6});
#else
  x += __builtin_shuffle(x, (ints){2, 3, 0, 1});
  x += __builtin_shuffle(x, (ints){1, 0, 3, 2});
#endif
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

#define TOGETHER 3  // queries whose sums share registers
#define PAIR 2      // keys that do

// Scores of n queries and some keys that lie one after the other: every dot product is summed alike, whatever is beside it.
static inline __attribute__((always_inline)) void score(const int n, const int keys, const float *q, const float *k,
                                                        float (*scores)[KEYS], int64_t at, const int64_t size, float scale) {
  vec sums[TOGETHER][PAIR] = {0};
  float rest[TOGETHER][PAIR] = {0};
  int64_t d = 0;
  for (; d + WIDTH <= size; d += WIDTH)
    for (int g = 0; g < n; g++)
      for (int t = 0; t < keys; t++) sums[g][t] = fused(*(const vec *)(q + g * size + d), *(const vec *)(k + t * size + d), sums[g][t]);
  for (; d < size; d++)
    for (int g = 0; g < n; g++)
      for (int t = 0; t < keys; t++) rest[g][t] = fmaf(q[g * size + d], k[t * size + d], rest[g][t]);
  for (int g = 0; g < n; g++)
    for (int t = 0; t < keys; t++) scores[g][at + t] = (sum_of(sums[g][t]) + rest[g][t]) * scale;
}

static inline __attribute__((always_inline)) void score_keys(const int n, const float *q, const float *k, int64_t count,
                                                             float (*scores)[KEYS], const int64_t size, float scale) {
  int64_t t = 0;
  for (; t + PAIR <= count; t += PAIR) score(n, PAIR, q, k + t * size, scores, t, size, scale);
  for (; t < count; t++) score(n, 1, q, k + t * size, scores, t, size, scale);
}

// What a query has gathered so far.
typedef struct {
  float most, total;
  float sum[MOST_SIZE];
} gathered;

// Turn the scores of up to KEYS keys into weights, and shrink what was gathered before to the new largest score: one
// function, compiled once.
static __attribute__((noinline, noclone)) void weigh(gathered *g, float *s, int64_t count, const int64_t size) {
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
}

// Gather `wide` vectors of the values of some keys for n queries; keys lie at v + places[t] * size, or one after the other.
static inline __attribute__((always_inline)) void gather_values(const int n, const int wide, gathered *all, float (*scores)[KEYS],
                                                                const float *v, const int32_t *places, int64_t count,
                                                                const int64_t size, int64_t d) {
  vec sums[TOGETHER][4];
  for (int g = 0; g < n; g++)
    for (int i = 0; i < wide; i++) sums[g][i] = *(const vec *)(all[g].sum + d + i * WIDTH);
  for (int64_t t = 0; t < count; t++) {
    const float *value = v + (places ? places[t] : t) * size + d;
    for (int g = 0; g < n; g++)
      for (int i = 0; i < wide; i++) sums[g][i] = fused(every(scores[g][t]), *(const vec *)(value + i * WIDTH), sums[g][i]);
  }
  for (int g = 0; g < n; g++)
    for (int i = 0; i < wide; i++) *(vec *)(all[g].sum + d + i * WIDTH) = sums[g][i];
}

// Take the scores of up to KEYS keys of n queries into what they have gathered.
static inline __attribute__((always_inline)) void take(const int n, gathered *all, float (*scores)[KEYS], const float *v,
                                                       const int32_t *places, int64_t count, const int64_t size) {
  for (int g = 0; g < n; g++) weigh(all + g, scores[g], count, size);
  int64_t d = 0;
  for (; d + 4 * WIDTH <= size; d += 4 * WIDTH) gather_values(n, 4, all, scores, v, places, count, size, d);
  for (; d + WIDTH <= size; d += WIDTH) gather_values(n, 1, all, scores, v, places, count, size, d);
  for (; d < size; d++)
    for (int g = 0; g < n; g++)
      for (int64_t t = 0; t < count; t++)
        all[g].sum[d] = fmaf(scores[g][t], v[(places ? places[t] : t) * size + d], all[g].sum[d]);
}

// Take some keys that all of n queries see into what they have gathered.
static inline __attribute__((always_inline)) void attend_keys(const int n, gathered *all, const float *q, const float *k, const float *v,
                                                              int64_t count, const int64_t size, float scale) {
  float scores[TOGETHER][KEYS];
  score_keys(n, q, k, count, scores, size, scale);
  take(n, all, scores, v, 0, count, size);
}

// Take in what n queries see behind the whole blocks of keys: up to `shared` all of it, and of the rest what the mask leaves, as if the
// hidden ones were not there: a branch of a tree as if it stood alone.
static inline __attribute__((always_inline)) void attend_rest(const int n, gathered *all, const float *q, const float *k, const float *v,
                                                              int64_t whole, int64_t shared, int64_t length, const int64_t size,
                                                              float scale, const float *mask, int64_t first, int64_t positions,
                                                              int64_t longest) {
  float scores[TOGETHER][KEYS];
  score_keys(n, q, k + whole * size, shared - whole, scores, size, scale);
  for (int g = 0; g < n; g++) {
    const float *seen = mask + (first + g) % positions * longest;
    int32_t places[KEYS];
    int64_t count = 0;
    for (int64_t t = whole; t < shared; t++) places[count++] = t;
    for (int64_t t = shared; t < length; t++) {
      if (seen[t] == -INFINITY) continue;
      places[count] = t;
      score(1, 1, q + g * size, k + t * size, scores + g, count, size, scale);
      scores[g][count++] += seen[t];
      if (count == KEYS) take(1, all + g, scores + g, v, places, count, size), count = 0;
    }
    if (count) take(1, all + g, scores + g, v, places, count, size);
  }
}

// Blocks of keys one after the other, and all queries over each: what they share is read once from memory.
static inline __attribute__((always_inline)) void attend_some(const float *q, const float *k, const float *v, float *out,
                                                              int64_t length, int64_t queries, const int64_t size, float scale,
                                                              const float *mask, int64_t first, int64_t positions, int64_t longest) {
  gathered all[MOST_QUERIES];
  for (int64_t g = 0; g < queries; g++) {
    all[g].most = -1e30f;
    all[g].total = 0.0f;
    for (int64_t d = 0; d < size; d++) all[g].sum[d] = 0.0f;
  }
  int64_t shared = length;  // keys in front that all of these queries see
  if (mask)
    for (int64_t g = 0; g < queries; g++) {
      const float *seen = mask + (first + g) % positions * longest;
      int64_t t = 0;
      while (t < shared && seen[t] == 0.0f) t++;
      shared = t;
    }
  const int64_t whole = mask ? shared - shared % KEYS : shared, paired = queries - queries % TOGETHER;
  for (int64_t start = 0; start < whole; start += KEYS) {
    const int64_t count = whole - start < KEYS ? whole - start : KEYS;
    const float *keys = k + start * size, *values = v + start * size;
    for (int64_t g = 0; g < paired; g += TOGETHER) attend_keys(TOGETHER, all + g, q + g * size, keys, values, count, size, scale);
    for (int64_t g = paired; g < queries; g++) attend_keys(1, all + g, q + g * size, keys, values, count, size, scale);
  }
  if (mask) {
#define REST(n) attend_rest(n, all + g, q + g * size, k, v, whole, shared, length, size, scale, mask, first + g, positions, longest)
    for (int64_t g = 0; g < paired; g += TOGETHER) REST(TOGETHER);
    for (int64_t g = paired; g < queries; g++) REST(1);
#undef REST
  }
  for (int64_t g = 0; g < queries; g++)
    for (int64_t d = 0; d < size; d++) out[g * size + d] = all[g].sum[d] / all[g].total;
}

// queries [rows, heads, group, size], keys and values [rows, heads, capacity, size] with the strides given, out like queries; mask,
// if any, [rows, positions, longest] is added to the scores: query g of a group looks at its row g % positions.
void attend_rows(const float *queries, const float *keys, const float *values, float *out, const int32_t *lengths, const float *mask,
                 int64_t rows, int64_t heads, int64_t group, int64_t size, int64_t row_stride, int64_t head_stride, int64_t positions,
                 int64_t longest, int64_t mask_stride, float scale) {
  // Queries that are alone with few others are shared out finer, so that no thread waits for the last one.
  int64_t most = MOST_QUERIES;
  while (most > TOGETHER && rows * heads * ((group + most - 1) / most) < 4 * omp_get_max_threads()) most /= 2;
  const int64_t tiles = (group + most - 1) / most;
#pragma omp parallel for collapse(3) schedule(dynamic, 1)
  for (int64_t r = 0; r < rows; r++)
    for (int64_t h = 0; h < heads; h++)
      for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t first = tile * most, count = group - first < most ? group - first : most;
        const int64_t at = ((r * heads + h) * group + first) * size, cached = r * row_stride + h * head_stride;
        const float *m = mask ? mask + r * mask_stride : 0;
#define SOME(count, size) \
  attend_some(queries + at, keys + cached, values + cached, out + at, lengths[r], count, size, scale, m, first, positions, longest)
        // The usual sizes as constants, so that the compiler unrolls their loops.
        if (size == 64)
          SOME(count, 64);
        else if (size == 128)
          SOME(count, 128);
        else
          SOME(count, size);
      }
}
