/* The loops of an attention. Part of kernels.c, which is compiled for each instruction set. */

/* Norms and turns one head of one token. Its numbers end up `stride` apart. */
static void turn(const struct attention *a, int64_t row, int64_t token, const float *head,
                 const float *norm_scale, float factor, float *to, int64_t stride) {
  float normed[MAX_HEAD_DIM];
  if (norm_scale) {
    norm(head, norm_scale, a->eps, a->plus_one, normed, a->head_dim);
    head = normed;
  }
  int64_t at = (row * a->angle_tokens + (a->angle_tokens > 1 ? token : 0)) * a->pairs;
  const float *cosines = a->cosines + at, *sines = a->sines + at;
  for (int64_t i = 0; i < a->pairs; i++) {
    float first = head[i], second = head[i + a->pairs];
    to[i * stride] = (first * cosines[i] - second * sines[i]) * factor;
    to[(i + a->pairs) * stride] = (second * cosines[i] + first * sines[i]) * factor;
  }
  for (int64_t i = 2 * a->pairs; i < a->head_dim; i++) to[i * stride] = head[i] * factor;
}

/* The first and last places that some token of the chunk sees. */
static void seen_places(const struct segment *s, int64_t row, int64_t from, int64_t to, int64_t *lo,
                        int64_t *hi) {
  *lo = s->places, *hi = 0;
  if (s->mask_tokens == 1) from = 0, to = 1;
  for (int64_t token = from; token < to; token++) {
    const uint8_t *mask = s->mask + (row * s->mask_tokens + token) * s->places;
    const uint8_t *first = memchr(mask, 1, (size_t)*lo);
    if (first) *lo = first - mask;
    int64_t last = s->places;
    while (last > *hi && !mask[last - 1]) last--;
    if (last > *hi) *hi = last;
  }
  if (*lo > *hi) *lo = *hi;
}

static void attend(void *context, int64_t chunk, int worker) {
  const struct attention *a = context;
  int64_t blocks = (a->tokens + a->block - 1) / a->block;
  int64_t row = chunk / (a->kv_heads * blocks), head = chunk / blocks % a->kv_heads;
  int64_t from = chunk % blocks * a->block;
  int64_t to = from + a->block < a->tokens ? from + a->block : a->tokens;
  int64_t group = a->group, dim = a->head_dim, num = (to - from) * group;
  int64_t per_token = a->kv_heads * (group + 2) * dim;
  float *scores = a->scratch + worker * a->scratch_size;
  float *queries = scores + a->block * group * a->score_stride;
  float *sums = queries + a->block * group * dim;

  for (int64_t i = 0; i < num; i++) {
    int64_t token = from + i / group;
    const float *query = a->heads + (row * a->tokens + token) * per_token +
                         (head * (group + 2) + i % group) * dim;
    turn(a, row, token, query, a->q_norm, a->scale, queries + i * dim, 1);
  }
  int64_t lows[3], widths[3], total = 0;
  for (int j = 0; j < 3; j++) {
    const struct segment *s = &a->segments[j];
    lows[j] = widths[j] = 0;
    if (!s->places) continue;
    int64_t high;
    seen_places(s, row, from, to, &lows[j], &high);
    widths[j] = high - lows[j];
    struct product product = {
        .x = queries, .x_stride = dim, .n = num, .k = dim,
        .w = s->keys + (row * a->kv_heads + head) * dim * s->places + lows[j],
        .w_stride = s->places, .y = scores + total, .y_stride = a->score_stride};
    product_f32(&product, 0, widths[j]);
    for (int64_t i = 0; i < num; i++) {
      int64_t token = s->mask_tokens == 1 ? 0 : from + i / group;
      const uint8_t *mask = s->mask + (row * s->mask_tokens + token) * s->places + lows[j];
      float *score = scores + i * a->score_stride + total;
      if (a->softcap != 0)
        for (int64_t c = 0; c < widths[j]; c++)
          score[c] = a->softcap * tanhf(score[c] / a->softcap);
      if (!memchr(mask, 0, (size_t)widths[j])) continue;
      for (int64_t c = 0; c < widths[j]; c++) score[c] = mask[c] ? score[c] : -FLT_MAX;
    }
    total += widths[j];
  }
  float totals[MAX_QUERIES];
  for (int64_t i = 0; i < num; i++)
    totals[i] = total ? softmax(scores + i * a->score_stride, total) : 1;
  /* Tokens that see nothing are read by nobody, but stay finite. */
  if (!total) memset(sums, 0, (size_t)(num * dim) * sizeof(float));
  int64_t offset = 0;
  for (int j = 0; j < 3; j++) {
    if (!widths[j]) continue;
    const struct segment *s = &a->segments[j];
    struct product product = {
        .x = scores + offset, .x_stride = a->score_stride, .n = num, .k = widths[j],
        .w = s->values + ((row * a->kv_heads + head) * s->places + lows[j]) * dim,
        .w_stride = dim, .y = sums, .y_stride = dim, .add = offset > 0};
    product_f32(&product, 0, dim);
    offset += widths[j];
  }
  for (int64_t i = 0; i < num; i++) {
    int64_t token = row * a->tokens + from + i / group;
    float *attended = a->attended + ((token * a->kv_heads + head) * group + i % group) * dim;
    for (int64_t c = 0; c < dim; c++) attended[c] = sums[i * dim + c] / totals[i];
  }
}

/* The new tokens' own keys, turned, and values. */
static void keep_own(const struct attention *a, float *keys, float *values) {
  for (int64_t row = 0; row < a->rows; row++)
    for (int64_t head = 0; head < a->kv_heads; head++)
      for (int64_t token = 0; token < a->tokens; token++) {
        const float *key = a->heads + (((row * a->tokens + token) * a->kv_heads + head) *
                                           (a->group + 2) + a->group) * a->head_dim;
        int64_t at = (row * a->kv_heads + head) * a->head_dim * a->tokens;
        turn(a, row, token, key, a->k_norm, 1, keys + at + token, a->tokens);
        memcpy(values + at + token * a->head_dim, key + a->head_dim,
               (size_t)a->head_dim * sizeof(float));
      }
}
