/* Calls that XLA's CPU runtime makes (xla/ffi/api/c_api.h): products, a gated MLP, filters, attention.
 *
 * Work is shared with XLA's own thread pool, by rules that cannot deadlock: the caller works through
 * all chunks itself and waits only for chunks that somebody has begun. A scheduled helper may start
 * late, or after the call has returned; what it looks at is never freed.
 */
#include <float.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels.h"
#include "xla/ffi/api/c_api.h"

#if defined(__x86_64__)
extern const struct kernels kernels_avx512, kernels_avx2;
#define PAUSE() __builtin_ia32_pause()
#else
extern const struct kernels kernels_neon;
#define PAUSE() __asm__ volatile("yield")
#endif

/* The best loops that this processor runs; NULL if it runs none of them. */
static const struct kernels *kernels(void) {
#if defined(__x86_64__)
  const char *limit = getenv("JAXSPEC_NATIVE");
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      !(limit && !strcmp(limit, "avx2")))
    return &kernels_avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kernels_avx2;
  return NULL;
#else
  return &kernels_neon;
#endif
}

static const struct kernels *best;
static void forget_helpers(void);

/* Chooses the loops; called once, before any other call. NULL: there are none. */
const char *jaxspec_instruction_set(void) {
  if (best) return best->name;
  best = kernels();
  forget_helpers();
  pthread_atfork(NULL, NULL, forget_helpers);
  return best ? best->name : NULL;
}

/* The version of XLA's interface that this was compiled for. */
int jaxspec_ffi_version(void) { return 1000 * XLA_FFI_API_MAJOR + XLA_FFI_API_MINOR; }

/* ---- Sharing work ---- */

enum { NUM_CREWS = 64, MAX_PHASES = 5, SPINS_BEFORE_YIELD = 2000, LINGER_NANOSECONDS = 200000 };
enum { FREE = -1, CLAIMED = -2 };

typedef void chunk_work(void *context, int64_t chunk, int worker);

struct phase {
  atomic_llong next, done;
  int64_t total;
  chunk_work *work;
  void *context;
};

/* Several phases of one call, one after the other, each cut into chunks. Crews are never freed, so a
 * helper that comes late finds nothing but a crew that is finished. */
struct crew {
  _Alignas(64) atomic_int users; /* or FREE, or CLAIMED while it is prepared */
  atomic_int opened, finished, workers;
  int most_workers;
  struct phase phases[MAX_PHASES];
};

static struct crew crews[NUM_CREWS];
static atomic_ullong active;  /* a bit for each crew that takes helpers */
static atomic_int num_helpers; /* scheduled, at work or lingering */

static void forget_helpers(void) { /* a forked process has none */
  atomic_store(&num_helpers, 0);
  atomic_store(&active, 0);
  for (int i = 0; i < NUM_CREWS; i++) atomic_store(&crews[i].users, FREE);
}

static void leave(struct crew *crew) {
  if (atomic_fetch_sub(&crew->users, 1) == 1) atomic_store(&crew->users, FREE);
}

static int join(struct crew *crew) {
  int users = atomic_load(&crew->users);
  while (users >= 1)
    if (atomic_compare_exchange_weak(&crew->users, &users, users + 1)) return 1;
  return 0;
}

static void take_chunks(struct phase *phase, int worker) {
  int64_t chunk;
  while ((chunk = atomic_fetch_add(&phase->next, 1)) < phase->total) {
    phase->work(phase->context, chunk, worker);
    atomic_fetch_add_explicit(&phase->done, 1, memory_order_release);
  }
}

static void work_for(struct crew *crew) {
  int worker = atomic_fetch_add(&crew->workers, 1);
  for (int index = 0; worker < crew->most_workers && index < MAX_PHASES;) {
    if (atomic_load_explicit(&crew->opened, memory_order_acquire) > index)
      take_chunks(&crew->phases[index++], worker);
    else if (atomic_load(&crew->finished))
      break;
    else
      PAUSE();
  }
}

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

/* Waking a thread takes as long as a product of one row. So a helper stays for the next call, which
 * follows in a moment while a pass runs; it gives way to other threads, and soon leaves. */
static void help(void *unused) {
  (void)unused;
  for (int64_t until = now() + LINGER_NANOSECONDS; now() < until;) {
    for (int spins = 0; spins < 64; spins++) {
      unsigned long long found = atomic_load_explicit(&active, memory_order_acquire);
      for (; found; found &= found - 1) {
        struct crew *crew = &crews[__builtin_ctzll(found)];
        if (!join(crew)) continue;
        work_for(crew);
        leave(crew);
        until = now() + LINGER_NANOSECONDS;
      }
      PAUSE();
    }
    sched_yield();
  }
  atomic_fetch_sub(&num_helpers, 1);
}

static void forgive(XLA_FFI_CallFrame *frame, XLA_FFI_Error *error) {
  XLA_FFI_Error_Destroy_Args gone = {
      .struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, .error = error};
  frame->api->XLA_FFI_Error_Destroy(&gone);
}

/* Makes a crew of up to `workers`, the caller among them. NULL: the caller works alone. */
static struct crew *gather(XLA_FFI_CallFrame *frame, int64_t workers) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args count = {
      .struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE,
      .ctx = frame->ctx,
      .num_threads = &threads,
  };
  XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_NumThreads(&count);
  if (error) forgive(frame, error), threads = 1;
  if (threads < workers) workers = threads;
  if (workers < 2) return NULL;
  int index = 0, expected = FREE;
  while (!atomic_compare_exchange_strong(&crews[index].users, &expected, CLAIMED)) {
    if (++index == NUM_CREWS) return NULL;
    expected = FREE;
  }
  struct crew *crew = &crews[index];
  crew->most_workers = (int)workers;
  atomic_store(&crew->opened, 0);
  atomic_store(&crew->finished, 0);
  atomic_store(&crew->workers, 1);
  for (int i = 0; i < MAX_PHASES; i++) {
    atomic_store(&crew->phases[i].next, 0);
    atomic_store(&crew->phases[i].done, 0);
  }
  atomic_store(&crew->users, 1);
  atomic_fetch_or(&active, 1ULL << index);
  for (int helpers = atomic_load(&num_helpers); helpers < (int)workers - 1;) {
    if (!atomic_compare_exchange_weak(&num_helpers, &helpers, helpers + 1)) continue;
    XLA_FFI_ThreadPool_Schedule_Args task = {
        .struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE,
        .ctx = frame->ctx,
        .task = help,
    };
    error = frame->api->XLA_FFI_ThreadPool_Schedule(&task);
    if (error) {
      forgive(frame, error), atomic_fetch_sub(&num_helpers, 1);
      break;
    }
    helpers++;
  }
  return crew;
}

static void dismiss(struct crew *crew) {
  if (!crew) return;
  atomic_fetch_and(&active, ~(1ULL << (crew - crews)));
  atomic_store(&crew->finished, 1);
  leave(crew);
}

static void share(struct crew *crew, chunk_work *work, void *context, int64_t total) {
  if (!crew || total == 1) {
    for (int64_t chunk = 0; chunk < total; chunk++) work(context, chunk, 0);
    return;
  }
  int index = atomic_load(&crew->opened);
  struct phase *phase = &crew->phases[index];
  phase->total = total;
  phase->work = work;
  phase->context = context;
  atomic_store_explicit(&crew->opened, index + 1, memory_order_release);
  take_chunks(phase, 0);
  for (int spins = 0; atomic_load_explicit(&phase->done, memory_order_acquire) < total; spins++) {
    if (spins > SPINS_BEFORE_YIELD)
      sched_yield();
    else
      PAUSE();
  }
}

/* ---- Products in chunks of columns ---- */

struct columns {
  struct product product;
  enum weight_type type;
  int turned;
  int64_t outputs, width; /* columns in all, and of a chunk */
};

static int64_t num_chunks(const struct columns *c) { return (c->outputs + c->width - 1) / c->width; }

/* Chunks of whole tiles, four for each worker; for few rows, which wait for memory, wider. */
static void set_width(struct columns *c, int64_t workers) {
  int64_t narrow = c->product.n <= 6, unit = c->turned || narrow ? 16 : 32;
  int64_t width = c->outputs / ((narrow ? 2 : 4) * workers);
  width = narrow ? (width + unit - 1) / unit * unit : width / unit * unit;
  int64_t widest = c->turned ? 64 : c->product.n > 32 ? 128 : 256;
  c->width = width < unit ? unit : width > widest ? widest : width;
}

static void multiply_columns(void *context, int64_t chunk, int worker) {
  (void)worker;
  const struct columns *c = context;
  int64_t lo = chunk * c->width, hi = lo + c->width;
  if (hi > c->outputs) hi = c->outputs;
  (c->turned ? best->turned : best->product)[c->type](&c->product, lo, hi);
}

static void multiply(struct crew *crew, struct columns *c, int64_t workers) {
  set_width(c, workers);
  share(crew, multiply_columns, c, num_chunks(c));
}

/* ---- Norms ---- */

enum { NORMED_AT_ONCE = 16 };

static void norm_chunk(void *context, int64_t chunk, int worker) {
  (void)worker;
  const struct norm *n = context;
  int64_t lo = chunk * NORMED_AT_ONCE, hi = lo + NORMED_AT_ONCE;
  best->norm(n, lo, hi < n->rows ? hi : n->rows);
}

/* Norms rows, multiplies them by their factor and adds them to their base, where there is any. */
static void norm(struct crew *crew, struct norm *n) {
  int64_t chunks = (n->rows + NORMED_AT_ONCE - 1) / NORMED_AT_ONCE;
  if (n->scale || n->base || n->factor != 1) share(crew, norm_chunk, n, chunks);
}

/* ---- Reading a call ---- */

static const XLA_FFI_Buffer *arg(const XLA_FFI_CallFrame *frame, int index) {
  return frame->args.args[index];
}

static const XLA_FFI_Buffer *result(const XLA_FFI_CallFrame *frame, int index) {
  return frame->rets.rets[index];
}

static int64_t size_of(const XLA_FFI_Buffer *buffer) {
  int64_t size = 1;
  for (int64_t i = 0; i < buffer->rank; i++) size *= buffer->dims[i];
  return size;
}

/* An operand of no elements stands for one that is absent. */
static const float *floats(const XLA_FFI_CallFrame *frame, int index) {
  return size_of(arg(frame, index)) ? arg(frame, index)->data : NULL;
}

static const void *scalar(const XLA_FFI_CallFrame *frame, const char *name) {
  for (int64_t i = 0; i < frame->attrs.size; i++) {
    const XLA_FFI_ByteSpan *known = frame->attrs.names[i];
    if (known->len == strlen(name) && !memcmp(known->ptr, name, known->len))
      return ((const XLA_FFI_Scalar *)frame->attrs.attrs[i])->value;
  }
  return NULL;
}

static int64_t integer(const XLA_FFI_CallFrame *frame, const char *name) {
  int64_t value = 0;
  const void *from = scalar(frame, name);
  if (from) memcpy(&value, from, sizeof value);
  return value;
}

static float real(const XLA_FFI_CallFrame *frame, const char *name) {
  float value = 0;
  const void *from = scalar(frame, name);
  if (from) memcpy(&value, from, sizeof value);
  return value;
}

static enum weight_type type_of(const XLA_FFI_Buffer *weights) {
  if (weights->dtype == XLA_FFI_DataType_BF16) return BFLOAT16;
  return weights->dtype == XLA_FFI_DataType_S8 ? INT8 : FLOAT32;
}

/* The product of `rows` rows with the weights, scales and biases at `index` on. */
static struct columns columns(const XLA_FFI_CallFrame *frame, int index, const float *x,
                              int64_t rows, int64_t k, float *y, int64_t outputs, int turned) {
  const XLA_FFI_Buffer *weights = arg(frame, index);
  return (struct columns){
      .product = {.x = x, .x_stride = k, .n = rows, .k = k, .w = weights->data,
                  .w_stride = turned ? k : outputs, .scale = floats(frame, index + 1),
                  .bias = floats(frame, index + 2), .y = y, .y_stride = outputs},
      .type = type_of(weights),
      .turned = turned,
      .outputs = outputs,
  };
}

/* The place of a sub-layer in the residual stream, whose operands are at 1 to 3: the norm of its
 * inputs x, which go to `normed`; the norm of its outputs y, their factor, and what they are added
 * to. */
struct stream {
  struct norm before, after;
  const float *inputs; /* normed or as they are */
};

static struct stream stream(const XLA_FFI_CallFrame *frame, int64_t rows, int64_t width,
                            int64_t outputs, float *normed, float *y) {
  float eps = real(frame, "eps");
  int plus_one = (int)integer(frame, "plus_one");
  const float *x = arg(frame, 0)->data, *scale = floats(frame, 1);
  return (struct stream){
      .before = {x, scale, NULL, normed, 1, eps, plus_one, rows, width},
      .after = {y, floats(frame, 2), floats(frame, 3), y, real(frame, "factor"), eps, plus_one, rows,
                outputs},
      .inputs = scale ? normed : x,
  };
}

/* True if the call only asks which version of the interface this was compiled for. */
static int answers_version(XLA_FFI_CallFrame *frame) {
  for (XLA_FFI_Extension_Base *e = frame->extension_start; e; e = e->next)
    if (e->type == XLA_FFI_Extension_Metadata) {
      XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)e)->metadata;
      metadata->api_version.major_version = XLA_FFI_API_MAJOR;
      metadata->api_version.minor_version = XLA_FFI_API_MINOR;
      metadata->traits = 0;
      return 1;
    }
  return 0;
}

static XLA_FFI_Error *refuse(const XLA_FFI_CallFrame *frame, const char *message) {
  XLA_FFI_Error_Create_Args args = {.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE,
                                    .message = message,
                                    .errc = XLA_FFI_Error_Code_INVALID_ARGUMENT};
  return frame->api->XLA_FFI_Error_Create(&args);
}

/* Too little work to wake another thread for. */
enum { SMALL = 32 * 1024 };

/* x[rows, k], weights, scale, bias -> y[rows, outputs] */
XLA_FFI_Error *jaxspec_product(XLA_FFI_CallFrame *frame) {
  if (answers_version(frame)) return NULL;
  if (frame->args.size != 4 || frame->rets.size != 1) return refuse(frame, "product: 4 operands");
  const XLA_FFI_Buffer *x = arg(frame, 0), *y = result(frame, 0);
  int64_t rows = x->dims[0], k = x->dims[1], outputs = y->dims[1];
  int64_t workers = integer(frame, "workers");
  struct columns c =
      columns(frame, 1, x->data, rows, k, y->data, outputs, (int)integer(frame, "turned"));
  struct crew *crew = k * outputs < SMALL ? NULL : gather(frame, workers);
  multiply(crew, &c, workers);
  dismiss(crew);
  return NULL;
}

/* ---- The gated MLP ---- */

struct gated {
  struct columns gate_up;
  int64_t hidden;
  enum activation activation;
};

static void gated_columns(void *context, int64_t chunk, int worker) {
  (void)worker;
  const struct gated *g = context;
  const struct columns *c = &g->gate_up;
  int64_t lo = chunk * c->width, hi = lo + c->width;
  if (hi > g->hidden) hi = g->hidden;
  best->product[c->type](&c->product, lo, hi);
  best->product[c->type](&c->product, g->hidden + lo, g->hidden + hi);
  for (int64_t i = 0; i < c->product.n; i++) {
    float *y = c->product.y + i * c->product.y_stride;
    best->gate(g->activation, y + lo, y + g->hidden + lo, hi - lo);
  }
}

/* x[rows, d]; its stream; gate_up[d, 2 hidden] with scale and bias, down[hidden, d] likewise
 * -> y[rows, d], work[rows, 2 hidden + d] */
XLA_FFI_Error *jaxspec_mlp(XLA_FFI_CallFrame *frame) {
  if (answers_version(frame)) return NULL;
  if (frame->args.size != 10 || frame->rets.size != 2) return refuse(frame, "mlp: 10 operands");
  const XLA_FFI_Buffer *x = arg(frame, 0), *y = result(frame, 0);
  int64_t rows = x->dims[0], k = x->dims[1], outputs = y->dims[1];
  int64_t hidden = (result(frame, 1)->dims[1] - k) / 2, workers = integer(frame, "workers");
  float *work = result(frame, 1)->data, *normed = work + rows * 2 * hidden;
  struct stream s = stream(frame, rows, k, outputs, normed, y->data);
  struct gated g = {
      .gate_up = columns(frame, 4, s.inputs, rows, k, work, 2 * hidden, 0),
      .hidden = hidden,
      .activation = (enum activation)integer(frame, "activation"),
  };
  struct columns down = columns(frame, 7, work, rows, hidden, y->data, outputs, 0);
  down.product.x_stride = 2 * hidden;
  struct crew *crew = k * hidden < SMALL ? NULL : gather(frame, workers);
  g.gate_up.outputs = hidden;
  set_width(&g.gate_up, workers);
  norm(crew, &s.before);
  share(crew, gated_columns, &g, num_chunks(&g.gate_up));
  multiply(crew, &down, workers);
  norm(crew, &s.after);
  dismiss(crew);
  return NULL;
}

/* ---- Filters ---- */

struct filter {
  const uint32_t *keys;
  const float *weights, *least;
  uint32_t *found;
  int64_t count;
};

static void find_threshold(void *context, int64_t row, int worker) {
  (void)worker;
  const struct filter *f = context;
  int64_t at = row * f->count;
  f->found[row] = best->threshold(f->keys + at, f->weights + at, f->least[row], f->count);
}

/* keys[.., count], weights[.., count], least[.., 1] -> threshold[.., 1] */
XLA_FFI_Error *jaxspec_threshold(XLA_FFI_CallFrame *frame) {
  if (answers_version(frame)) return NULL;
  if (frame->args.size != 3 || frame->rets.size != 1) return refuse(frame, "threshold: 3 operands");
  int64_t rows = size_of(result(frame, 0));
  struct filter f = {.keys = arg(frame, 0)->data, .weights = arg(frame, 1)->data,
                     .least = arg(frame, 2)->data, .found = result(frame, 0)->data,
                     .count = rows ? size_of(arg(frame, 0)) / rows : 0};
  int64_t workers = rows > 1 && rows * f.count >= SMALL / 16 ? integer(frame, "workers") : 1;
  struct crew *crew = gather(frame, workers);
  share(crew, find_threshold, &f, rows);
  dismiss(crew);
  return NULL;
}

/* ---- Attention ---- */

/* Operands: x[rows, tokens, d]; its stream; weights, scale, bias of queries, keys and values;
 * scales of the norms of queries and keys; weights, scale, bias of the output; cosines and sines
 * [rows, tokens or 1, pairs]; keys, values and mask of the prefix and of the scratch; the mask
 * among the tokens.
 * Results: y[rows, tokens, d]; the tokens' own keys and values; work. */
XLA_FFI_Error *jaxspec_attention(XLA_FFI_CallFrame *frame) {
  if (answers_version(frame)) return NULL;
  if (frame->args.size != 21 || frame->rets.size != 4)
    return refuse(frame, "attention: 21 operands");
  const XLA_FFI_Buffer *x = arg(frame, 0), *y = result(frame, 0), *keys = result(frame, 1);
  float *work = result(frame, 3)->data, *values = result(frame, 2)->data;
  int64_t workers = integer(frame, "workers");
  struct attention a = {
      .rows = x->dims[0], .tokens = x->dims[1], .kv_heads = keys->dims[1],
      .head_dim = keys->dims[2], .group = integer(frame, "group"),
      .angle_tokens = arg(frame, 12)->dims[1], .pairs = arg(frame, 12)->dims[2],
      .q_norm = floats(frame, 7), .k_norm = floats(frame, 8),
      .cosines = arg(frame, 12)->data, .sines = arg(frame, 13)->data,
      .eps = real(frame, "eps"), .scale = real(frame, "scale"), .softcap = real(frame, "softcap"),
      .plus_one = (int)integer(frame, "plus_one"),
  };
  a.block = a.group >= 16 ? 1 : 16 / a.group;
  if (a.block > a.tokens) a.block = a.tokens;
  if (a.head_dim > MAX_HEAD_DIM || a.group > MAX_QUERIES) return refuse(frame, "attention: too wide");
  for (int j = 0; j < 2; j++) {
    const XLA_FFI_Buffer *mask = arg(frame, 16 + 3 * j);
    if (!size_of(mask)) continue;
    a.segments[j] = (struct segment){floats(frame, 14 + 3 * j), floats(frame, 15 + 3 * j),
                                     mask->data, mask->dims[2], mask->dims[1]};
  }
  a.segments[2] = (struct segment){keys->data, values, arg(frame, 20)->data, a.tokens, a.tokens};

  int64_t num = a.rows * a.tokens, k = x->dims[2], outputs = y->dims[2];
  int64_t per_token = a.kv_heads * (a.group + 2) * a.head_dim;
  int64_t attended = a.kv_heads * a.group * a.head_dim;
  int64_t places = a.segments[0].places + a.segments[1].places + a.tokens;
  a.heads = work;
  a.attended = work + num * per_token;
  float *normed = a.attended + num * attended;
  a.scratch = normed + num * k;
  a.score_stride = (places + 15) / 16 * 16;
  a.scratch_size = a.block * a.group * (a.score_stride + 2 * a.head_dim);
  if (num * (per_token + attended + k) + workers * a.scratch_size > size_of(result(frame, 3)))
    return refuse(frame, "attention: too little room to work in");

  struct stream s = stream(frame, num, k, outputs, normed, y->data);
  struct columns heads = columns(frame, 4, s.inputs, num, k, work, per_token, 0);
  struct columns out = columns(frame, 9, a.attended, num, attended, y->data, outputs, 0);
  struct crew *crew = k * per_token < SMALL ? NULL : gather(frame, workers);
  norm(crew, &s.before);
  multiply(crew, &heads, workers);
  best->keep_own(&a, keys->data, values);
  share(crew, best->attend, &a, a.rows * a.kv_heads * ((a.tokens + a.block - 1) / a.block));
  multiply(crew, &out, workers);
  norm(crew, &s.after);
  dismiss(crew);
  return NULL;
}
