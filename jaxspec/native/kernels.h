/* The inner loops, compiled once for each instruction set; calls.c picks the best that runs. */
#ifndef JAXSPEC_KERNELS_H
#define JAXSPEC_KERNELS_H

#include <stdint.h>

enum weight_type { FLOAT32, BFLOAT16, INT8, NUM_WEIGHT_TYPES };
enum activation { SILU, GELU };

/* y[n, lo:hi] = x[n, k] @ w[k, lo:hi] * scale[lo:hi] + bias[lo:hi]; scale and bias may be absent. */
struct product {
  const float *x;
  int64_t x_stride;
  int64_t n, k;
  const void *w;
  int64_t w_stride; /* elements from one row of w to the next */
  const float *scale, *bias;
  float *y;
  int64_t y_stride;
  int add; /* onto y instead of over it; not with a scale */
};

/* Keys [rows, kv_heads, head_dim, places], values [rows, kv_heads, places, head_dim], and which
 * places each token sees: [rows, tokens or 1, places]. */
struct segment {
  const float *keys, *values;
  const uint8_t *mask;
  int64_t places, mask_tokens;
};

enum { MAX_HEAD_DIM = 512, MAX_QUERIES = 64 };

struct attention {
  struct segment segments[3];
  int64_t rows, tokens, kv_heads, group, head_dim, pairs, angle_tokens;
  const float *heads; /* [rows, tokens, kv_heads, group + 2, head_dim], as multiplied */
  const float *cosines, *sines, *q_norm, *k_norm;
  float eps, scale, softcap;
  int plus_one;
  float *attended; /* [rows, tokens, kv_heads, group, head_dim] */
  int64_t block;   /* tokens of a chunk */
  float *scratch;  /* of each worker: scores, queries, sums */
  int64_t scratch_size, score_stride;
};

/* Each row: y = base + factor * x / rms(x) * scale (1 + scale with plus_one); without a scale, base +
 * factor * x. y may be x. */
struct norm {
  const float *x, *scale, *base; /* the last two may be absent */
  float *y;
  float factor, eps;
  int plus_one;
  int64_t rows, count;
};

struct kernels {
  const char *name;
  int lanes;
  void (*product[NUM_WEIGHT_TYPES])(const struct product *, int64_t lo, int64_t hi);
  /* The same with w[hi, k]: each output is a dot product with a row of w. */
  void (*turned[NUM_WEIGHT_TYPES])(const struct product *, int64_t lo, int64_t hi);
  /* gate[i] = activation(gate[i]) * up[i] */
  void (*gate)(enum activation, float *gate, const float *up, int64_t count);
  /* Rows lo to hi - 1. */
  void (*norm)(const struct norm *, int64_t lo, int64_t hi);
  /* The largest threshold such that the keys from it on weigh `least` or more; 0 if none do. */
  uint32_t (*threshold)(const uint32_t *keys, const float *weights, float least, int64_t count);
  /* One chunk of an attention: some tokens of one row, for one key head. */
  void (*attend)(void *attention, int64_t chunk, int worker);
  /* The new tokens' own keys, turned, and values. */
  void (*keep_own)(const struct attention *, float *keys, float *values);
};

#endif
