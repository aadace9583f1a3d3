// What a decoder does between its matrix products, on a CPU: one sweep for each operation of `fused.FusedDecoder`.
//
// The operators have the schemas of the Triton kernels beside this file, and round where `layers`, `rotary` and torch
// round: to T behind each operation that is one there. Sums, softmax and sigmoid are float32. Loops are written for
// the compiler to turn into vectors (`omp simd` allows it to reorder a sum), and run on torch's own threads. Only
// torch's stable ABI is used: its headers compile in seconds.
//
// Shapes: T rows, R requests, D hidden, F ffn, N query heads, K KV heads, A = N + K, G = N / K, H head dim,
// W width of the fused projection, B blocks, S slots in a block, C keys.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Elements that one thread should have at least: fewer take less time than waking another thread.
constexpr int64_t kGrain = 16384;
constexpr int64_t kLineBytes = 64;
// Keys between the one that is asked for and the one that is used.
constexpr int64_t kAhead = 8;

template <typename Function>
void by_dtype(const Tensor& x, const Function& function) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return function(float{});
    case ScalarType::BFloat16: return function(c10::BFloat16{});
    case ScalarType::Half: return function(c10::Half{});
    default: STD_TORCH_CHECK(false, "reference_engine's kernels take float32, bfloat16 and float16");
  }
}

// Calls function(row) for all rows, shared among threads.
template <typename Function>
void for_rows(int64_t num_rows, int64_t row_elements, const Function& function) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, row_elements));
  if (num_rows <= grain) {
    for (int64_t row = 0; row < num_rows; ++row) function(row);
    return;
  }
  torch::stable::parallel_for(0, num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) function(row);
  });
}

void check_contiguous(const Tensor& x) {
  STD_TORCH_CHECK(x.is_contiguous(), "reference_engine's kernels take contiguous tensors here");
}

template <typename T>
const T* data(const Tensor& x) {
  return static_cast<const T*>(x.data_ptr());
}

template <typename T>
T* mutable_data(const Tensor& x) {
  return static_cast<T*>(x.data_ptr());
}

template <typename T>
float rounded(float x) {
  return static_cast<float>(static_cast<T>(x));
}

// e^x of x <= 0 within two units of the last place, and 0 below -80, in operations that become vectors (Cephes' expf):
// e^x = 2^n e^r. Smaller results would become denormal numbers, which take a hundred times as long.
inline float exponential(float x) {
  const float n = std::floor(x * 1.44269504f + 0.5f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return x < -80.0f ? 0.0f : p * power;  // a NaN stays one
}

float sum_of_squares(const float* x, int64_t size) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) sum += x[i] * x[i];
  return sum;
}

// layers.RMSNorm of one row: its result, and a rounded value for each element that is still to be used.
template <typename T>
void norm_row(const float* x, const T* weight, T* normed, int64_t width, double eps) {
  const float scale = 1.0f / std::sqrt(sum_of_squares(x, width) / static_cast<float>(width) + static_cast<float>(eps));
  for (int64_t i = 0; i < width; ++i) {
    normed[i] = static_cast<T>(static_cast<float>(weight[i]) * rounded<T>(x[i] * scale));
  }
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check_contiguous(x);
  Tensor normed = torch::stable::empty_like(x);
  const int64_t width = x.size(1);
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    for_rows(x.size(0), width, [&](int64_t row) {
      const T* x_D = data<T>(x) + row * width;
      std::vector<float> wide_D(x_D, x_D + width);
      norm_row(wide_D.data(), data<T>(weight), mutable_data<T>(normed) + row * width, width, eps);
    });
  });
  return normed;
}

std::tuple<Tensor, Tensor> add_norm(const Tensor& x, const Tensor& delta, const Tensor& weight, double eps) {
  check_contiguous(x);
  check_contiguous(delta);
  Tensor sum = torch::stable::empty_like(x), normed = torch::stable::empty_like(x);
  const int64_t width = x.size(1);
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    for_rows(x.size(0), width, [&](int64_t row) {
      const T *x_D = data<T>(x) + row * width, *delta_D = data<T>(delta) + row * width;
      T* sum_D = mutable_data<T>(sum) + row * width;
      std::vector<float> wide_D(width);
      for (int64_t i = 0; i < width; ++i) {
        sum_D[i] = static_cast<T>(static_cast<float>(x_D[i]) + static_cast<float>(delta_D[i]));
        wide_D[i] = static_cast<float>(sum_D[i]);
      }
      norm_row(wide_D.data(), data<T>(weight), mutable_data<T>(normed) + row * width, width, eps);
    });
  });
  return {sum, normed};
}

// rotary.apply_rotary of one head.
template <typename T>
void rotate_head(const T* x, const T* cos, const T* sin, T* rotated, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = static_cast<float>(x[i]), second = static_cast<float>(x[i + half]);
    const float cosine = static_cast<float>(cos[i]), sine = static_cast<float>(sin[i]);
    rotated[i] = static_cast<T>(rounded<T>(first * cosine) - rounded<T>(second * sine));
    rotated[i + half] = static_cast<T>(rounded<T>(second * cosine) + rounded<T>(first * sine));
  }
}

std::tuple<Tensor, Tensor> norm_rotate(
    const Tensor& qkv, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& q_weight,
    const std::optional<Tensor>& k_weight, double eps, int64_t num_heads, int64_t num_kv_heads, bool keeps_normed) {
  check_contiguous(qkv);
  check_contiguous(cos);
  check_contiguous(sin);
  const int64_t num_rows = qkv.size(0), width = qkv.size(1), num_both = num_heads + num_kv_heads;
  const int64_t head_dim = cos.size(2);
  Tensor rotated = torch::stable::new_empty(qkv, {num_rows, num_both, head_dim});
  Tensor normed = torch::stable::new_empty(qkv, {keeps_normed ? num_rows : 0, num_both, head_dim});
  by_dtype(qkv, [&](auto zero) {
    using T = decltype(zero);
    for_rows(num_rows, num_both * head_dim, [&](int64_t row) {
      const T *cos_H = data<T>(cos) + row * head_dim, *sin_H = data<T>(sin) + row * head_dim;
      std::vector<float> wide_H(head_dim);
      std::vector<T> normed_H(head_dim);
      for (int64_t head = 0; head < num_both; ++head) {
        const T* x_H = data<T>(qkv) + row * width + head * head_dim;
        if (q_weight.has_value()) {
          for (int64_t i = 0; i < head_dim; ++i) wide_H[i] = static_cast<float>(x_H[i]);
          const T* weight_H = data<T>(head < num_heads ? *q_weight : *k_weight);
          norm_row(wide_H.data(), weight_H, normed_H.data(), head_dim, eps);
          x_H = normed_H.data();
        }
        const int64_t to = (row * num_both + head) * head_dim;
        if (keeps_normed) std::copy(x_H, x_H + head_dim, mutable_data<T>(normed) + to);
        rotate_head(x_H, cos_H, sin_H, mutable_data<T>(rotated) + to, head_dim / 2);
      }
    });
  });
  return {rotated, normed};
}

// x / (1 + e^-x), with no e^x above 1.
inline float silu(float x) {
  const float power = exponential(-std::fabs(x));
  return (x < 0 ? x * power : x) / (1.0f + power);
}

Tensor silu_mul(const Tensor& gate_up) {
  check_contiguous(gate_up);
  const int64_t num_rows = gate_up.size(0), width = gate_up.size(1) / 2;
  Tensor act = torch::stable::new_empty(gate_up, {num_rows, width});
  by_dtype(gate_up, [&](auto zero) {
    using T = decltype(zero);
    for_rows(num_rows, width, [&](int64_t row) {
      const T *gate_F = data<T>(gate_up) + row * 2 * width, *up_F = gate_F + width;
      T* act_F = mutable_data<T>(act) + row * width;
      for (int64_t i = 0; i < width; ++i) {
        act_F[i] = static_cast<T>(rounded<T>(silu(static_cast<float>(gate_F[i]))) * static_cast<float>(up_F[i]));
      }
    });
  });
  return act;
}

#ifdef __AVX512BF16__
// Products of pairs are added by one instruction, which reads 16 bits as they are.
float dot(const c10::BFloat16* x, const c10::BFloat16* y, int64_t size) {
  __m512 sum = _mm512_setzero_ps();
  int64_t i = 0;
  for (; i + 32 <= size; i += 32) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(x + i), (__m512bh)_mm512_loadu_si512(y + i));
  }
  float total = _mm512_reduce_add_ps(sum);
  for (; i < size; ++i) total += static_cast<float>(x[i]) * static_cast<float>(y[i]);
  return total;
}
#else
float dot(const c10::BFloat16* x, const c10::BFloat16* y, int64_t size) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) sum += static_cast<float>(x[i]) * static_cast<float>(y[i]);
  return sum;
}
#endif

float dot(const float* x, const float* y, int64_t size) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) sum += x[i] * y[i];
  return sum;
}

// x W^T + bias of one row.
Tensor linear_row(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_contiguous(x);
  check_contiguous(weight);
  const int64_t num_outputs = weight.size(0), num_inputs = weight.size(1);
  Tensor out = torch::stable::new_empty(x, {1, num_outputs});
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const T *x_I = data<T>(x), *weight_OI = data<T>(weight), *bias_O = bias.has_value() ? data<T>(*bias) : nullptr;
    T* out_O = mutable_data<T>(out);
    const int64_t grain = std::max<int64_t>(1, kGrain * 4 / num_inputs);
    torch::stable::parallel_for(0, num_outputs, grain, [&](int64_t begin, int64_t end) {
      for (int64_t o = begin; o < end; ++o) {
        const float product = dot(x_I, weight_OI + o * num_inputs, num_inputs);
        out_O[o] = static_cast<T>(bias_O == nullptr ? product : product + static_cast<float>(bias_O[o]));
      }
    });
  };
  if (x.scalar_type() == ScalarType::Float) run(float{}); else run(c10::BFloat16{});
  return out;
}

// A row whose slot is negative (padding) is written nowhere.
void store_kv(const Tensor& k, const Tensor& v, const Tensor& slots, const Tensor& k_cache, const Tensor& v_cache) {
  check_contiguous(k_cache);
  check_contiguous(v_cache);
  const int64_t width = k.size(1) * k.size(2);
  STD_TORCH_CHECK(k.stride(1) == k.size(2) && v.stride(1) == v.size(2), "the heads of a row lie side by side");
  by_dtype(k, [&](auto zero) {
    using T = decltype(zero);
    for_rows(k.size(0), width, [&](int64_t row) {
      const int64_t slot = data<int64_t>(slots)[row];
      if (slot < 0) return;
      std::memcpy(mutable_data<T>(k_cache) + slot * width, data<T>(k) + row * k.stride(0), width * sizeof(T));
      std::memcpy(mutable_data<T>(v_cache) + slot * width, data<T>(v) + row * v.stride(0), width * sizeof(T));
    });
  });
}

// One KV head of one request: the keys and values of its context, found through its block table.
template <typename T>
struct Context {
  const T *k, *v;  // of slot 0
  const int64_t* blocks;
  int64_t block_size, slot_width, begin, end, head_dim;

  const T* at(const T* cache, int64_t position) const {
    return cache + (blocks[position / block_size] * block_size + position % block_size) * slot_width;
  }

  // Asks for a key's row before it is needed: rows of one head lie too far apart for the processor to foresee.
  void fetch(const T* cache, int64_t key) const {
    if (begin + key >= end) return;
    const char* row = reinterpret_cast<const char*>(at(cache, begin + key));
    for (int64_t offset = 0; offset < head_dim * static_cast<int64_t>(sizeof(T)); offset += kLineBytes) {
      __builtin_prefetch(row + offset);
    }
  }
};

// Turns scores into e^(score - largest); returns their sum.
float exponentiate(float* scores, int64_t size) {
  float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < size; ++i) largest = scores[i] > largest ? scores[i] : largest;
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) {
    scores[i] = exponential(scores[i] - largest);
    sum += scores[i];
  }
  return sum;
}

// softmax(q k / sqrt(H)) v for the query heads [G, H] of one KV head, each key and value read once.
template <typename T>
void attend(const Context<T>& context, const T* q_GH, T* out_GH, int64_t group) {
  const int64_t head_dim = context.head_dim, num_keys = context.end - context.begin;
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  std::vector<float> q(q_GH, q_GH + group * head_dim), scores(group * num_keys), sums(group * head_dim), row(head_dim);
  for (int64_t key = 0; key < num_keys; ++key) {
    const T* k_H = context.at(context.k, context.begin + key);
    context.fetch(context.k, key + kAhead);
    context.fetch(context.v, key);
    for (int64_t i = 0; i < head_dim; ++i) row[i] = static_cast<float>(k_H[i]);
    for (int64_t head = 0; head < group; ++head) {
      scores[head * num_keys + key] = scale * dot(q.data() + head * head_dim, row.data(), head_dim);
    }
  }
  std::vector<float> totals(group);
  for (int64_t head = 0; head < group; ++head) totals[head] = exponentiate(scores.data() + head * num_keys, num_keys);
  for (int64_t key = 0; key < num_keys; ++key) {
    const T* v_H = context.at(context.v, context.begin + key);
    for (int64_t i = 0; i < head_dim; ++i) row[i] = static_cast<float>(v_H[i]);
    for (int64_t head = 0; head < group; ++head) {
      const float share = scores[head * num_keys + key];
      float* sum_H = sums.data() + head * head_dim;
      for (int64_t i = 0; i < head_dim; ++i) sum_H[i] += share * row[i];
    }
  }
  for (int64_t i = 0; i < group * head_dim; ++i) {
    out_GH[i] = static_cast<T>(num_keys > 0 ? sums[i] / totals[i / head_dim] : 0.0f);
  }
}

// Threads share out requests and KV heads: a row's bits do not depend on the rest of the batch.
void paged_decode(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables,
    const Tensor& context_lens, const Tensor& out, std::optional<int64_t> window) {
  check_contiguous(k_cache);
  check_contiguous(v_cache);
  const int64_t num_heads = q.size(1), head_dim = q.size(2), num_kv_heads = k_cache.size(2);
  const int64_t group = num_heads / num_kv_heads, block_size = k_cache.size(1), slot_width = num_kv_heads * head_dim;
  STD_TORCH_CHECK(q.stride(1) == head_dim && out.stride(1) == head_dim, "the heads of a row lie side by side");
  const int64_t longest = block_tables.size(1) * block_size;
  by_dtype(q, [&](auto zero) {
    using T = decltype(zero);
    for_rows(q.size(0) * num_kv_heads, 2 * group * head_dim * std::min(longest, window.value_or(longest)), [&](int64_t item) {
      const int64_t request = item / num_kv_heads, kv_head = item % num_kv_heads;
      const int64_t end = data<int64_t>(context_lens)[request];
      const Context<T> context{
          .k = data<T>(k_cache) + kv_head * head_dim,
          .v = data<T>(v_cache) + kv_head * head_dim,
          .blocks = data<int64_t>(block_tables) + request * block_tables.stride(0),
          .block_size = block_size,
          .slot_width = slot_width,
          .begin = std::max<int64_t>(0, end - window.value_or(end)),
          .end = end,
          .head_dim = head_dim};
      const int64_t head = kv_head * group;
      attend(
          context, data<T>(q) + request * q.stride(0) + head * head_dim,
          mutable_data<T>(out) + request * out.stride(0) + head * head_dim, group);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY(reference_engine_cpu, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("add_norm(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor)");
  library.def(
      "norm_rotate(Tensor qkv, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, float eps, int num_heads, "
      "int num_kv_heads, bool keeps_normed=False) -> (Tensor, Tensor)");
  library.def("linear_row(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def("silu_mul(Tensor gate_up) -> Tensor");
  library.def("store_kv(Tensor k, Tensor v, Tensor slots, Tensor(a!) k_cache, Tensor(b!) v_cache) -> ()");
  library.def(
      "paged_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor context_lens, "
      "Tensor(a!) out, *, int? window=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(reference_engine_cpu, CPU, library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("add_norm", TORCH_BOX(&add_norm));
  library.impl("norm_rotate", TORCH_BOX(&norm_rotate));
  library.impl("linear_row", TORCH_BOX(&linear_row));
  library.impl("silu_mul", TORCH_BOX(&silu_mul));
  library.impl("store_kv", TORCH_BOX(&store_kv));
  library.impl("paged_decode", TORCH_BOX(&paged_decode));
}
