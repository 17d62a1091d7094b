/* Inner loops over vectors of LANES floats. Weights are float32, bfloat16 or int8 and become float32
 * as they are read; activations and sums are float32.
 *
 * Every output is summed in an order that depends neither on how many rows are multiplied at once nor
 * on how the work is cut: a pass over six tokens gives each token the very numbers of a pass over one.
 */
#include "kernels.h"

#include <float.h>
#include <math.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define REGISTERS 32
#define KERNELS kernels_avx512
#define NAME "avx512"
#elif defined(__AVX2__)
#define LANES 8
#define REGISTERS 16
#define KERNELS kernels_avx2
#define NAME "avx2"
#else
#define LANES 4
#define REGISTERS 32
#define KERNELS kernels_neon
#define NAME "neon"
#endif

/* Rows of x, and vectors of columns, whose sums are held in registers at once. */
#define MOST_ROWS 6
#define MOST_VECTORS (REGISTERS / 4)
/* Runs CALL(rows) for the 1 to 5 rows that are left of whole groups. */
#define FOR_REST(rest, CALL)  \
  switch (rest) {             \
    case 1: CALL(1); break;   \
    case 2: CALL(2); break;   \
    case 3: CALL(3); break;   \
    case 4: CALL(4); break;   \
    case 5: CALL(5); break;   \
    default: break;           \
  }

/* Loops of a known length, whose arrays are to stay in registers. */
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));

INLINE vec splat(float value) { return value - (vec){0}; }

INLINE vec load(const float *from) {
  vec got;
  memcpy(&got, from, sizeof got);
  return got;
}

INLINE void store(float *to, vec value) { memcpy(to, &value, sizeof value); }

INLINE vec load_some(const float *from, int64_t count) {
  vec got = splat(0);
  memcpy(&got, from, (size_t)count * sizeof(float));
  return got;
}

/* Compilers make many instructions of a conversion between vectors of other lengths; one will do. */
INLINE uvec widen_half(const uint16_t *from) {
#if LANES == 16
  return (uvec)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX2__)
  return (uvec)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
#else
  return (uvec)vmovl_u16(vld1_u16(from));
#endif
}

INLINE ivec widen_quarter(const int8_t *from) {
#if LANES == 16
  return (ivec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__AVX2__)
  return (ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
  int32_t four;
  memcpy(&four, from, sizeof four);
  return (ivec)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8((uint32_t)four))));
#endif
}

INLINE vec weights(enum weight_type type, const void *w, int64_t at) {
  if (type == FLOAT32) return load((const float *)w + at);
  if (type == BFLOAT16) return (vec)(widen_half((const uint16_t *)w + at) << 16);
  return __builtin_convertvector(widen_quarter((const int8_t *)w + at), vec);
}

INLINE vec some_weights(enum weight_type type, const void *w, int64_t at, int64_t count) {
  static const size_t sizes[] = {sizeof(float), sizeof(uint16_t), sizeof(int8_t)};
  char padded[LANES * sizeof(float)] = {0};
  memcpy(padded, (const char *)w + at * (int64_t)sizes[type], (size_t)count * sizes[type]);
  return weights(type, padded, 0);
}

/* Sums are cut into BLOCK terms: their errors then grow with the number of blocks. Weights are asked
 * for about AHEAD weights before their use, in whole blocks, as a panel of columns is no stream. */
enum { BLOCK = 20, AHEAD = 4 * 64 * BLOCK };

/* A part of a product: rows from i on, columns from o on, and `terms` rows of weights, which begin at
 * w; those that begin at `next` are used later. The result is added to y unless this is the first part
 * of the sum. */
struct part {
  const char *w, *next;
  int64_t w_stride, terms, i, k, o;
  int first;
};

/* Sums of `rows` rows and `vectors` vectors of columns, in registers. */
INLINE void tile(enum weight_type type, const struct product *p, const struct part *t, int rows,
                 int vectors, int64_t count) {
  static const int sizes[] = {4, 2, 1};
  vec sums[MOST_ROWS][MOST_VECTORS];
  UNROLL for (int r = 0; r < rows; r++) {
    UNROLL for (int c = 0; c < vectors; c++) sums[r][c] = splat(0);
  }
  const float *x = p->x + t->i * p->x_stride + t->k;
  for (int64_t k = 0; k < t->terms; k++) {
    int64_t at = k * t->w_stride;
    vec b[MOST_VECTORS];
    UNROLL for (int c = 0; c < vectors; c++) {
      if (c * LANES * sizes[type] % 64 == 0)
        __builtin_prefetch(t->next + (at + c * LANES) * sizes[type]);
      b[c] = count == LANES ? weights(type, t->w, at + c * LANES)
                            : some_weights(type, t->w, at, count);
    }
    UNROLL for (int r = 0; r < rows; r++) {
      vec a = splat(x[r * p->x_stride + k]);
      UNROLL for (int c = 0; c < vectors; c++) sums[r][c] += a * b[c];
    }
  }
  UNROLL for (int r = 0; r < rows; r++) {
    float *y = p->y + (t->i + r) * p->y_stride + t->o;
    UNROLL for (int c = 0; c < vectors; c++) {
      if (count == LANES) {
        store(y + c * LANES, t->first ? sums[r][c] : load(y + c * LANES) + sums[r][c]);
      } else {
        vec whole = t->first ? sums[r][c] : load_some(y, count) + sums[r][c];
        memcpy(y, &whole, (size_t)count * sizeof(float));
      }
    }
  }
}

/* One group of at most MOST_ROWS rows. Behind the last row of weights begins the chunk of columns that
 * follows this one. Groups after the first find their weights in a cache. */
INLINE void few_rows(enum weight_type type, const struct product *p, struct part t, int rows,
                     int64_t lo, int64_t hi) {
  static const int sizes[] = {4, 2, 1};
  const int vectors = rows <= 2 ? MOST_VECTORS : MOST_VECTORS / 2;
  int64_t blocks = AHEAD / BLOCK / (hi - lo), next = t.k;
  if (t.i == 0) next += blocks ? blocks * BLOCK : BLOCK;
  next = next < p->k ? next * p->w_stride : (next - p->k) * p->w_stride + hi - lo;
  for (t.o = lo; t.o < hi;) {
    int64_t left = hi - t.o, taken = left;
    t.w = (const char *)p->w + (t.k * p->w_stride + t.o) * sizes[type];
    t.next = (const char *)p->w + (next + t.o) * sizes[type];
    if (left >= vectors * LANES)
      tile(type, p, &t, rows, vectors, LANES), taken = vectors * LANES;
    else if (left >= 2 * LANES)
      tile(type, p, &t, rows, 2, LANES), taken = 2 * LANES;
    else if (left >= LANES)
      tile(type, p, &t, rows, 1, LANES), taken = LANES;
    else
      tile(type, p, &t, rows, 1, left);
    t.o += taken;
  }
}

INLINE void product(enum weight_type type, const struct product *p, int64_t lo, int64_t hi) {
  if (lo >= hi) return;
  for (int64_t k = 0; k < p->k; k += BLOCK) {
    struct part t = {.w_stride = p->w_stride, .terms = p->k - k < BLOCK ? p->k - k : BLOCK, .k = k,
                     .first = k == 0 && !p->add};
#define REST(rows) few_rows(type, p, t, rows, lo, hi)
    for (; t.i + MOST_ROWS <= p->n; t.i += MOST_ROWS) REST(MOST_ROWS);
    FOR_REST(p->n - t.i, REST)
#undef REST
  }
  if (!p->scale && !p->bias) return;
  for (int64_t i = 0; i < p->n; i++)
    for (int64_t o = lo; o < hi; o++) {
      float *y = p->y + i * p->y_stride + o;
      *y = *y * (p->scale ? p->scale[o] : 1) + (p->bias ? p->bias[o] : 0);
    }
}

/* Halves are added to halves, in an order that compilers keep in registers. */
INLINE float sum_of(vec value) {
#if LANES == 16
  return _mm512_reduce_add_ps((__m512)value);
#else
  float parts[LANES];
  store(parts, value);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) parts[i] += parts[i + width];
  return parts[0];
#endif
}

/* Outputs of a turned product whose sums are held in registers at once. The first group of rows asks
 * for the rows of w that are read after the next ones. */
#define OUTPUTS (REGISTERS / 8)

/* Adds LANES or fewer products to each of the sums of `rows` rows of x with `outputs` rows of w. */
INLINE void add_dots(enum weight_type type, const struct product *p, int64_t i, int rows, int64_t o,
                     int outputs, int64_t k, int64_t count, int64_t ahead,
                     vec sums[MOST_ROWS][OUTPUTS]) {
  static const int sizes[] = {4, 2, 1};
  vec b[OUTPUTS];
  UNROLL for (int c = 0; c < outputs; c++) {
    int64_t at = (o + c) * p->w_stride + k;
    __builtin_prefetch((const char *)p->w + (at + ahead) * sizes[type]);
    b[c] = count == LANES ? weights(type, p->w, at) : some_weights(type, p->w, at, count);
  }
  UNROLL for (int r = 0; r < rows; r++) {
    const float *x = p->x + (i + r) * p->x_stride + k;
    vec a = count == LANES ? load(x) : load_some(x, count);
    UNROLL for (int c = 0; c < outputs; c++) sums[r][c] += a * b[c];
  }
}

INLINE void dots(enum weight_type type, const struct product *p, int64_t i, int rows, int64_t o,
                 int outputs) {
  vec sums[MOST_ROWS][OUTPUTS];
  UNROLL for (int r = 0; r < rows; r++) {
    UNROLL for (int c = 0; c < outputs; c++) sums[r][c] = splat(0);
  }
  int64_t k = 0, ahead = i ? 0 : 2 * OUTPUTS * p->w_stride;
  for (; k + LANES <= p->k; k += LANES) add_dots(type, p, i, rows, o, outputs, k, LANES, ahead, sums);
  if (k < p->k) add_dots(type, p, i, rows, o, outputs, k, p->k - k, ahead, sums);
  UNROLL for (int r = 0; r < rows; r++) {
    UNROLL for (int c = 0; c < outputs; c++) {
      float *y = p->y + (i + r) * p->y_stride + o + c;
      float start = p->add ? *y : p->bias ? p->bias[o + c] : 0;
      *y = sum_of(sums[r][c]) * (p->scale ? p->scale[o + c] : 1) + start;
    }
  }
}

INLINE void dots_of_rows(enum weight_type type, const struct product *p, int64_t o, int outputs) {
  int64_t i = 0;
  for (; i + MOST_ROWS <= p->n; i += MOST_ROWS) dots(type, p, i, MOST_ROWS, o, outputs);
#define REST(rows) dots(type, p, i, rows, o, outputs)
  FOR_REST(p->n - i, REST)
#undef REST
}

INLINE void turned(enum weight_type type, const struct product *p, int64_t lo, int64_t hi) {
  int64_t o = lo;
  for (; o + OUTPUTS <= hi; o += OUTPUTS) dots_of_rows(type, p, o, OUTPUTS);
  for (; o < hi; o++) dots_of_rows(type, p, o, 1);
}

#define FOR_TYPE(type, suffix)                                                          \
  static void product_##suffix(const struct product *p, int64_t lo, int64_t hi) {      \
    product(type, p, lo, hi);                                                           \
  }                                                                                     \
  static void turned_##suffix(const struct product *p, int64_t lo, int64_t hi) {       \
    turned(type, p, lo, hi);                                                            \
  }
FOR_TYPE(FLOAT32, f32)
FOR_TYPE(BFLOAT16, bf16)
FOR_TYPE(INT8, s8)

/* Where the mask is set, `yes`, and `no` elsewhere. */
INLINE vec choose(ivec mask, vec yes, vec no) {
  return (vec)((mask & (ivec)yes) | (~mask & (ivec)no));
}

/* exp to about one unit in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]. */
INLINE vec exp_of(vec x) {
  vec low = splat(-87.3f), high = splat(88.7f);
  ivec under = x < low;
  vec bounded = choose(x > high, high, choose(under, low, x));
  vec shift = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
  vec whole = (bounded * splat(1.44269504f) + shift) - shift;
  vec r = bounded - whole * splat(0.693359375f) + whole * splat(2.12194440e-4f);
  vec p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.0f);
  ivec power = (__builtin_convertvector(whole, ivec) + 127) << 23;
  vec result = p * (vec)power;
  return choose(under, splat(0), result);
}

static void gate(enum activation which, float *gate, const float *up, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) {
    int64_t width = count - i < LANES ? count - i : LANES;
    vec g = load_some(gate + i, width), u = load_some(up + i, width);
    vec inner = which == SILU ? g : splat(1.5957691216f) * (g + splat(0.044715f) * g * g * g);
    vec result = g / (splat(1.0f) + exp_of(-inner)) * u;
    memcpy(gate + i, &result, (size_t)width * sizeof(float));
  }
}

INLINE float softmax(float *row, int64_t count) {
  int64_t padded = (count + LANES - 1) / LANES * LANES;
  for (int64_t i = count; i < padded; i++) row[i] = -INFINITY;
  vec top = load(row);
  for (int64_t i = LANES; i < padded; i += LANES) {
    vec next = load(row + i);
    top = choose(next > top, next, top);
  }
  float highest = top[0];
  for (int i = 1; i < LANES; i++) highest = top[i] > highest ? top[i] : highest;
  vec total = splat(0);
  for (int64_t i = 0; i < padded; i += LANES) {
    vec weight = exp_of(load(row + i) - splat(highest));
    store(row + i, weight);
    total += weight;
  }
  return sum_of(total);
}

/* What keys of at least `raised` weigh, `vectors` vectors of them. */
INLINE void weigh(const uint32_t *keys, const float *weights, uint32_t raised, int vectors,
                  vec totals[4]) {
  UNROLL for (int c = 0; c < vectors; c++) {
    uvec key;
    memcpy(&key, keys + c * LANES, sizeof key);
    totals[c] += choose((ivec)(key >= raised), load(weights + c * LANES), splat(0));
  }
}

/* Set bit by bit from the top. */
static uint32_t threshold(const uint32_t *keys, const float *weights, float least, int64_t count) {
  uint32_t found = 0, rest_keys[LANES] = {0};
  float rest_weights[LANES] = {0};
  int64_t whole = count / LANES * LANES, rest = count - whole;
  memcpy(rest_keys, keys + whole, (size_t)rest * sizeof *keys);
  memcpy(rest_weights, weights + whole, (size_t)rest * sizeof *weights);
  for (int bit = 31; bit >= 0; bit--) {
    uint32_t raised = found | (uint32_t)1 << bit;
    vec totals[4] = {splat(0), splat(0), splat(0), splat(0)};
    int64_t i = 0;
    for (; i + 4 * LANES <= whole; i += 4 * LANES) weigh(keys + i, weights + i, raised, 4, totals);
    for (; i < whole; i += LANES) weigh(keys + i, weights + i, raised, 1, totals);
    weigh(rest_keys, rest_weights, raised, 1, totals);
    if (sum_of((totals[0] + totals[1]) + (totals[2] + totals[3])) >= least) found = raised;
  }
  return found;
}

INLINE void norm(const float *x, const float *scale, float eps, int plus_one, float *y,
                 int64_t count) {
  vec squares = splat(0);
  for (int64_t i = 0; i < count; i += LANES) {
    vec part = load_some(x + i, count - i < LANES ? count - i : LANES);
    squares += part * part;
  }
  float factor = 1 / sqrtf(sum_of(squares) / (float)count + eps);
  for (int64_t i = 0; i < count; i++) y[i] = x[i] * factor * (scale[i] + (plus_one ? 1 : 0));
}

static void norm_rows(const struct norm *n, int64_t lo, int64_t hi) {
  for (int64_t row = lo; row < hi; row++) {
    int64_t at = row * n->count;
    const float *x = n->x + at;
    float *y = n->y + at;
    if (n->scale) norm(x, n->scale, n->eps, n->plus_one, y, n->count), x = y;
    if (n->base || n->factor != 1)
      for (int64_t i = 0; i < n->count; i++)
        y[i] = (n->base ? n->base[at + i] : 0) + n->factor * x[i];
  }
}

#include "attention.h"

const struct kernels KERNELS = {
    NAME,
    LANES,
    {product_f32, product_bf16, product_s8},
    {turned_f32, turned_bf16, turned_s8},
    gate,
    norm_rows,
    threshold,
    attend,
    keep_own,
};
