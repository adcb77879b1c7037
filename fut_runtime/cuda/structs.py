"""The structures of csrc/fut.h for ctypes. Pointers are integers: device addresses, or host addresses of arrays."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

#: What this module was written against: `FUT_ABI_VERSION` of the header.
ABI_VERSION = 2
#: `FUT_PAGE_TOKENS`: tokens of one request that a page of the cache holds.
PAGE_TOKENS = 64


class Status(IntEnum):
    """`fut_status`."""

    OK = 0
    INVALID = 1
    CUDA = 2


class Format(IntEnum):
    """`fut_format`: how a matrix is stored."""

    INT4 = 0
    E4M3 = 1
    BF16 = 2


class RowOrder(IntEnum):
    """`fut_row_order`: how gate and up rows are interleaved."""

    NATURAL = 0
    INTERLEAVE1 = 1
    INTERLEAVE8 = 8


class Epilogue(IntEnum):
    """`fut_epilogue`: what `fut_project` does with a product."""

    STORE = 0
    RESIDUAL = 1
    SWIGLU = 2


class GemmEpilogue(IntEnum):
    """`fut_gemm_epilogue`: what `fut_gemm` does with a product."""

    BF16 = 0
    F32 = 1
    RESIDUAL = 2
    SWIGLU = 3
    QKV = 4
    SWIGLU_BF16 = 5


class Accumulation(IntEnum):
    """`fut_accumulation`: how sums of E4M3 products are kept."""

    FAST = 0
    PROMOTED = 1


class Matrix(Structure):
    """`fut_matrix`."""

    _fields_ = (
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("gain", c_void_p),
        ("format", c_int32),
        ("row_order", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("stored_rows", c_int32),
        ("stored_cols", c_int32),
        ("group_size", c_int32),
        ("scale_is_fp16", c_int32),
    )


class Layer(Structure):
    """`fut_layer`."""

    _fields_ = (
        ("qkv", Matrix),
        ("o", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
    )


class KVCache(Structure):
    """`fut_kv_cache`."""

    _fields_ = (
        ("pool", c_void_p),
        ("pages", c_int64),
        ("layers", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("bits", c_int32),
        ("rotation", c_int32),
        ("zero_point", c_int32),
    )


class Rows(Structure):
    """`fut_rows`."""

    _fields_ = (
        ("token", c_void_p),
        ("position", c_void_p),
        ("slot", c_void_p),
        ("page_table", c_void_p),
        ("table_width", c_int32),
        ("rows", c_int32),
    )


class AttentionShape(Structure):
    """`fut_attention_shape`."""

    _fields_ = (
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("max_context", c_int32),
        ("rms_norm_eps", c_float),
        ("rope_cos", c_void_p),
        ("rope_sin", c_void_p),
    )


class Sampling(Structure):
    """`fut_sampling`."""

    _fields_ = (
        ("uniform", c_double),
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("top_k", c_int32),
    )


class DecoderConfig(Structure):
    """`fut_decoder_config`."""

    _fields_ = (
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("layers", c_int32),
        ("vocab", c_int32),
        ("attention", AttentionShape),
        ("cache", KVCache),
        ("embed", c_void_p),
        ("layer", POINTER(Layer)),
        ("head", Matrix),
        ("max_rows", c_int32),
        ("max_slots", c_int32),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
    )


class Step(Structure):
    """`fut_step`."""

    _fields_ = (
        ("rows", c_int32),
        ("chunked", c_int32),
        ("token", POINTER(c_int32)),
        ("position", POINTER(c_int32)),
        ("slot", POINTER(c_int32)),
        ("head_rows", c_int32),
        ("head_row", POINTER(c_int32)),
        ("sampling", POINTER(Sampling)),
    )


class E4M3Output(Structure):
    """`fut_e4m3_output`."""

    _fields_ = (
        ("data", c_void_p),
        ("stride", c_int64),
        ("scale", c_void_p),
        ("amax", c_void_p),
        ("saturated", c_void_p),
    )


class QKVOutput(Structure):
    """`fut_qkv_output`."""

    _fields_ = (
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("rows", Rows),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("shape", AttentionShape),
    )


class GemmCall(Structure):
    """`fut_gemm_call`."""

    _fields_ = (
        ("a", c_void_p),
        ("b", c_void_p),
        ("a_stride", c_int64),
        ("b_stride", c_int64),
        ("m", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("format", c_int32),
        ("accumulation", c_int32),
        ("epilogue", c_int32),
        ("row_factor", c_void_p),
        ("square_sums", c_void_p),
        ("square_parts", c_int32),
        ("eps", c_float),
        ("a_scale", c_void_p),
        ("row_request", c_void_p),
        ("channel_scale", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("residual", c_void_p),
        ("residual_stride", c_int64),
        ("quantized", E4M3Output),
        ("out_square_sums", c_void_p),
        ("qkv", POINTER(QKVOutput)),
        ("tile_n", c_int32),
        ("cluster", c_int32),
    )


class GemmTile(Structure):
    """`fut_gemm_tile`."""

    _fields_ = (("tile_n", c_int32), ("cluster", c_int32), ("group_m", c_int32), ("clocks", c_float))


class PageSpan(Structure):
    """`fut_page_span`."""

    _fields_ = (("slot", c_int32), ("page", c_int32), ("first", c_int32), ("count", c_int32))


class CacheCopyCall(Structure):
    """`fut_cache_copy_call`."""

    _fields_ = (
        ("cache", KVCache),
        ("k", c_void_p),
        ("v", c_void_p),
        ("history_table", c_void_p),
        ("cache_table", c_void_p),
        ("spans", c_void_p),
        ("history_width", c_int32),
        ("cache_width", c_int32),
        ("count", c_int32),
        ("layer", c_int32),
    )


class W8A16Tile(Structure):
    """`fut_w8a16_tile`."""

    _fields_ = (("channels", c_int32), ("tokens", c_int32), ("splits", c_int32))


class W8A16Call(Structure):
    """`fut_w8a16_call`."""

    _fields_ = (
        ("a", c_void_p),
        ("b", c_void_p),
        ("alpha", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
        ("a_stride", c_int64),
        ("b_stride", c_int64),
        ("out_stride", c_int64),
        ("m", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("is_fp16", c_int32),
        ("out_is_f32", c_int32),
        ("alpha_is_vector", c_int32),
        ("tile", W8A16Tile),
    )


class Prompts(Structure):
    """`fut_prompts`."""

    _fields_ = (
        ("first_row", c_void_p),
        ("first_position", c_void_p),
        ("slot", c_void_p),
        ("page_table", c_void_p),
        ("table_width", c_int32),
        ("requests", c_int32),
        ("rows", c_int32),
        ("max_chunk", c_int32),
    )


class PrefillAttentionCall(Structure):
    """`fut_prefill_attention_call`."""

    _fields_ = (
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("pages", c_int64),
        ("prompts", Prompts),
        ("shape", AttentionShape),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("quantized", E4M3Output),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
    )


class PrefillConfig(Structure):
    """`fut_prefill_config`."""

    _fields_ = (
        ("layer", POINTER(Layer)),
        ("history", c_void_p),
        ("history_pages", c_int64),
        ("scale", c_void_p),
        ("amax", c_void_p),
        ("saturated", c_void_p),
        ("ignored", c_void_p),
        ("states", c_int32),
        ("frozen", c_int32),
        ("margin", c_float),
        ("format", c_int32),
        ("accumulation", c_int32),
        ("max_rows", c_int32),
        ("max_requests", c_int32),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
    )


class PrefillChunks(Structure):
    """`fut_prefill_chunks`."""

    _fields_ = (
        ("requests", c_int32),
        ("slot", POINTER(c_int32)),
        ("position", POINTER(c_int32)),
        ("length", POINTER(c_int32)),
        ("token", POINTER(c_int32)),
        ("ended_count", c_int32),
        ("ended", POINTER(c_int32)),
        ("head_count", c_int32),
        ("head", POINTER(c_int32)),
        ("logits", c_void_p),
    )


#: Structures by their names in the header.
STRUCTS: dict[str, type[Structure]] = {
    "fut_matrix": Matrix,
    "fut_layer": Layer,
    "fut_kv_cache": KVCache,
    "fut_rows": Rows,
    "fut_attention_shape": AttentionShape,
    "fut_sampling": Sampling,
    "fut_decoder_config": DecoderConfig,
    "fut_step": Step,
    "fut_e4m3_output": E4M3Output,
    "fut_qkv_output": QKVOutput,
    "fut_gemm_call": GemmCall,
    "fut_gemm_tile": GemmTile,
    "fut_page_span": PageSpan,
    "fut_cache_copy_call": CacheCopyCall,
    "fut_w8a16_tile": W8A16Tile,
    "fut_w8a16_call": W8A16Call,
    "fut_prompts": Prompts,
    "fut_prefill_attention_call": PrefillAttentionCall,
    "fut_prefill_config": PrefillConfig,
    "fut_prefill_chunks": PrefillChunks,
}

#: Functions that return a status, by their names in the header: types of their arguments.
STATUS_FUNCTIONS: dict[str, tuple[type, ...]] = {
    "fut_decoder_create": (POINTER(DecoderConfig), POINTER(c_void_p)),
    "fut_decoder_set_pages": (c_void_p, c_int32, c_int32, POINTER(c_int32), c_int32, c_void_p),
    "fut_decoder_step": (c_void_p, POINTER(Step), c_void_p),
    "fut_decoder_tokens": (c_void_p, POINTER(c_int32), c_int32, c_void_p),
    "fut_project": (
        *(POINTER(Matrix), c_void_p, c_void_p, c_int32, c_int32, c_float),
        *(c_void_p, c_int64, c_void_p),
    ),
    "fut_attention": (
        *(POINTER(AttentionShape), POINTER(KVCache), c_int32, POINTER(Rows), c_int32),
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p),
    ),
    "fut_sample": (c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_int64, c_void_p),
    "fut_read_bandwidth": (c_void_p, c_int64, c_void_p, c_void_p),
    "fut_gemm_plan": (*(c_int32,) * 7, POINTER(GemmTile)),
    "fut_gemm": (POINTER(GemmCall), c_void_p),
    "fut_cache_copy": (POINTER(CacheCopyCall), c_void_p),
    "fut_w8a16_plan": (*(c_int32,) * 4, POINTER(W8A16Tile), POINTER(c_int64)),
    "fut_w8a16": (POINTER(W8A16Call), c_void_p),
    "fut_prefill_attention": (POINTER(PrefillAttentionCall), c_void_p),
    "fut_prefill_create": (POINTER(PrefillConfig), c_void_p, POINTER(c_void_p)),
    "fut_prefill_set_pages": (c_void_p, c_int32, c_int32, POINTER(c_int32), c_int32, c_void_p),
    "fut_prefill_run": (c_void_p, POINTER(PrefillChunks), c_void_p),
    "fut_prefill_logits": (c_void_p, c_int32, c_int32, c_void_p, c_void_p),
}
#: The others: type of the result, types of the arguments.
PLAIN_FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "fut_last_error": (ctypes.c_char_p, ()),
    "fut_abi_version": (c_int32, ()),
    "fut_kv_block_bytes": (c_int64, (c_int32, c_int32)),
    "fut_decoder_workspace_bytes": (c_int64, (POINTER(DecoderConfig),)),
    "fut_decoder_destroy": (None, (c_void_p,)),
    "fut_decoder_logits": (c_void_p, (c_void_p,)),
    "fut_project_workspace_bytes": (c_int64, (POINTER(Matrix), c_int32)),
    "fut_attention_workspace_bytes": (c_int64, (POINTER(AttentionShape), c_int32)),
    "fut_sample_workspace_bytes": (c_int64, (c_int32, c_int32)),
    "fut_prefill_attention_workspace_bytes": (c_int64, (c_int32, c_int32, c_int32)),
    "fut_prefill_workspace_bytes": (c_int64, (POINTER(PrefillConfig), POINTER(DecoderConfig))),
    "fut_prefill_destroy": (None, (c_void_p,)),
}
