/* The C ABI of the CUDA runtime: all that Python sees of csrc. Hopper (sm_90a) only.
 *
 * Pointers named `device` are device memory that the caller owns and keeps alive; the library allocates nothing but the
 * handles it returns. Every function returns a fut_status; the text of the last failure on the calling thread is
 * fut_last_error(). Work goes to the stream the caller names and no function waits for it unless it says so.
 */
#ifndef FUT_H
#define FUT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FUT_ABI_VERSION 2
#define FUT_API __attribute__((visibility("default")))

typedef enum fut_status {
  FUT_OK = 0,
  FUT_INVALID = 1, /* an argument, size or alignment is wrong */
  FUT_CUDA = 2,    /* a CUDA call failed */
} fut_status;

typedef enum fut_format { FUT_INT4 = 0, FUT_E4M3 = 1, FUT_BF16 = 2 } fut_format;

/* How gate and up rows of gate_up are interleaved; docs/artifact.md, row orders. */
typedef enum fut_row_order { FUT_NATURAL = 0, FUT_INTERLEAVE1 = 1, FUT_INTERLEAVE8 = 8 } fut_row_order;

/* One weight matrix as the artifact stores it. Stored sizes are padded, true sizes are not. */
typedef struct fut_matrix {
  const void* weight; /* device: INT4 I32 [stored_rows/16, stored_cols/64, 32, 4] in "mma_m16n8k16_a_pair/1";
                         E4M3 or BF16 [stored_rows, stored_cols] */
  const void* scale;  /* device: INT4 16-bit [stored_rows/16, stored_cols/group, 16] in "tile16_pairs/1";
                         E4M3 F32 [stored_rows]; BF16 null */
  const float* bias;  /* device F32 [rows], natural order, or null */
  const float* gain;  /* device F32 [cols] multiplied into the activation, or null */
  int32_t format;     /* fut_format */
  int32_t row_order;  /* fut_row_order */
  int32_t rows, cols;
  int32_t stored_rows, stored_cols;
  int32_t group_size;    /* INT4: 32, 64 or 128 */
  int32_t scale_is_fp16; /* INT4: group scales are FP16 instead of BF16 */
} fut_matrix;

typedef struct fut_layer {
  fut_matrix qkv, o, gate_up, down;
  const float* q_norm; /* device F32 [head_dim], or null: Qwen3's gains per head */
  const float* k_norm;
} fut_layer;

/* The decode cache. A page holds 64 tokens of one request in every layer and KV head: the block of (page, layer, KV
 * head) begins at pool + ((page * layers + layer) * kv_heads + kv_head) * fut_kv_block_bytes(). See
 * csrc/decode/kv_block.cuh. */
typedef struct fut_kv_cache {
  void* pool; /* device, 16-byte aligned */
  int64_t pages;
  int32_t layers, kv_heads, head_dim;
  int32_t bits;     /* 4 or 16 */
  int32_t rotation; /* INT4: K and V are rotated by Hadamard blocks */
  int32_t zero_point;
} fut_kv_cache;

#define FUT_PAGE_TOKENS 64

/* Rows of a step: one row is one token of one request. */
typedef struct fut_rows {
  const int32_t* token;      /* device [rows] */
  const int32_t* position;   /* device [rows]: the row's token attends to positions 0..position, itself included */
  const int32_t* slot;       /* device [rows]: row of the page table */
  const int32_t* page_table; /* device [slots, table_width]: page of tokens 64*i .. 64*i+63 of the slot's request */
  int32_t table_width;
  int32_t rows;
} fut_rows;

typedef struct fut_attention_shape {
  int32_t heads, kv_heads, head_dim;
  int32_t max_context; /* rows of the RoPE tables, and the most tokens a request can hold */
  float rms_norm_eps;
  const float* rope_cos; /* device F32 [max_context, head_dim/2] */
  const float* rope_sin;
} fut_attention_shape;

/* Sampling of one row. `uniform` in [0, 1) is the row's random number; temperature 0 takes the most probable token. */
typedef struct fut_sampling {
  double uniform;
  float temperature, top_p, min_p;
  int32_t top_k; /* 0 keeps all */
} fut_sampling;

typedef struct fut_decoder_config {
  int32_t hidden, intermediate, layers, vocab;
  fut_attention_shape attention;
  fut_kv_cache cache;
  const void* embed;      /* device BF16 [vocab, hidden] */
  const fut_layer* layer; /* host array [layers] */
  fut_matrix head;
  int32_t max_rows;  /* most rows of a step, 1..64 */
  int32_t max_slots; /* rows of the page table */
  void* workspace;   /* device, 256-byte aligned, fut_decoder_workspace_bytes() */
  int64_t workspace_bytes;
} fut_decoder_config;

typedef struct fut_decoder fut_decoder;

/* One step. Arrays are host memory and may be reused as soon as the call returns. */
typedef struct fut_step {
  int32_t rows;
  int32_t
      chunked; /* rows may be several consecutive tokens of one request (a prompt): K and V of all are written first */
  const int32_t* token;
  const int32_t* position;
  const int32_t* slot;
  int32_t head_rows; /* rows that get logits; their indices, ascending, in head_row */
  const int32_t* head_row;
  const fut_sampling* sampling; /* [head_rows], or null: no tokens are chosen */
} fut_step;

FUT_API const char* fut_last_error(void);
FUT_API int32_t fut_abi_version(void);

FUT_API int64_t fut_kv_block_bytes(int32_t bits, int32_t head_dim);
FUT_API int64_t fut_decoder_workspace_bytes(const fut_decoder_config* config);
FUT_API fut_status fut_decoder_create(const fut_decoder_config* config, fut_decoder** decoder);
FUT_API void fut_decoder_destroy(fut_decoder* decoder);
/* Replace the pages of a slot: host array of `count` pages, the first of them for tokens `64 * first`. */
FUT_API fut_status fut_decoder_set_pages(fut_decoder* decoder, int32_t slot, int32_t first, const int32_t* pages,
                                         int32_t count, void* stream);
FUT_API fut_status fut_decoder_step(fut_decoder* decoder, const fut_step* step, void* stream);
/* Waits for the step; copies the chosen tokens, int32 [head_rows], to host memory. */
FUT_API fut_status fut_decoder_tokens(fut_decoder* decoder, int32_t* tokens, int32_t count, void* stream);
/* Device F32 [max_rows, vocab]: logits of the last step's head rows, in their order. */
FUT_API const float* fut_decoder_logits(const fut_decoder* decoder);

/* Single operations, for tests and benchmarks. `x` BF16 [rows, cols]. */
typedef enum fut_epilogue { FUT_STORE = 0, FUT_RESIDUAL = 1, FUT_SWIGLU = 2 } fut_epilogue;
/* For any epilogue, with RMSNorm or without. */
FUT_API int64_t fut_project_workspace_bytes(const fut_matrix* matrix, int32_t rows);
/* y: FUT_STORE F32 [rows, matrix.rows]; FUT_RESIDUAL BF16 [rows, matrix.rows], added to in place;
 * FUT_SWIGLU BF16 [rows, matrix.rows/2]. `eps` >= 0: RMSNorm (and the matrix's gain) before the product. */
FUT_API fut_status fut_project(const fut_matrix* matrix, const void* x, void* y, int32_t rows, int32_t epilogue,
                               float eps, void* workspace, int64_t workspace_bytes, void* stream);
FUT_API int64_t fut_attention_workspace_bytes(const fut_attention_shape* shape, int32_t max_rows);
/* qkv F32 [rows, (heads + 2 kv_heads) * head_dim] after scales and bias -> out BF16 [rows, heads * head_dim].
 * Does q/k norm, RoPE, rotation, quantisation and the write of the rows' K and V, then attention. The workspace must be
 * zero before its first use and is left zero where it has to be. */
FUT_API fut_status fut_attention(const fut_attention_shape* shape, const fut_kv_cache* cache, int32_t layer,
                                 const fut_rows* rows, int32_t chunked, const float* qkv, const float* q_norm,
                                 const float* k_norm, void* out, void* workspace, int64_t workspace_bytes,
                                 void* stream);
FUT_API int64_t fut_sample_workspace_bytes(int32_t max_rows, int32_t vocab);
/* logits F32 [rows, vocab], sampling device [rows] -> tokens device int32 [rows]. */
FUT_API fut_status fut_sample(const float* logits, const fut_sampling* sampling, int32_t* tokens, int32_t rows,
                              int32_t vocab, void* workspace, int64_t workspace_bytes, void* stream);
/* Reads `bytes` (a multiple of 16384) of device memory once, at the highest rate the card is known to give, and XORs
 * all its 32-bit words into the device word `checksum`. */
FUT_API fut_status fut_read_bandwidth(const void* data, int64_t bytes, uint32_t* checksum, void* stream);

/* Prefill: products of many rows, C = A B^T with A [m, k] and B [n, k] row-major and of one type, FP32 sums, and what
 * follows them in one kernel. Addresses, and strides between rows in bytes, are multiples of 16; strides here count
 * elements. Nothing between a row's end and the next row is read or written. */
typedef enum fut_gemm_epilogue {
  FUT_GEMM_BF16 = 0,        /* out BF16 [m, n] */
  FUT_GEMM_F32 = 1,         /* out F32 [m, n] */
  FUT_GEMM_RESIDUAL = 2,    /* out BF16 [m, n] = residual + product; a copy in E4M3; sums of squares */
  FUT_GEMM_SWIGLU = 3,      /* E4M3 [m, n/2] = silu(gate) * up, B's rows in FUT_INTERLEAVE1 */
  FUT_GEMM_QKV = 4,         /* Q, and K and V into the history */
  FUT_GEMM_SWIGLU_BF16 = 5, /* out BF16 [m, n/2] = silu(gate) * up, rows as of SWIGLU */
} fut_gemm_epilogue;

/* How sums of E4M3 products are kept. The tensor cores add with about 14 bits. */
typedef enum fut_accumulation {
  FUT_ACCUMULATE_FAST = 0,     /* in the tensor cores throughout */
  FUT_ACCUMULATE_PROMOTED = 1, /* sums over 256 of k are added up in FP32 */
} fut_accumulation;

/* An E4M3 output, x / scale, beyond 448 saturating. */
typedef struct fut_e4m3_output {
  void* data;          /* device E4M3, or null: none */
  int64_t stride;      /* elements */
  const float* scale;  /* device [requests] */
  uint32_t* amax;      /* device [requests]: bits of an FP32, raised to the largest |x| (NaN is the largest); or null */
  uint64_t* saturated; /* device: elements beyond 448 are added; or null */
} fut_e4m3_output;

/* Q, K and V of a chunk of prompts. The history holds K (after RoPE) and V of one layer. */
typedef struct fut_qkv_output {
  void* q;             /* device BF16 [m, heads * head_dim] */
  void* k;             /* device BF16 [pages, kv_heads, FUT_PAGE_TOKENS, head_dim] */
  void* v;             /* the same */
  fut_rows rows;       /* position, slot and page table of the rows; tokens are not used */
  const float* q_norm; /* device F32 [head_dim], or null */
  const float* k_norm;
  fut_attention_shape shape;
} fut_qkv_output;

typedef struct fut_gemm_call {
  const void* a;
  const void* b;
  int64_t a_stride, b_stride; /* elements */
  int32_t m, n, k;
  int32_t format;       /* fut_format of A and B: FUT_E4M3 or FUT_BF16 */
  int32_t accumulation; /* fut_accumulation, E4M3 only */
  int32_t epilogue;     /* fut_gemm_epilogue */
  /* The value that the epilogue sees: sum * (row_factor * rho * a_scale) * channel_scale + bias; null pointers are
   * left out. rho = 1 / sqrt(sum of the row's square_sums / k + eps). */
  const float* row_factor;  /* device [m] */
  const float* square_sums; /* device [m, square_parts] */
  int32_t square_parts;
  float eps;
  const float* a_scale;       /* device [requests] */
  const int32_t* row_request; /* device [m], the request of each row for a_scale and the output; null: all 0 */
  const float* channel_scale; /* device [n] */
  const float* bias;          /* device [n], in the order of B's rows */
  void* out;                  /* BF16, F32, RESIDUAL and SWIGLU_BF16 */
  int64_t out_stride;         /* elements */
  const void* residual;       /* device BF16 [m, n]; may be `out` */
  int64_t residual_stride;    /* elements */
  fut_e4m3_output quantized;  /* RESIDUAL and SWIGLU */
  float* out_square_sums;     /* RESIDUAL: device F32 [m, ceil(n / 128)] of the BF16 output; or null */
  const fut_qkv_output* qkv;  /* QKV */
  int32_t tile_n, cluster;    /* 0: the cost model chooses; else 256 or 128, and 1 or 2 */
} fut_gemm_call;

/* What the cost model chooses for a card of so many multiprocessors. `head_dim`: of QKV, else 0. */
typedef struct fut_gemm_tile {
  int32_t tile_n, cluster, group_m;
  float clocks; /* what it expects the product to take */
} fut_gemm_tile;

FUT_API fut_status fut_gemm_plan(int32_t m, int32_t n, int32_t k, int32_t format, int32_t accumulation,
                                 int32_t head_dim, int32_t multiprocessors, fut_gemm_tile* tile);
FUT_API fut_status fut_gemm(const fut_gemm_call* call, void* stream);

/* Tokens of one page of a prompt. */
typedef struct fut_page_span {
  int32_t slot, page;   /* row of the page tables, and the page's place in it */
  int32_t first, count; /* tokens of the page, 0..63 */
} fut_page_span;

/* The decode cache's copy of K and V of one layer, made from their history: the same bytes that a decode step with the
 * same K and V writes. Nothing of other tokens is written. */
typedef struct fut_cache_copy_call {
  fut_kv_cache cache;
  const void* k; /* device BF16 [pages, kv_heads, FUT_PAGE_TOKENS, head_dim], the layer's history */
  const void* v;
  const int32_t* history_table; /* device [slots, history_width]: pages of the history */
  const int32_t* cache_table;   /* device [slots, cache_width]: pages of the cache */
  const fut_page_span* spans;   /* device [count] */
  int32_t history_width, cache_width, count, layer;
} fut_cache_copy_call;

FUT_API fut_status fut_cache_copy(const fut_cache_copy_call* call, void* stream);

/* W8A16: out [m, n] = alpha * (A B^T) + bias, A BF16 or FP16 [m, k], B E4M3 [n, k], both row-major; FP32 sums that
 * alpha multiplies. Strides as above. The same bits whatever runs beside it, for one choice of tokens and splits. */
typedef struct fut_w8a16_tile {
  int32_t channels; /* 128: two warpgroups share a tile; 64: they take turns, with at most 64 tokens */
  int32_t tokens;   /* 16 to 256, a power of two; 0: the cost model chooses all */
  int32_t splits;   /* parts of k that are summed apart, 1 to 16 */
} fut_w8a16_tile;

typedef struct fut_w8a16_call {
  const void* a;
  const void* b;
  const float* alpha; /* device [1] or [n] */
  const float* bias;  /* device [n], or null */
  void* out;          /* A's type or F32 */
  void* workspace;    /* device; its bytes must be zero before its first use, and later uses find it as it was left */
  int64_t workspace_bytes;
  int64_t a_stride, b_stride, out_stride; /* elements */
  int32_t m, n, k;
  int32_t is_fp16, out_is_f32, alpha_is_vector;
  fut_w8a16_tile tile;
} fut_w8a16_call;

/* The tile that the cost model chooses where `tile` has none, and the workspace that it needs. */
FUT_API fut_status fut_w8a16_plan(int32_t m, int32_t n, int32_t k, int32_t multiprocessors, fut_w8a16_tile* tile,
                                  int64_t* workspace_bytes);
FUT_API fut_status fut_w8a16(const fut_w8a16_call* call, void* stream);

/* Chunks of prompts, packed: request i has rows first_row[i] to first_row[i + 1] - 1, which are its tokens from
 * position first_position[i] on. No rows lie between chunks; a chunk may be empty. */
typedef struct fut_prompts {
  const int32_t* first_row;      /* device [requests + 1], ascending from 0 to `rows` */
  const int32_t* first_position; /* device [requests]: tokens of the request before the chunk */
  const int32_t* slot;           /* device [requests]: row of the page table */
  const int32_t* page_table;     /* device [slots, table_width]: page of tokens 64*i .. 64*i+63 of the slot's request;
                                    entries past a chunk's last token are not read */
  int32_t table_width;
  int32_t requests;
  int32_t rows;
  int32_t max_chunk; /* at least the rows of the longest chunk */
} fut_prompts;

/* Causal attention of every row to positions 0 .. its own of its request, K and V of the chunk itself included: they
 * are in the history already. What the history holds past a request's last token is never seen, whatever it is. The
 * same bits however a prompt is cut into chunks and whatever runs beside it. */
typedef struct fut_prefill_attention_call {
  const void* q; /* device BF16 [rows, heads * head_dim] */
  const void* k; /* device BF16 [pages, kv_heads, FUT_PAGE_TOKENS, head_dim], after RoPE */
  const void* v; /* the same */
  int64_t pages;
  fut_prompts prompts;
  fut_attention_shape shape; /* head_dim 64, 80, 96 or 128; the RoPE tables and rms_norm_eps are not used */
  void* out;                 /* device BF16 [rows, heads * head_dim], or null */
  int64_t out_stride;        /* elements, a multiple of 8 */
  fut_e4m3_output quantized; /* the same in E4M3, its stride a multiple of 16: scale and amax of each request; data
                                null: none */
  void* workspace;           /* device; its bytes must be zero before its first use, and later uses find it as it was
                                left; one call at a time */
  int64_t workspace_bytes;
} fut_prefill_attention_call;

FUT_API int64_t fut_prefill_attention_workspace_bytes(int32_t requests, int32_t rows, int32_t heads);
FUT_API fut_status fut_prefill_attention(const fut_prefill_attention_call* call, void* stream);

/* Whole prompts: all layers over the packed tokens of some requests, K and V into the history and into the decoder's
 * cache. Slots are the decoder's. */
typedef struct fut_prefill_config {
  const fut_layer* layer; /* host array [layers]; all matrices in `format`, gate_up in FUT_INTERLEAVE1 and its bias in
                             the order of the stored rows. E4M3: gains are in the weights */
  void* history;          /* device BF16 [layers, 2 (K, V), history_pages, kv_heads, FUT_PAGE_TOKENS, head_dim] */
  int64_t history_pages;
  float* scale;         /* device [layers, 4 (qkv, o, gate_up, down), states]; E4M3 only, as the next four */
  uint32_t* amax;       /* device [layers, 4, states], zero: what calls that are not over have seen */
  uint64_t* saturated;  /* device [layers, 4]: elements beyond 448 are added */
  uint64_t* ignored;    /* device [1]: maxima that were zero or not finite are added */
  int32_t states;       /* 1: all requests share one; else the decoder's max_slots, a state a slot */
  int32_t frozen;       /* scales stay as they are */
  float margin;         /* a call leaves the scale margin * amax / 448 */
  int32_t format;       /* FUT_E4M3 or FUT_BF16 */
  int32_t accumulation; /* fut_accumulation */
  int32_t max_rows;     /* most rows of a run */
  int32_t max_requests; /* most requests of a run */
  void* workspace;      /* device, 256-byte aligned, zero, fut_prefill_workspace_bytes() */
  int64_t workspace_bytes;
} fut_prefill_config;

typedef struct fut_prefill fut_prefill;

/* One run: a chunk of each of some requests. Arrays are host memory and may be reused as soon as the call returns. */
typedef struct fut_prefill_chunks {
  int32_t requests;
  const int32_t* slot;     /* [requests], each once */
  const int32_t* position; /* [requests]: of the chunk's first token */
  const int32_t* length;   /* [requests], at least 1 */
  const int32_t* token;    /* [sum of lengths], chunk after chunk */
  int32_t ended_count;     /* slots whose call is over with this run: their scales move on */
  const int32_t* ended;
  int32_t head_count; /* chunks whose last token gets logits; their indices, ascending, in `head` */
  const int32_t* head;
  float* logits; /* device [head_count, vocab] */
} fut_prefill_chunks;

/* The decoder is that whose cache, page table, embedding, head and tables are used; it must live as long. */
FUT_API int64_t fut_prefill_workspace_bytes(const fut_prefill_config* config, const fut_decoder_config* decoder);
FUT_API fut_status fut_prefill_create(const fut_prefill_config* config, const fut_decoder* decoder,
                                      fut_prefill** prefill);
FUT_API void fut_prefill_destroy(fut_prefill* prefill);
/* Replace the pages of the history of a slot: host array of `count` pages, the first of them for tokens `64 * first`.
 */
FUT_API fut_status fut_prefill_set_pages(fut_prefill* prefill, int32_t slot, int32_t first, const int32_t* pages,
                                         int32_t count, void* stream);
FUT_API fut_status fut_prefill_run(fut_prefill* prefill, const fut_prefill_chunks* chunks, void* stream);
/* Device F32 [count, vocab]: logits after rows first .. first + count - 1 of the last run. */
FUT_API fut_status fut_prefill_logits(fut_prefill* prefill, int32_t first, int32_t count, float* logits, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* FUT_H */
