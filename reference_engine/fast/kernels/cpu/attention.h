// K and V are stored in their slots, and attention of decoding requests reads them there, through the block table.

#pragma once

#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "exponential.h"
#include "tensors.h"
#include "vectors.h"

namespace {

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

// Where the keys and values of one request lie, found through its block table.
template <typename T>
struct Context {
  const T *k_cache, *v_cache;
  const int64_t* blocks;
  int64_t block_size, slot_width, begin, end;

  // The row of a key, counted from the first that is seen, at some offset in it.
  const T* row(const T* cache, int64_t key, int64_t offset) const {
    const int64_t position = begin + key;
    return cache + (blocks[position / block_size] * block_size + position % block_size) * slot_width + offset;
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

// softmax(q k / sqrt(H)) v of one request, for KV heads that lie side by side and the query heads [G, H] of each.
//
// Key by key, so that the heads' rows are read in the order in which they lie in memory.
template <typename T>
class Attention {
 public:
  Attention(const Context<T>& context, int64_t head_dim, int64_t group, int64_t first_head, int64_t num_heads)
      : context_(context), head_dim_(head_dim), stride_(whole_pairs(head_dim)), group_(group), offset_(first_head * head_dim),
        num_heads_(num_heads), num_keys_(context.end - context.begin), scores_(num_heads * group * num_keys_),
        wide_(num_heads * group * stride_) {}

  // q and out: [heads, G, H].
  void run(const T* q, T* out) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim_));
    const int64_t num_rows = num_heads_ * group_;
    for (int64_t row = 0; row < num_rows; ++row) widen(q + row * head_dim_, wide_.data() + row * stride_, head_dim_);
    for (int64_t key = 0; key < num_keys_; ++key) score(key, scale);
    std::vector<float> totals(num_rows);
    for (int64_t row = 0; row < num_rows; ++row) totals[row] = exponentiate(scores_.data() + row * num_keys_, num_keys_);
    std::fill(wide_.begin(), wide_.end(), 0.0f);
    int64_t key = 0;
    for (; key + kKeys <= num_keys_; key += kKeys) add_values<kKeys>(key);
    for (; key < num_keys_; ++key) add_values<1>(key);
    for (int64_t row = 0; row < num_rows; ++row) {
      float* sums = wide_.data() + row * stride_;
      const float total = num_keys_ > 0 ? totals[row] : 1.0f;
      for (int64_t i = 0; i < stride_; ++i) sums[i] /= total;
      narrow(sums, out + row * head_dim_, head_dim_);
    }
  }

 private:
  // Values that are added at once: a sum is then loaded and stored once for all of them.
  static constexpr int64_t kKeys = 4;

  Pair load_part(const T* from, int64_t i) const {
    return i + kPair <= head_dim_ ? load_pair(from + i) : load_tail(from + i, head_dim_ - i);
  }

  void score(int64_t key, float scale) {
    const T* k = context_.row(context_.k_cache, key, offset_);
    for (int64_t head = 0; head < num_heads_; ++head, k += head_dim_) {
      for (int64_t row = head * group_; row < (head + 1) * group_; ++row) {
        Vector first = zero(), second = zero();
        for (int64_t i = 0; i < stride_; i += kPair) {
          const Pair own = load_part(k, i);
          const float* q = wide_.data() + row * stride_ + i;
          first = add_product(first, load(q), own.first);
          second = add_product(second, load(q + kLanes), own.second);
        }
        scores_[row * num_keys_ + key] = scale * sum(add(first, second));
      }
    }
  }

  template <int64_t kCount>
  void add_values(int64_t key) {
    const T* rows[kCount];
    for (int64_t n = 0; n < kCount; ++n) rows[n] = context_.row(context_.v_cache, key + n, offset_);
    for (int64_t head = 0; head < num_heads_; ++head) {
      for (int64_t i = 0; i < stride_; i += kPair) {
        Pair v[kCount];
        for (int64_t n = 0; n < kCount; ++n) v[n] = load_part(rows[n] + head * head_dim_, i);
        for (int64_t row = head * group_; row < (head + 1) * group_; ++row) {
          float* to = wide_.data() + row * stride_ + i;
          Vector first = load(to), second = load(to + kLanes);
          for (int64_t n = 0; n < kCount; ++n) {
            const Vector share = fill(scores_[row * num_keys_ + key + n]);
            first = add_product(first, share, v[n].first);
            second = add_product(second, share, v[n].second);
          }
          store(to, first);
          store(to + kLanes, second);
        }
      }
    }
  }

  const Context<T>& context_;
  const int64_t head_dim_, stride_, group_, offset_, num_heads_, num_keys_;
  // [heads, G, keys].
  std::vector<float> scores_;
  // [heads, G, H]: queries, then sums.
  std::vector<float> wide_;
};

// Of q and out [T, N, H] the first rows are used, one for each request. Threads share out requests and KV heads: a row's bits do not depend on the rest of the batch.
void paged_decode(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables,
    const Tensor& context_lens, const Tensor& out, std::optional<int64_t> window) {
  check_contiguous(k_cache);
  check_contiguous(v_cache);
  const int64_t num_heads = q.size(1), head_dim = q.size(2), num_kv_heads = k_cache.size(2);
  const int64_t group = num_heads / num_kv_heads, block_size = k_cache.size(1), slot_width = num_kv_heads * head_dim;
  STD_TORCH_CHECK(q.stride(1) == head_dim && out.stride(1) == head_dim, "the heads of a row lie side by side");
  const int64_t longest = block_tables.size(1) * block_size;
  const int64_t item_elements = 2 * group * head_dim * std::min(longest, window.value_or(longest));
  by_dtype(q, [&](auto zero) {
    using T = decltype(zero);
    for_ranges(context_lens.size(0) * num_kv_heads, item_elements, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end;) {
        const int64_t request = item / num_kv_heads, head = item % num_kv_heads;
        const int64_t num_own = std::min(num_kv_heads - head, end - item);
        const int64_t context_len = data<int64_t>(context_lens)[request];
        const Context<T> context{
            .k_cache = data<T>(k_cache),
            .v_cache = data<T>(v_cache),
            .blocks = data<int64_t>(block_tables) + request * block_tables.stride(0),
            .block_size = block_size,
            .slot_width = slot_width,
            .begin = std::max<int64_t>(0, context_len - window.value_or(context_len)),
            .end = context_len};
        const int64_t offset = head * group * head_dim;
        Attention<T>(context, head_dim, group, head, num_own)
            .run(data<T>(q) + request * q.stride(0) + offset, mutable_data<T>(out) + request * out.stride(0) + offset);
        item += num_own;
      }
    });
  });
}

}  // namespace
