"""The ctypes binding against csrc/fut.h: sizes, offsets, constants and signatures, and how failures are told."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from csrc.build import declared_functions
from fut_runtime.cuda import structs
from fut_runtime.cuda.library import CudaCallError, Library
from fut_runtime.cuda.structs import (
    PLAIN_FUNCTIONS,
    STATUS_FUNCTIONS,
    STRUCTS,
    Accumulation,
    Epilogue,
    Format,
    GemmEpilogue,
    RowOrder,
    Status,
)
from fut_runtime.errors import UnsupportedError
from repository import REPOSITORY

HEADER = REPOSITORY / "csrc" / "fut.h"

#: A library that does what the tests ask instead of computing: enough to load, and to fail in every way.
FAKE = """
#include <stddef.h>
#include "fut.h"
#ifndef VERSION
#define VERSION FUT_ABI_VERSION
#endif
int32_t fut_abi_version(void) { return VERSION; }
#ifndef OLD
static const char* text = "";
const char* fut_last_error(void) { return text; }
int64_t fut_kv_block_bytes(int32_t bits, int32_t head_dim) { return 1000000000000 + 1000 * bits + head_dim; }
int64_t fut_decoder_workspace_bytes(const fut_decoder_config* c) { return c->workspace_bytes + c->max_slots; }
fut_status fut_decoder_create(const fut_decoder_config* c, fut_decoder** d) {
  *d = (fut_decoder*)c->layer[1].k_norm;
  text = "head_dim 12 is not supported";
  return c->hidden == 0 ? FUT_INVALID : FUT_OK;
}
void fut_decoder_destroy(fut_decoder* d) { (void)d; }
fut_status fut_decoder_set_pages(fut_decoder* d, int32_t s, int32_t f, const int32_t* p, int32_t n, void* stream) {
  (void)d; (void)s; (void)f; (void)p; (void)n; (void)stream;
  text = "cudaMemcpyAsync: an illegal memory access was encountered";
  return FUT_CUDA;
}
fut_status fut_decoder_step(fut_decoder* d, const fut_step* s, void* stream) {
  (void)d; (void)stream;
  return s->head_row[1] == 7 && s->sampling[1].uniform == 0.25 && s->sampling[1].top_k == 5 ? FUT_OK : FUT_INVALID;
}
fut_status fut_decoder_tokens(fut_decoder* d, int32_t* tokens, int32_t count, void* stream) {
  (void)d; (void)stream;
  for (int32_t i = 0; i < count; ++i) tokens[i] = 10 * i;
  return FUT_OK;
}
const float* fut_decoder_logits(const fut_decoder* d) { return (const float*)d; }
fut_status fut_project(const fut_matrix* m, const void* x, void* y, int32_t rows, int32_t epilogue, float eps, void* w,
                       int64_t n, void* stream) {
  (void)m; (void)x; (void)y; (void)w; (void)stream;
  return rows == 3 && epilogue == FUT_SWIGLU && eps == 0.5f && n == 5000000000 ? FUT_OK : FUT_INVALID;
}
int64_t fut_project_workspace_bytes(const fut_matrix* m, int32_t rows) { return 1000000000000 + m->group_size * rows; }
int64_t fut_attention_workspace_bytes(const fut_attention_shape* s, int32_t rows) { return s->max_context * rows; }
fut_status fut_attention(const fut_attention_shape* s, const fut_kv_cache* c, int32_t layer, const fut_rows* rows,
                         int32_t chunked, const float* qkv, const float* qn, const float* kn, void* out, void* w,
                         int64_t n, void* stream) {
  (void)s; (void)c; (void)rows; (void)qkv; (void)qn; (void)kn; (void)out; (void)w; (void)stream;
  return layer == 2 && chunked == 1 && n == 77 ? FUT_OK : FUT_INVALID;
}
int64_t fut_sample_workspace_bytes(int32_t rows, int32_t vocab) { return (int64_t)rows * vocab; }
fut_status fut_sample(const float* l, const fut_sampling* s, int32_t* t, int32_t rows, int32_t vocab, void* w,
                      int64_t n, void* stream) {
  (void)l; (void)s; (void)t; (void)w; (void)n; (void)stream;
  return rows == 2 && vocab == 50 ? FUT_OK : FUT_INVALID;
}
fut_status fut_gemm_plan(int32_t m, int32_t n, int32_t k, int32_t format, int32_t accumulation, int32_t head_dim,
                         int32_t multiprocessors, fut_gemm_tile* tile) {
  tile->tile_n = m + n + k;
  tile->clocks = (float)(format + accumulation + head_dim + multiprocessors);
  return FUT_OK;
}
fut_status fut_gemm(const fut_gemm_call* c, void* stream) {
  (void)stream;
  return c->qkv->shape.head_dim == 96 && c->quantized.stride == 5000000000 && c->cluster == 2 ? FUT_OK : FUT_INVALID;
}
fut_status fut_cache_copy(const fut_cache_copy_call* c, void* stream) {
  (void)stream;
  return c->cache.head_dim == 80 && c->layer == 4 ? FUT_OK : FUT_INVALID;
}
fut_status fut_w8a16_plan(int32_t m, int32_t n, int32_t k, int32_t multiprocessors, fut_w8a16_tile* tile,
                          int64_t* workspace_bytes) {
  *workspace_bytes = 5000000000 + m + n + k + multiprocessors + tile->tokens + tile->splits;
  tile->channels = 64;
  return FUT_OK;
}
fut_status fut_w8a16(const fut_w8a16_call* c, void* stream) {
  (void)stream;
  return c->workspace_bytes == 5000000000 && c->tile.splits == 3 ? FUT_OK : FUT_INVALID;
}
int64_t fut_prefill_attention_workspace_bytes(int32_t requests, int32_t rows, int32_t heads) {
  return 1000000000000 + 10000 * requests + 100 * rows + heads;
}
fut_status fut_prefill_attention(const fut_prefill_attention_call* c, void* stream) {
  (void)stream;
  return c->pages == 5000000000 && c->prompts.max_chunk == 7 && c->shape.head_dim == 80 && c->quantized.stride == 640 &&
                 c->workspace_bytes == 6000000000
             ? FUT_OK
             : FUT_INVALID;
}
int64_t fut_prefill_workspace_bytes(const fut_prefill_config* c, const fut_decoder_config* d) {
  return c->workspace_bytes + d->max_slots;
}
fut_status fut_prefill_create(const fut_prefill_config* c, const fut_decoder* d, fut_prefill** p) {
  *p = (fut_prefill*)c->layer[1].k_norm;
  return d == NULL && c->margin == 0.5f ? FUT_OK : FUT_INVALID;
}
void fut_prefill_destroy(fut_prefill* p) { (void)p; }
fut_status fut_prefill_set_pages(fut_prefill* p, int32_t s, int32_t f, const int32_t* g, int32_t n, void* stream) {
  (void)p; (void)stream;
  return s == 1 && f == 2 && g[1] == 10 && n == 2 ? FUT_OK : FUT_INVALID;
}
fut_status fut_prefill_run(fut_prefill* p, const fut_prefill_chunks* c, void* stream) {
  (void)p; (void)stream;
  return c->requests == 2 && c->length[1] == 10 && c->head[0] == 0 ? FUT_OK : FUT_INVALID;
}
fut_status fut_prefill_logits(fut_prefill* p, int32_t first, int32_t count, float* logits, void* stream) {
  (void)p; (void)logits; (void)stream;
  return first == 5 && count == 3 ? FUT_OK : FUT_INVALID;
}
fut_status fut_read_bandwidth(const void* data, int64_t bytes, uint32_t* checksum, void* stream) {
  (void)data; (void)checksum; (void)stream;
  return bytes == 6000000000 ? FUT_OK : FUT_INVALID;
}
#endif
"""


def compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        pytest.skip("no C compiler: neither cc, gcc nor clang")
    return found


def run_c(folder: Path, text: str) -> str:
    """Output of a C program that includes the header."""
    source = folder / "program.c"
    source.write_text(f'#include <stddef.h>\n#include <stdio.h>\n#include "fut.h"\n{text}')
    command = [compiler(), "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{HEADER.parent}", str(source)]
    subprocess.run([*command, "-o", str(folder / "program")], check=True)
    return subprocess.run([folder / "program"], check=True, capture_output=True, text=True).stdout


def test_structures_are_those_of_the_header(tmp_path: Path) -> None:
    lines, expected = [], []
    for name, struct in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(struct)}")
        for field in struct._fields_:
            member = f"(({name}*)0)->{field[0]}"
            lines.append(f'printf("{name}.{field[0]} %zu %zu\\n", offsetof({name}, {field[0]}), sizeof({member}));')
            place = getattr(struct, field[0])
            expected.append(f"{name}.{field[0]} {place.offset} {place.size}")
    output = run_c(tmp_path, "int main(void) {" + "\n".join(lines) + "return 0; }")
    assert output.splitlines() == expected


def test_every_structure_and_every_member_is_bound() -> None:
    """A member that was added to the header would change nothing above as long as it filled a hole."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = {}
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", text, flags=re.DOTALL):
        declarators = [d for part in body.split(";") for d in part.split(",") if d.strip()]
        found[name] = [re.findall(r"\w+", d)[-1] for d in declarators]
    assert found == {name: [field[0] for field in struct._fields_] for name, struct in STRUCTS.items()}


def test_constants_are_those_of_the_header(tmp_path: Path) -> None:
    constants = {"FUT_ABI_VERSION": structs.ABI_VERSION, "FUT_PAGE_TOKENS": structs.PAGE_TOKENS}
    for enum in (Status, Format, RowOrder, Epilogue):
        for member in enum:
            constants[f"FUT_{member.name}"] = member.value
    for prefix, enum in (("GEMM", GemmEpilogue), ("ACCUMULATE", Accumulation)):
        for member in enum:
            constants[f"FUT_{prefix}_{member.name}"] = member.value
    lines = "".join(f'printf("{name} %d\\n", {name});' for name in constants)
    output = run_c(tmp_path, f"int main(void) {{ {lines} return 0; }}")
    assert dict(line.split() for line in output.splitlines()) == {k: str(v) for k, v in constants.items()}


def test_every_function_is_bound_with_its_arguments() -> None:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)
    kinds = {"float": ctypes.c_float, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64}
    names = set()
    for result, name, arguments in re.findall(r"FUT_API ([\w ]+?[ *]+)(fut_\w+)\(([^)]*)\);", text):
        names.add(name)
        listed = [] if arguments.strip() == "void" else [a.strip() for a in arguments.split(",")]
        status = result.strip() == "fut_status"
        assert (name in STATUS_FUNCTIONS) == status, name
        bound = STATUS_FUNCTIONS[name] if status else PLAIN_FUNCTIONS[name][1]
        assert len(bound) == len(listed), name
        for argument, kind in zip(listed, bound, strict=True):
            pointer = "*" in argument
            assert pointer == (kind is ctypes.c_void_p or hasattr(kind, "contents")), f"{name}: {argument}"
            if not pointer:
                assert kind is kinds[argument.split()[0]], f"{name}: {argument}"
            elif hasattr(kind, "contents") and (struct := STRUCTS.get(argument.removeprefix("const ").split("*")[0])):
                assert kind._type_ is struct, f"{name}: {argument}"  # type: ignore[attr-defined]
    assert names == declared_functions(HEADER) == {*STATUS_FUNCTIONS, *PLAIN_FUNCTIONS}


def fake_library(folder: Path, *defines: str) -> Path:
    (folder / "fake.c").write_text(FAKE)
    output = folder / f"fake{len(list(folder.glob('*.so')))}.so"
    command = [compiler(), "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{HEADER.parent}"]
    subprocess.run([*command, *defines, str(folder / "fake.c"), "-o", str(output)], check=True)
    return output


@pytest.fixture
def fake(tmp_path: Path) -> Library:
    return Library(fake_library(tmp_path))


def test_numbers_cross_the_border_whole(fake: Library) -> None:
    assert fake.fut_kv_block_bytes(4, 128) == 1_000_000_004_128
    layers = (structs.Layer * 2)()
    layers[1].k_norm = 0x7F00_1234_5678
    config = structs.DecoderConfig(hidden=1, layer=layers, max_slots=3, workspace_bytes=1 << 40)
    assert fake.fut_decoder_workspace_bytes(ctypes.byref(config)) == (1 << 40) + 3
    assert fake.fut_project_workspace_bytes(ctypes.byref(structs.Matrix(group_size=128)), 3) == 1_000_000_000_384
    decoder = ctypes.c_void_p()
    fake.call("fut_decoder_create", ctypes.byref(config), ctypes.byref(decoder))
    assert decoder.value == 0x7F00_1234_5678 == fake.fut_decoder_logits(decoder)
    numbers = (ctypes.c_int32 * 2)(0, 7)
    sampling = (structs.Sampling * 2)(structs.Sampling(), structs.Sampling(uniform=0.25, top_k=5))
    step = structs.Step(rows=2, token=numbers, head_rows=2, head_row=numbers, sampling=sampling)
    fake.call("fut_decoder_step", decoder, ctypes.byref(step), None)
    fake.call("fut_decoder_tokens", decoder, numbers, 2, None)
    assert list(numbers) == [0, 10]
    matrix = structs.Matrix()
    tile = structs.GemmTile()
    fake.call("fut_gemm_plan", 1, 2, 3, 4, 5, 6, 7, ctypes.byref(tile))
    assert (tile.tile_n, tile.clocks) == (6, 22)
    qkv = structs.QKVOutput(shape=structs.AttentionShape(head_dim=96))
    quantized = structs.E4M3Output(stride=5_000_000_000)
    call = structs.GemmCall(qkv=ctypes.pointer(qkv), quantized=quantized, cluster=2)
    fake.call("fut_gemm", ctypes.byref(call), None)
    prefill_config = structs.PrefillConfig(layer=layers, margin=0.5, workspace_bytes=1 << 40)
    needed = fake.fut_prefill_workspace_bytes(ctypes.byref(prefill_config), ctypes.byref(config))
    assert needed == (1 << 40) + 3
    prompts = ctypes.c_void_p()
    fake.call("fut_prefill_create", ctypes.byref(prefill_config), None, ctypes.byref(prompts))
    assert prompts.value == 0x7F00_1234_5678
    fake.call("fut_prefill_set_pages", prompts, 1, 2, numbers, 2, None)
    chunks = structs.PrefillChunks(requests=2, length=numbers, head=numbers)
    fake.call("fut_prefill_run", prompts, ctypes.byref(chunks), None)
    fake.call("fut_prefill_logits", prompts, 5, 3, None, None)
    copy = structs.CacheCopyCall(cache=structs.KVCache(head_dim=80), layer=4)
    fake.call("fut_cache_copy", ctypes.byref(copy), None)
    w8a16, nbytes = structs.W8A16Tile(tokens=5, splits=6), ctypes.c_int64()
    fake.call("fut_w8a16_plan", 1, 2, 3, 4, ctypes.byref(w8a16), ctypes.byref(nbytes))
    assert (w8a16.channels, w8a16.tokens, w8a16.splits, nbytes.value) == (64, 5, 6, 5_000_000_021)
    w8a16_call = structs.W8A16Call(workspace_bytes=5_000_000_000, tile=structs.W8A16Tile(splits=3))
    fake.call("fut_w8a16", ctypes.byref(w8a16_call), None)
    assert fake.fut_prefill_attention_workspace_bytes(5, 7, 32) == 1_000_000_050_732
    prefill = structs.PrefillAttentionCall(
        pages=5_000_000_000,
        prompts=structs.Prompts(max_chunk=7),
        shape=structs.AttentionShape(head_dim=80),
        quantized=structs.E4M3Output(stride=640),
        workspace_bytes=6_000_000_000,
    )
    fake.call("fut_prefill_attention", ctypes.byref(prefill), None)
    fake.call("fut_project", ctypes.byref(matrix), None, None, 3, Epilogue.SWIGLU, 0.5, None, 5_000_000_000, None)


def test_a_failure_names_the_call_and_what_it_was_for(fake: Library) -> None:
    config = structs.DecoderConfig(layer=(structs.Layer * 2)())
    with pytest.raises(CudaCallError) as refused:
        fake.call(
            "fut_decoder_create", ctypes.byref(config), ctypes.byref(ctypes.c_void_p()), about="tiny model, 2 layers"
        )
    assert refused.value.status is Status.INVALID
    assert str(refused.value) == (
        "fut_decoder_create (tiny model, 2 layers) refused its arguments: head_dim 12 is not supported"
    )
    with pytest.raises(CudaCallError, match="fut_decoder_set_pages failed in CUDA: cudaMemcpyAsync: an illegal") as e:
        fake.call("fut_decoder_set_pages", None, 0, 0, (ctypes.c_int32 * 1)(), 1, None)
    assert e.value.status is Status.CUDA


def test_a_library_that_is_missing_broken_or_of_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"has no CUDA library \(_fut\.so\)"):
        Library(tmp_path / "_fut.so")
    (tmp_path / "_fut.so").write_bytes(b"\x7fELF broken")
    with pytest.raises(UnsupportedError, match="cannot be loaded"):
        Library(tmp_path / "_fut.so")
    with pytest.raises(UnsupportedError, match="has ABI version 99, expected 2"):
        Library(fake_library(tmp_path, "-DVERSION=99"))
    with pytest.raises(UnsupportedError, match="has no function fut_"):
        Library(fake_library(tmp_path, "-DOLD"))
