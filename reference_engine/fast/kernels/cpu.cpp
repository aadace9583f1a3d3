// The operations of `fused.FusedDecoder` on a CPU, one sweep each, and matrix products of few rows.
//
// The operators have the schemas of the Triton kernels beside this file but for how they work, and round where `layers`, `rotary` and torch
// round: to T after each operation that is one there. Sums, softmax and sigmoid are float32. Products and attention
// name their vectors (cpu/vectors.h); other loops are written for the compiler to turn into some (`omp simd` allows it
// to reorder a sum). All run on torch's own threads. Only torch's stable ABI is used: its headers compile in seconds.
//
// Shapes: T rows, R requests, D hidden, F ffn, N query heads, K KV heads, A = N + K, G = N / K, H head dim,
// W width of the fused projection, B blocks, S slots in a block, C keys.

#include "cpu/attention.h"
#include "cpu/layers.h"
#include "cpu/norms.h"
#include "cpu/products.h"

STABLE_TORCH_LIBRARY(reference_engine_cpu, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("add_norm(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor)");
  library.def(
      "norm_rotate(Tensor qkv, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, float eps, int num_heads, "
      "int num_kv_heads, bool keeps_normed=False) -> (Tensor, Tensor)");
  library.def("linear(Tensor x, Tensor weight, Tensor? bias, *, int row_outputs=2, bool asks_ahead=True) -> Tensor");
  library.def("silu_mul(Tensor gate_up) -> Tensor");
  library.def("store_kv(Tensor k, Tensor v, Tensor slots, Tensor(a!) k_cache, Tensor(b!) v_cache) -> ()");
  library.def(
      "paged_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor context_lens, "
      "Tensor(a!) out, *, int? window=None) -> ()");
  library.def(
      "decode_layers(Tensor x, Tensor cos, Tensor sin, Tensor slots, Tensor block_tables, Tensor context_lens, "
      "Tensor[] norms, Tensor[] weights, Tensor[] biases, Tensor[] qk_norms, Tensor(a!)[] caches, int[] windows, float eps, "
      "float qk_eps, int num_heads, int num_kv_heads, int row_outputs, bool asks_ahead) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(reference_engine_cpu, CPU, library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("add_norm", TORCH_BOX(&add_norm));
  library.impl("norm_rotate", TORCH_BOX(&norm_rotate));
  library.impl("linear", TORCH_BOX(&linear));
  library.impl("silu_mul", TORCH_BOX(&silu_mul));
  library.impl("store_kv", TORCH_BOX(&store_kv));
  library.impl("paged_decode", TORCH_BOX(&paged_decode));
  library.impl("decode_layers", TORCH_BOX(&decode_layers));
}
