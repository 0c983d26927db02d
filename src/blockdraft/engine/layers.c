// The layers of a Llama-like model over a few tokens, in float32, as one call: norm, attention with rotary positions over a cache,
// gated MLP. What lies between the products is small, and costs as much as they do when every step of it is a call of its own.

#include <math.h>
#include <string.h>

#include "linear.c"
#include "attend.c"
#include "tree.c"
#include "loss.c"

typedef struct {
  const float *attention_norm, *query_norm, *key_norm, *mlp_norm;  // the two in the middle may be NULL
  linear first, second;                                            // query, key and value; or query, then key and value
  linear output, up, down;                                         // up: gate and up side by side
  float *keys, *values;                                            // of the cache, at the first row
  float *tap;                                                      // where this layer's output is kept too, or NULL
} layer;

typedef struct {
  int64_t rows, positions;  // of each row
  int64_t hidden, heads, kv_heads, size, inner;
  int64_t row_stride, head_stride;       // of the cache
  int64_t longest, mask_stride;          // of the mask
  int64_t tap_stride;                    // between the tapped outputs of one token and the next
} sizes;

static inline float inverse_rms(const float *x, int64_t count, float epsilon) {
  float lanes[WIDTH] = {0}, sum = 0;
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH)
    for (int j = 0; j < WIDTH; j++) lanes[j] += x[i + j] * x[i + j];
  for (; i < count; i++) sum += x[i] * x[i];
  for (int j = 0; j < WIDTH; j++) sum += lanes[j];
  return 1.0f / sqrtf(sum / (float)count + epsilon);
}

static inline void norm_row(const float *x, const float *weight, float *y, int64_t count, float epsilon) {
  const float scale = inverse_rms(x, count, epsilon);
  for (int64_t i = 0; i < count; i++) y[i] = weight[i] * (x[i] * scale);
}

static void norm_rows(const float *x, const float *weight, float *y, int64_t rows, int64_t count, float epsilon) {
#pragma omp parallel for schedule(static) if (rows > 4)
  for (int64_t r = 0; r < rows; r++) norm_row(x + r * count, weight, y + r * count, count, epsilon);
}

// Both halves of a head turn by the same angles.
static inline void rotate(const float *x, const float *cosines, const float *sines, float *y, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    y[i] = a * cosines[i] - b * sines[i];
    y[i + half] = b * cosines[i + half] + a * sines[i + half];
  }
}

// silu(gate) * up of gate and up side by side.
static void gated(const float *both, float *y, int64_t rows, int64_t inner) {
#pragma omp parallel for schedule(static) if (rows > 1)
  for (int64_t r = 0; r < rows; r++) {
    const float *gate = both + 2 * r * inner, *up = gate + inner;
    float *out = y + r * inner;
    for (int64_t i = 0; i < inner; i++) {
      const float g = gate[i], e = exp_of_negative(g > 0 ? -g : g);
      out[i] = g * up[i] * (g > 0 ? 1.0f : e) / (1.0f + e);
    }
  }
}

static void add(float *x, const float *y, int64_t count) {
  for (int64_t i = 0; i < count; i++) x[i] += y[i];
}

// A token's keys and values, side by side in `joint`, into the cache behind its row's start.
static void place_key_values(const layer *l, const sizes *s, const float *joint, int64_t r, int64_t p, const float *cosines,
                             const float *sines, const int64_t *starts, float epsilon) {
  float turned[s->size];
  for (int64_t h = 0; h < s->kv_heads; h++) {
    const int64_t at = r * s->row_stride + h * s->head_stride + (starts[r] + p) * s->size;
    const float *from = joint + h * s->size;
    if (l->key_norm) norm_row(from, l->key_norm, turned, s->size, epsilon), from = turned;
    rotate(from, cosines, sines, l->keys + at, s->size);
    memcpy(l->values + at, joint + (s->kv_heads + h) * s->size, s->size * sizeof(float));
  }
}

// Queries into [row, kv head, head of the group * position, size], keys and values into the cache at each row's start.
static void place(const layer *l, const sizes *s, const float *joint, float *query, const float *cosines, const float *sines,
                  const int64_t *starts, float epsilon) {
  const int64_t own = s->heads * s->size, wide = own + 2 * s->kv_heads * s->size;
#pragma omp parallel for schedule(static) if (s->rows * s->positions > 4)
  for (int64_t t = 0; t < s->rows * s->positions; t++) {
    const int64_t r = t / s->positions, p = t % s->positions;
    const float *in = joint + t * wide, *c = cosines + t * s->size, *d = sines + t * s->size;
    float turned[s->size];
    for (int64_t h = 0; h < s->heads; h++) {
      const float *from = in + h * s->size;
      if (l->query_norm) norm_row(from, l->query_norm, turned, s->size, epsilon), from = turned;
      float whole[s->size];
      rotate(from, c, d, whole, s->size);
      memcpy(query + ((r * s->heads + h) * s->positions + p) * s->size, whole, sizeof whole);
    }
    place_key_values(l, s, in + own, r, p, c, d, starts, epsilon);
  }
}

// [row, head, position, size] to [row, position, head, size].
static void gather(const float *attended, float *y, const sizes *s) {
  for (int64_t r = 0; r < s->rows; r++)
    for (int64_t h = 0; h < s->heads; h++)
      for (int64_t p = 0; p < s->positions; p++)
        memcpy(y + ((r * s->positions + p) * s->heads + h) * s->size, attended + ((r * s->heads + h) * s->positions + p) * s->size,
               s->size * sizeof(float));
}

int64_t floats_of_work(const sizes *s) {
  const int64_t tokens = s->rows * s->positions;
  return tokens * (2 * s->hidden + (4 * s->heads + 2 * s->kv_heads) * s->size + 3 * s->inner);
}

// x [rows, positions, hidden] becomes the last layer's output. cosines, sines [rows, positions, size]; starts, lengths [rows]: the
// slot of each row's first token, and how many keys it sees; mask as in attend_rows, or NULL.
void run_layers(const layer *layers, int64_t count, const sizes *s, float *x, float *work, const float *cosines, const float *sines,
                const int64_t *starts, const int32_t *lengths, const float *mask, float epsilon, float scale) {
  const int64_t tokens = s->rows * s->positions, own = s->heads * s->size, joint = own + 2 * s->kv_heads * s->size;
  const int64_t group = s->heads / s->kv_heads;
  float *normed = work, *projected = normed + tokens * s->hidden, *queries = projected + tokens * joint;
  float *attended = queries + tokens * own, *gathered = attended + tokens * own, *both = gathered + tokens * own;
  float *inner = both + 2 * tokens * s->inner, *added = inner + tokens * s->inner;
  for (int64_t i = 0; i < count; i++) {
    const layer *l = layers + i;
    norm_rows(x, l->attention_norm, normed, tokens, s->hidden, epsilon);
    linear_rows(normed, &l->first, projected, tokens, s->hidden, l->second.weights ? own : joint, joint);
    if (l->second.weights) linear_rows(normed, &l->second, projected + own, tokens, s->hidden, joint - own, joint);
    place(l, s, projected, queries, cosines, sines, starts, epsilon);
    attend_rows(queries, l->keys, l->values, attended, lengths, mask, s->rows, s->kv_heads, group * s->positions, s->size, s->row_stride,
                s->head_stride, s->positions, s->longest, s->mask_stride, scale);
    gather(attended, gathered, s);
    linear_rows(gathered, &l->output, added, tokens, own, s->hidden, s->hidden);
    add(x, added, tokens * s->hidden);
    norm_rows(x, l->mlp_norm, normed, tokens, s->hidden, epsilon);
    linear_rows(normed, &l->up, both, tokens, s->hidden, 2 * s->inner, 2 * s->inner);
    gated(both, inner, tokens, s->inner);
    linear_rows(inner, &l->down, added, tokens, s->inner, s->hidden, s->hidden);
    add(x, added, tokens * s->hidden);
    if (l->tap)
      for (int64_t t = 0; t < tokens; t++) memcpy(l->tap + t * s->tap_stride, x + t * s->hidden, s->hidden * sizeof(float));
  }
}

// Keys and values of x [rows, positions, hidden], which every layer reads as it is, into the cache at each row's start.
void inject_rows(const layer *layers, int64_t count, const sizes *s, const float *x, float *work, const float *cosines,
                 const float *sines, const int64_t *starts, float epsilon) {
  const int64_t tokens = s->rows * s->positions, joint = 2 * s->kv_heads * s->size;
  for (int64_t i = 0; i < count; i++) {
    linear_rows(x, &layers[i].second, work, tokens, s->hidden, joint, joint);
    for (int64_t t = 0; t < tokens; t++)
      place_key_values(layers + i, s, work + t * joint, t / s->positions, t % s->positions, cosines + t * s->size, sines + t * s->size,
                       starts, epsilon);
  }
}
