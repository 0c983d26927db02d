// Draft trees on the CPU: growing one from a block's marginals and a copy, who sees whom in it, and keeping a path of it in a cache.
// A round does each of them once; as torch operations over some sixty numbers they take as long as a layer of a small model.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// A prefix that may become a node: a word of the parent's next slot by its rank, or (rank -1) the next token of the copy.
typedef struct {
  float score;
  int32_t parent, depth, rank, order;
} prefix;

typedef struct {
  prefix *at;
  int32_t count, pushed;
} heap;

// The more probable one; of equals the shallower, then the one that came first.
static inline int comes_before(const prefix *a, const prefix *b) {
  if (a->score != b->score) return a->score > b->score;
  if (a->depth != b->depth) return a->depth < b->depth;
  return a->order < b->order;
}

static void push(heap *h, prefix p) {
  p.order = h->pushed++;
  int32_t i = h->count++;
  for (; i > 0 && comes_before(&p, &h->at[(i - 1) / 2]); i = (i - 1) / 2) h->at[i] = h->at[(i - 1) / 2];
  h->at[i] = p;
}

static prefix pop(heap *h) {
  const prefix top = h->at[0], last = h->at[--h->count];
  int32_t i = 0;
  for (int32_t child = 1; child < h->count; child = 2 * i + 1) {
    if (child + 1 < h->count && comes_before(&h->at[child + 1], &h->at[child])) child++;
    if (!comes_before(&h->at[child], &last)) break;
    h->at[i] = h->at[child];
    i = child;
  }
  h->at[i] = last;
  return top;
}

typedef struct {
  const float *logs, *copy_logs;  // [slots][k], falling within a slot; [reach], falling
  const int64_t *words, *copies;
  int64_t slots, k, reach;
} row_of;

static inline int copy_goes_on(const row_of *r, int64_t depth) { return depth < r->reach && r->copy_logs[depth] > -INFINITY; }

// A word of the slot behind a node, from `rank` on; on the copy's path without the word that the copy has.
static void push_word(heap *h, const row_of *r, int32_t parent, float score, int on_copy, int32_t depth, int32_t rank) {
  if (depth >= r->slots) return;
  const int64_t *words = r->words + depth * r->k;
  if (on_copy && copy_goes_on(r, depth) && rank < r->k && words[rank] == r->copies[depth]) rank++;
  if (rank >= r->k) return;
  const float own = score + r->logs[depth * r->k + rank];
  if (own > -INFINITY) push(h, (prefix){own, parent, depth, rank, 0});
}

// The copy's next token, as probable as the copy or the drafter has it, whichever is more.
static void push_copy(heap *h, const row_of *r, int32_t parent, float score, int32_t depth) {
  if (!copy_goes_on(r, depth)) return;
  float value = r->copy_logs[depth];
  for (int64_t rank = 0; depth < r->slots && rank < r->k; rank++)
    if (r->words[depth * r->k + rank] == r->copies[depth]) {
      const float own = score + r->logs[depth * r->k + rank];
      value = own > value ? own : value;
      break;
    }
  push(h, (prefix){value, parent, depth, -1, 0});
}

// The `nodes` most probable prefixes of every row, best first; the rest of a row is marked with minus infinity. Returns 0 if there
// was no memory for it.
int64_t grow_tree(const float *logs, const int64_t *words, const int64_t *copies, const float *copy_logs, int64_t rows, int64_t slots,
                  int64_t k, int64_t reach, int64_t nodes, int64_t *tokens, int64_t *parents, float *scores) {
  heap h = {malloc(sizeof(prefix) * (3 * nodes + 4)), 0, 0};
  char *on_copy = malloc(nodes + 1);
  if (h.at == NULL || on_copy == NULL) {
    free(h.at);
    free(on_copy);
    return 0;
  }
  for (int64_t row = 0; row < rows; row++) {
    const row_of r = {logs + row * slots * k, copy_logs + row * reach, words + row * slots * k, copies + row * reach, slots, k, reach};
    int64_t *token = tokens + row * nodes, *parent = parents + row * nodes;
    float *score = scores + row * nodes;
    h.count = h.pushed = 0;
    on_copy[0] = 1;
    push_word(&h, &r, 0, 0.0f, 1, 0, 0);
    push_copy(&h, &r, 0, 0.0f, 0);
    int32_t made = 0;
    while (made < nodes && h.count) {
      const prefix p = pop(&h);
      token[made] = p.rank < 0 ? r.copies[p.depth] : r.words[p.depth * k + p.rank];
      parent[made] = p.parent;
      score[made] = p.score;
      on_copy[++made] = p.rank < 0;
      if (p.rank >= 0) push_word(&h, &r, p.parent, p.parent ? score[p.parent - 1] : 0.0f, on_copy[p.parent], p.depth, p.rank + 1);
      push_word(&h, &r, made, p.score, on_copy[made], p.depth + 1, 0);
      if (on_copy[made]) push_copy(&h, &r, made, p.score, p.depth + 1);
    }
    for (; made < nodes; made++) {
      token[made] = parent[made] = 0;
      score[made] = -INFINITY;
    }
  }
  free(h.at);
  free(on_copy);
  return 1;
}

// For every node whether it sees another (itself and its ancestors), and how many steps a candidate is from the anchor.
void see_ancestors(const int64_t *parents, int64_t rows, int64_t candidates, uint8_t *seen, int64_t *depths) {
  const int64_t nodes = candidates + 1;
  memset(seen, 0, rows * nodes * nodes);
  for (int64_t row = 0; row < rows; row++) {
    uint8_t *sees = seen + row * nodes * nodes;
    const int64_t *parent = parents + row * candidates;
    int64_t *depth = depths + row * candidates;
    sees[0] = 1;
    for (int64_t i = 1; i < nodes; i++) {
      const int64_t above = parent[i - 1] >= 0 && parent[i - 1] < i ? parent[i - 1] : 0;  // of numbers that are none: anything
      memcpy(sees + i * nodes, sees + above * nodes, nodes);
      sees[i * nodes + i] = 1;
      depth[i - 1] = above ? depth[above - 1] + 1 : 1;
    }
  }
}

// Slots `start + path[i]` of a row become the slots `start + i` of every buffer [rows][heads][capacity][size]; the path rises.
void keep_path(float *const *buffers, const int64_t *heads, const int64_t *sizes, int64_t count, int64_t capacity, int64_t row,
               int64_t start, const int64_t *path, int64_t length) {
  for (int64_t b = 0; b < count; b++)
    for (int64_t head = 0; head < heads[b]; head++) {
      float *slots = buffers[b] + ((row * heads[b] + head) * capacity + start) * sizes[b];
      for (int64_t i = 0; i < length; i++)
        if (path[i] != i) memcpy(slots + i * sizes[b], slots + path[i] * sizes[b], sizes[b] * sizeof(float));
    }
}
