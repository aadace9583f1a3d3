// All layers of a decoder over one row of each request, in one call: the operators of cpu.cpp in the order of
// fused.FusedDecoder, which has the shapes. At one row a call of an operator from Python takes as long as its work.

#pragma once

#include <vector>

#include "attention.h"
#include "norms.h"
#include "products.h"

namespace {

// What the layers are made of, layer after layer.
struct Layers {
  // Before attention and before the MLP of each layer, then the one behind the last.
  std::vector<Tensor> norms;
  // qkv, output, gate and up, down.
  std::vector<Tensor> weights;
  // Of each weight; without elements where there is none.
  std::vector<Tensor> biases;
  // Of queries and keys; none if they are not normalised.
  std::vector<Tensor> qk_norms;
  // Keys and values.
  std::vector<Tensor> caches;
  // 0 if a row sees all of its past.
  std::vector<int64_t> windows;
  double eps, qk_eps;
  int64_t num_heads, num_kv_heads;
  RowWay way;

  int64_t size() const { return static_cast<int64_t>(windows.size()); }

  Tensor multiply(const Tensor& x, int64_t layer, int64_t place) const {
    const Tensor& bias = biases[4 * layer + place];
    const auto own = bias.numel() > 0 ? std::optional<Tensor>(bias) : std::nullopt;
    return linear(x, weights[4 * layer + place], own, way.num_outputs, way.asks_ahead);
  }
};

// Attention of one layer over its normalised input [T, D].
Tensor attend(
    const Layers& layers, int64_t layer, const Tensor& normed, const Tensor& cos, const Tensor& sin, const Tensor& slots,
    const Tensor& tables, const Tensor& lens) {
  const bool has_norms = !layers.qk_norms.empty();
  const auto weight = [&](int64_t place) {
    return has_norms ? std::optional<Tensor>(layers.qk_norms[2 * layer + place]) : std::nullopt;
  };
  Tensor qkv = layers.multiply(normed, layer, 0);
  auto both = norm_rotate(
      qkv, cos, sin, weight(0), weight(1), layers.qk_eps, layers.num_heads, layers.num_kv_heads, false);
  Tensor rotated = std::get<0>(both);
  const int64_t num_rows = qkv.size(0), head_dim = cos.size(2);
  const int64_t num_both = layers.num_heads + layers.num_kv_heads;
  const Tensor q = torch::stable::narrow(rotated, 1, 0, layers.num_heads);
  const Tensor k = torch::stable::narrow(rotated, 1, layers.num_heads, layers.num_kv_heads);
  Tensor projected = torch::stable::view(qkv, {num_rows, num_both + layers.num_kv_heads, head_dim});
  const Tensor v = torch::stable::narrow(projected, 1, num_both, layers.num_kv_heads);
  const Tensor &k_cache = layers.caches[2 * layer], &v_cache = layers.caches[2 * layer + 1];
  store_kv(k, v, slots, k_cache, v_cache);
  const Tensor context = torch::stable::new_empty(qkv, {num_rows, layers.num_heads, head_dim});
  const int64_t window = layers.windows[layer];
  const auto own = window > 0 ? std::optional<int64_t>(window) : std::nullopt;
  paged_decode(q, k_cache, v_cache, tables, lens, context, own);
  return layers.multiply(torch::stable::view(context, {num_rows, layers.num_heads * head_dim}), layer, 1);
}

// The residual stream [T, D] behind the last layer, normalised.
Tensor decode_layers(
    const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& slots, const Tensor& tables, const Tensor& lens,
    std::vector<Tensor> norms, std::vector<Tensor> weights, std::vector<Tensor> biases, std::vector<Tensor> qk_norms,
    std::vector<Tensor> caches, std::vector<int64_t> windows, double eps, double qk_eps, int64_t num_heads,
    int64_t num_kv_heads, int64_t row_outputs, bool asks_ahead) {
  const Layers layers{
      std::move(norms), std::move(weights), std::move(biases), std::move(qk_norms), std::move(caches),
      std::move(windows), eps, qk_eps, num_heads, num_kv_heads, {row_outputs, asks_ahead}};
  Tensor sum = x, normed = rms_norm(x, layers.norms[0], eps);
  for (int64_t layer = 0; layer < layers.size(); ++layer) {
    const Tensor attended = attend(layers, layer, normed, cos, sin, slots, tables, lens);
    std::tie(sum, normed) = add_norm(sum, attended, layers.norms[2 * layer + 1], eps);
    const Tensor act = silu_mul(layers.multiply(normed, layer, 2));
    std::tie(sum, normed) = add_norm(sum, layers.multiply(act, layer, 3), layers.norms[2 * layer + 2], eps);
  }
  return normed;
}

}  // namespace
