// What a training step does to the logits of a head, in two calls: what each row costs, and the gradient of that. Rows are
// independent; one of some thousand logits stays in a core's own cache while it is read several times.

// exp(x) for x <= 0, as exp_of_negative, of several at once.
static inline __attribute__((always_inline)) vec exp_of_negatives(vec x) {
  const ints there = ~(x < every(-87.0f));  // true of NaN, which must be seen
  const vec bounded = (vec)((there & (ints)x) | (~there & (ints)every(-87.0f)));
  const vec scaled = bounded * every(1.44269504f);
  const ints whole = __builtin_convertvector(scaled - every(0.5f), ints);  // towards zero: the nearest, since x is not positive
  const vec f = (scaled - __builtin_convertvector(whole, vec)) * every(0.693147181f);
  vec p = fused(f, every(0.00138888889f), every(0.00833333333f));
  p = fused(f, p, every(0.0416666667f));
  p = fused(f, p, every(0.166666667f));
  p = fused(f, p, every(0.5f));
  p = fused(f, p, every(1.0f));
  p = fused(f, p, every(1.0f));
  const ints power = (whole + 127) << 23;
  return (vec)(there & (ints)(p * (vec)power));
}

static inline __attribute__((always_inline)) vec load(const float *from) {
  vec x;
  memcpy(&x, from, sizeof x);
  return x;
}

static inline __attribute__((always_inline)) void store(float *to, vec x) { memcpy(to, &x, sizeof x); }

static inline float greatest(const float *x, int64_t n) {
  float best = -INFINITY;
  int64_t i = 0;
  if (n >= WIDTH) {
    vec most = load(x);
    for (i = WIDTH; i + WIDTH <= n; i += WIDTH) {
      const vec next = load(x + i);
      const ints more = next > most;
      most = (vec)((more & (ints)next) | (~more & (ints)most));
    }
    for (int lane = 0; lane < WIDTH; lane++) best = most[lane] > best ? most[lane] : best;
  }
  for (; i < n; i++) best = x[i] > best ? x[i] : best;
  return best;
}

// For each row of logits: cross entropy at its label, KL from the teacher's logits (0 without), the logarithms of both sums, and
// whether the label was the best word before the offsets, which are added to both rows.
void loss_costs(float *logits, float *teacher, const float *offset, const int64_t *labels, int64_t rows, int64_t words,
                float *entropy, float *divergence, float *norm, float *teacher_norm, uint8_t *right) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    float *z = logits + row * words, *t = teacher ? teacher + row * words : NULL;
    int64_t first = 0;
    const float best = greatest(z, words);
    while (first < words && z[first] != best) first++;
    right[row] = first == labels[row];
    if (offset)
      for (int64_t i = 0; i < words; i++) z[i] += offset[i];
    if (offset && t)
      for (int64_t i = 0; i < words; i++) t[i] += offset[i];
    const float most = offset ? greatest(z, words) : best, teacher_most = t ? greatest(t, words) : 0.0f;
    vec sum = every(0.0f), teacher_sum = every(0.0f), apart = every(0.0f);
    int64_t i = 0;
    for (; i + WIDTH <= words; i += WIDTH) {
      const vec ours = load(z + i);
      sum += exp_of_negatives(ours - every(most));
      if (t) {
        const vec theirs = load(t + i), mass = exp_of_negatives(theirs - every(teacher_most));
        teacher_sum += mass;
        apart = fused(mass, (theirs - every(teacher_most)) - (ours - every(most)), apart);
      }
    }
    float total = sum_of(sum), teacher_total = sum_of(teacher_sum), difference = sum_of(apart);
    for (; i < words; i++) {
      total += exp_of_negative(z[i] - most);
      if (t) {
        const float mass = exp_of_negative(t[i] - teacher_most);
        teacher_total += mass;
        difference += mass * ((t[i] - teacher_most) - (z[i] - most));
      }
    }
    norm[row] = most + logf(total);
    entropy[row] = norm[row] - z[labels[row]];
    teacher_norm[row] = t ? teacher_most + logf(teacher_total) : 0.0f;
    divergence[row] = t ? difference / teacher_total - logf(teacher_total) + logf(total) : 0.0f;
  }
}

// In place of the logits: hard * (p - label) + soft * (p - q), with p of the logits and q of the teacher's.
void loss_gradients(float *logits, const float *teacher, const int64_t *labels, int64_t rows, int64_t words, const float *norm,
                    const float *teacher_norm, const float *hard, const float *soft) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    float *z = logits + row * words;
    const float *t = teacher ? teacher + row * words : NULL;
    const float ours = hard[row] + (t ? soft[row] : 0.0f), theirs = t ? soft[row] : 0.0f;
    const int64_t label = labels[row];
    int64_t i = 0;
    if (ours == 0.0f) {
      memset(z, 0, sizeof(float) * words);
      continue;
    }
    for (; i + WIDTH <= words; i += WIDTH) {
      vec gradient = exp_of_negatives(load(z + i) - every(norm[row])) * every(ours);
      if (t) gradient -= exp_of_negatives(load(t + i) - every(teacher_norm[row])) * every(theirs);
      store(z + i, gradient);
    }
    for (; i < words; i++) {
      float gradient = exp_of_negative(z[i] - norm[row]) * ours;
      if (t) gradient -= exp_of_negative(t[i] - teacher_norm[row]) * theirs;
      z[i] = gradient;
    }
    z[label] -= hard[row];
  }
}
