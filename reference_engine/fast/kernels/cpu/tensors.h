// Torch's tensors as the kernels read them: by dtype, contiguous, rows shared among torch's own threads.

#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstdint>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Elements that one thread should have at least: fewer take less time than waking another thread.
constexpr int64_t kGrain = 16384;
constexpr int64_t kLineBytes = 64;

template <typename Function>
void by_dtype(const Tensor& x, const Function& function) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return function(float{});
    case ScalarType::BFloat16: return function(c10::BFloat16{});
    case ScalarType::Half: return function(c10::Half{});
    default: STD_TORCH_CHECK(false, "reference_engine's kernels take float32, bfloat16 and float16");
  }
}

// Calls function(begin, end) for ranges of rows that threads share out.
template <typename Function>
void for_ranges(int64_t num_rows, int64_t row_elements, const Function& function) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, row_elements));
  if (num_rows <= grain) return function(int64_t{0}, num_rows);
  torch::stable::parallel_for(0, num_rows, grain, function);
}

// Calls function(row) for all rows, shared among threads.
template <typename Function>
void for_rows(int64_t num_rows, int64_t row_elements, const Function& function) {
  for_ranges(num_rows, row_elements, [&](int64_t begin, int64_t end) {
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

}  // namespace
