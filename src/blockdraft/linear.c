// A linear layer over a few rows, float32: every weight is read once from memory and meets all rows while it is near.
//
// The product of one row is bound by memory, that of a thousand by arithmetic; libraries are made for these two, and 4 to 32 rows,
// which verification lives on, get a fraction of either. Here a row's sums are made in the same order however many rows there are:
// a row's result does not depend, to the bit, on the rows beside it.

#include <stdint.h>

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
#define TILE 96           // rows that meet a panel before the next one: more would push each other out of the cache
#define PANEL (2 * WIDTH)  // outputs that are computed together; the layout of the weights

typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

int64_t panel(void) { return PANEL; }

// Sums of `count` rows against one panel, weights [inputs, PANEL].
static inline __attribute__((always_inline)) void panel_rows(const int count, const float *x, const float *w, const float *bias,
                                                             float *y, int64_t inputs, int64_t stride, int64_t kept) {
  vec low[BLOCK], high[BLOCK];
  for (int r = 0; r < count; r++) {
    low[r] = *(const vec *)bias;
    high[r] = *(const vec *)(bias + WIDTH);
  }
#pragma GCC unroll 4
  for (int64_t k = 0; k < inputs; k++) {
    const vec a = *(const vec *)(w + k * PANEL), b = *(const vec *)(w + k * PANEL + WIDTH);
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

static void panel_tile(const float *x, const float *w, const float *bias, float *y, int64_t rows, int64_t inputs, int64_t stride,
                       int64_t kept) {
  // Passes of like size: a last pass over one or two rows would wait for its own sums.
  const int64_t passes = (rows + BLOCK - 1) / BLOCK;
  for (int64_t pass = 0, row = 0; pass < passes; pass++) {
    const int64_t count = rows / passes + (pass < rows % passes);
    const float *in = x + row * inputs;
    float *out = y + row * stride;
    switch (count) {
#define CASE(n) \
  case n: \
    panel_rows(n, in, w, bias, out, inputs, stride, kept); \
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

// y[rows, outputs], its rows `stride` apart, = x[rows, inputs] times weights [panels, inputs, PANEL], plus bias [panels * PANEL].
void linear_rows(const float *x, const float *weights, const float *bias, float *y, int64_t rows, int64_t inputs, int64_t outputs,
                 int64_t stride) {
  const int64_t panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel
  for (int64_t row = 0; row < rows; row += TILE) {
    const int64_t count = rows - row < TILE ? rows - row : TILE;
#pragma omp for schedule(static)
    for (int64_t p = 0; p < panels; p++) {
      const int64_t kept = outputs - p * PANEL < PANEL ? outputs - p * PANEL : PANEL;
      panel_tile(x + row * inputs, weights + p * inputs * PANEL, bias + p * PANEL, y + row * stride + p * PANEL, count, inputs,
                 stride, kept);
    }
  }
}
