// A linear layer over a few rows, in float32 with float32 or bfloat16 weights: every weight is read once from memory and meets all
// rows while it is near.
//
// The product of one row is bound by memory, that of a thousand by arithmetic; libraries are made for these two, and 4 to 32 rows,
// which verification lives on, get a fraction of either. Here a row's sums are made in the same order however many rows there are:
// a row's result does not depend, to the bit, on the rows beside it.

#include <stdint.h>
#include <stdlib.h>

#if defined(__AVX512F__)
#define WIDTH 16
#define BLOCK 12  // rows whose sums live in registers: 24 of 32
#elif defined(__AVX2__)
#define WIDTH 8
#define BLOCK 6  // 12 of 16
#else
#define WIDTH 4
#define BLOCK 6
#endif
#define NEAR 4096         // inputs of a panel that fits beside the others into a second-level cache
#define LINE 64           // bytes that memory is read by
#define TILE 96           // rows that meet a panel before the next one: more would push each other out of the cache
#define PANEL (2 * WIDTH)  // outputs that are computed together; the layout of the weights

typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(4 * WIDTH), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

typedef struct {
  const void *weights;  // [panels, inputs, PANEL]; NULL: no such layer
  const float *bias;    // [panels * PANEL]
  int64_t narrow;       // whether the weights are bfloat16
} linear;

int64_t panel(void) { return PANEL; }

// WIDTH weights from place i; a bfloat16 is the upper half of a float.
static inline __attribute__((always_inline)) vec weights_at(const void *w, int64_t i, const int narrow) {
  if (!narrow) return *(const vec *)((const float *)w + i);
  const halves h = *(const halves *)((const uint16_t *)w + i);
  return (vec)(__builtin_convertvector(h, bits) << 16);
}

// Sums of `count` rows against one panel, weights [inputs, PANEL].
static inline __attribute__((always_inline)) void panel_rows(const int count, const int narrow, const int fetch, const float *x,
                                                             const void *w, const float *bias, float *y, int64_t inputs,
                                                             int64_t stride, int64_t kept, const char *ahead, int64_t every) {
  vec low[BLOCK], high[BLOCK];
  for (int r = 0; r < count; r++) {
    low[r] = *(const vec *)bias;
    high[r] = *(const vec *)(bias + WIDTH);
  }
  int64_t wait = every;
#pragma GCC unroll 4
  for (int64_t k = 0; k < inputs; k++) {
    if (fetch && --wait == 0) {
      __builtin_prefetch(ahead, 0, 2);
      ahead += LINE;
      wait = every;
    }
    const vec a = weights_at(w, k * PANEL, narrow), b = weights_at(w, k * PANEL + WIDTH, narrow);
    for (int r = 0; r < count; r++) {
      const float s = x[r * inputs + k];
      low[r] += a * s;
      high[r] += b * s;
    }
  }
  for (int r = 0; r < count; r++) {
    float *out = y + r * stride;
    if (kept == PANEL) {
      *(vec *)out = low[r];
      *(vec *)(out + WIDTH) = high[r];
    } else {
      for (int64_t i = 0; i < kept; i++) out[i] = i < WIDTH ? low[r][i] : high[r][i - WIDTH];
    }
  }
}

static inline __attribute__((always_inline)) void panel_tile(const int narrow, const int fetch, const float *x, const void *w, const float *bias,
                                                             float *y, int64_t rows, int64_t inputs, int64_t stride, int64_t kept,
                                                             const char *next, int64_t stored) {
  // Passes of like size: a last pass over one or two rows would wait for its own sums.
  const int64_t passes = (rows + BLOCK - 1) / BLOCK;
  // With fetch, the next panel comes meanwhile, evenly over all passes: memory and arithmetic work at the same time. One pass is
  // all memory, many are all arithmetic: there it would only be in the way.
  const int64_t every = fetch ? (passes * LINE + stored - 1) / stored : 1;
  for (int64_t pass = 0, row = 0; pass < passes; pass++) {
    const int64_t count = rows / passes + (pass < rows % passes);
    const float *in = x + row * inputs;
    float *out = y + row * stride;
    switch (count) {
#define CASE(n) \
  case n: \
    panel_rows(n, narrow, fetch, in, w, bias, out, inputs, stride, kept, fetch ? next + pass * (inputs / every) * LINE : next, every); \
    break;
      CASE(1)
      CASE(2)
      CASE(3)
      CASE(4)
      CASE(5)
      CASE(6)
#if BLOCK > 6
      CASE(7)
      CASE(8)
      CASE(9)
      CASE(10)
      CASE(11)
      CASE(12)
#endif
    }
    row += count;
  }
}

// y[rows, outputs], its rows `stride` apart, = x[rows, inputs] times the weights, plus the bias.
void linear_rows(const float *x, const linear *l, float *y, int64_t rows, int64_t inputs, int64_t outputs, int64_t stride) {
  const int64_t panels = (outputs + PANEL - 1) / PANEL, stored = PANEL * (l->narrow ? 2 : 4);
#pragma omp parallel
  {
    // bfloat16 weights that many passes will read are widened once, where they stay near.
    float *const wide = l->narrow && rows > 4 * BLOCK && inputs <= NEAR ? malloc(inputs * PANEL * sizeof(float)) : NULL;
    for (int64_t row = 0; row < rows; row += TILE) {
      const int64_t count = rows - row < TILE ? rows - row : TILE;
#pragma omp for schedule(static)
      for (int64_t p = 0; p < panels; p++) {
        const int64_t kept = outputs - p * PANEL < PANEL ? outputs - p * PANEL : PANEL;
        const float *in = x + row * inputs, *bias = l->bias + p * PANEL;
        float *out = y + row * stride + p * PANEL;
        const char *own = (const char *)l->weights + p * inputs * stored, *next = p + 1 < panels ? own + inputs * stored : own;
        if (wide)
          for (int64_t i = 0; i < inputs * PANEL; i += WIDTH) *(vec *)(wide + i) = weights_at(own, i, 1);
        const int fetch = count > BLOCK && count <= 3 * BLOCK;
#define TILE_OF(narrow, fetch, w) panel_tile(narrow, fetch, in, w, bias, out, count, inputs, stride, kept, next, stored)
        if (l->narrow && !wide && fetch)
          TILE_OF(1, 1, own);
        else if (l->narrow && !wide)
          TILE_OF(1, 0, own);
        else if (fetch)
          TILE_OF(0, 1, wide ? (const void *)wide : own);
        else
          TILE_OF(0, 0, wide ? (const void *)wide : own);
      }
    }
    free(wide);
  }
}
