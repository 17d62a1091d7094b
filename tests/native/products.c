/* Runs every product and filter of one instruction set against sums in double, with buffers of exact
 * size at odd addresses. Prints what is wrong; exits 0 if nothing is. KERNELS names the table. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

extern const struct kernels KERNELS;

static uint32_t state = 1;

static float draw(void) {
  state = state * 1664525u + 1013904223u;
  return (float)(state >> 8) / (1 << 23) - 1;
}

/* `size` bytes, `offset` behind an aligned address, so that one byte more is an error. */
static void *room(size_t size, size_t offset, void **block) {
  *block = malloc(size + offset);
  return (char *)*block + offset;
}

static double value(enum weight_type type, const void *w, int64_t at) {
  if (type == FLOAT32) {
    float got;
    memcpy(&got, (const char *)w + 4 * at, 4);
    return got;
  }
  if (type == INT8) return ((const int8_t *)w)[at];
  uint16_t half;
  memcpy(&half, (const char *)w + 2 * at, 2);
  uint32_t bits = (uint32_t)half << 16;
  float got;
  memcpy(&got, &bits, 4);
  return got;
}

enum kind { PLAIN, SCALED, ADDED, NUM_KINDS };

static int check(enum weight_type type, int turned, int64_t n, int64_t k, int64_t o, enum kind kind) {
  static const size_t sizes[] = {4, 2, 1};
  void *blocks[5];
  float *x = room((size_t)(n * k) * 4, 4, &blocks[0]), *y = room((size_t)(n * o) * 4, 12, &blocks[1]);
  char *w = room((size_t)(k * o) * sizes[type], sizes[type], &blocks[2]);
  float *scale = room((size_t)o * 4, 4, &blocks[3]), *bias = room((size_t)o * 4, 8, &blocks[4]);
  for (int64_t i = 0; i < n * k; i++) x[i] = draw();
  for (int64_t i = 0; i < o; i++) scale[i] = draw(), bias[i] = draw();
  for (int64_t i = 0; i < k * o; i++) {
    float drawn = draw();
    uint32_t bits;
    memcpy(&bits, &drawn, 4);
    uint16_t half = (uint16_t)(bits >> 16);
    int8_t whole = (int8_t)(127 * drawn);
    memcpy(w + (size_t)i * sizes[type],
           type == FLOAT32 ? (void *)&drawn : type == BFLOAT16 ? (void *)&half : (void *)&whole,
           sizes[type]);
  }
  struct product p = {.x = x, .x_stride = k, .n = n, .k = k, .w = w, .w_stride = turned ? k : o,
                      .scale = kind == SCALED ? scale : NULL, .bias = kind == SCALED ? bias : NULL,
                      .y = y, .y_stride = o, .add = kind == ADDED};
  for (int64_t i = 0; kind == ADDED && i < n * o; i++) y[i] = 1;
  /* In chunks, one of them empty. */
  const int64_t ends[] = {0, o / 3, o / 3, o};
  for (int c = 0; c < 3; c++)
    (turned ? KERNELS.turned : KERNELS.product)[type](&p, ends[c], ends[c + 1]);
  int wrong = 0;
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < o; j++) {
      double sum = 0, size = 0;
      for (int64_t t = 0; t < k; t++) {
        double term = x[i * k + t] * value(type, w, turned ? j * k + t : t * o + j);
        sum += term, size += fabs(term);
      }
      if (kind == SCALED) sum = sum * scale[j] + bias[j], size = size * fabs(scale[j]) + fabs(bias[j]);
      if (kind == ADDED) sum += 1, size += 1;
      wrong += !(fabs(y[i * o + j] - sum) <= 1e-6 * size + 1e-30);
    }
  if (wrong)
    printf("%s: %d wrong, type %d, turned %d, %d x %d x %d, kind %d\n", KERNELS.name, wrong, type,
           turned, (int)n, (int)k, (int)o, kind);
  for (int i = 0; i < 5; i++) free(blocks[i]);
  return wrong;
}

/* Of distinct keys, each of weight 1, the threshold of the first `least` is the last one of these. */
static int check_threshold(int64_t count) {
  void *blocks[2];
  uint32_t *keys = room((size_t)count * 4, 4, &blocks[0]);
  float *weights = room((size_t)count * 4, 12, &blocks[1]);
  int wrong = 0;
  for (int64_t i = 0; i < count; i++) keys[i] = (uint32_t)(i * 7919 % count) << 8, weights[i] = 1;
  for (int64_t least = 1; least <= count; least++)
    wrong += KERNELS.threshold(keys, weights, (float)least, count) != (uint32_t)(count - least) << 8;
  wrong += KERNELS.threshold(keys, weights, (float)count + 1, count) != 0;
  if (wrong) printf("%s: %d thresholds of %d keys are wrong\n", KERNELS.name, wrong, (int)count);
  for (int i = 0; i < 2; i++) free(blocks[i]);
  return wrong;
}

int main(void) {
  static const int64_t shapes[][3] = {{1, 64, 64}, {1, 7, 5}, {2, 33, 130}, {3, 1, 1}, {4, 19, 16},
                                      {5, 100, 17}, {6, 65, 96}, {13, 48, 31}, {26, 40, 72}, {64, 21, 70}};
  static const int64_t counts[] = {1, 5, 16, 33, 64, 131};
  int wrong = 0;
  for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) wrong += check_threshold(counts[c]);
  for (int type = 0; type < NUM_WEIGHT_TYPES; type++)
    for (int turned = 0; turned < 2; turned++)
      for (int kind = 0; kind < NUM_KINDS; kind++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
          wrong += check((enum weight_type)type, turned, shapes[s][0], shapes[s][1], shapes[s][2],
                         (enum kind)kind);
  return wrong != 0;
}
