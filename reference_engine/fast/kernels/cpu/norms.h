// Norms, rotary embedding and SiLU: what a layer does to each row by itself.

#pragma once

#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "exponential.h"
#include "tensors.h"

namespace {

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

}  // namespace
