// x W^T of few rows, W as a checkpoint holds it: [O, I], one row for each output.
//
// Each product is a dot product of two rows, summed in one vector from the first input to the last, and rounded once.
// So its bits depend on no other row, nor on how rows, outputs and threads share the work. With few rows the time is
// that of reading the weights: each is read once, widened to float32 on the way into the first cache, and the next ones
// are asked for meanwhile.
//
// Shapes: T rows, I inputs, P inputs filled up to whole pairs, O outputs.

#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <type_traits>

#include "tensors.h"
#include "vectors.h"

namespace {

#if defined(__AVX512F__)
constexpr int64_t kTileRows = 4, kTileOutputs = 6;  // sums in 24 of 32 registers
#else
constexpr int64_t kTileRows = 4, kTileOutputs = 3;  // sums in 12 of 16
#endif
// The way to compute a single row, in which machines differ: outputs that are computed at once, each a stream of weights,
// and whether the weights of the next ones are asked for. The products are the same bits in each.
struct RowWay {
  int64_t num_outputs;
  bool asks_ahead;
};
constexpr int64_t kMostRowOutputs = 8;
// Rows of x that stay in the second cache while weights go by.
constexpr int64_t kBlockRows = 32;
// Outputs that a thread takes at once; whoever is done first takes the next.
constexpr int64_t kChunkOutputs = 48;
static_assert(kBlockRows % kTileRows == 0 && kChunkOutputs % kTileOutputs == 0 && kChunkOutputs % kMostRowOutputs == 0);

// Asks for `size` bytes at `from`; that they lie behind the end of an array is no error.
inline void prefetch(const void* from, int64_t size) {
  for (int64_t offset = 0; offset < size; offset += kLineBytes) {
    __builtin_prefetch(static_cast<const char*>(from) + offset);
  }
}

// Rows of weights that are read next, of which each tile asks for its share, input by input.
template <typename T>
struct Ahead {
  const T* rows_OI;
  int64_t num_inputs, first, step, end;

  void ask(int64_t input) const {
    for (int64_t o = first; o < end; o += step) prefetch(rows_OI + o * num_inputs + input, kLanes * sizeof(T));
  }
};

// Dot products of one row with kOutputs others.
template <int64_t kOutputs, bool kAsksAhead, typename T>
void dot_row(const float* x_P, const T* weight_OI, int64_t num_inputs, float* products_O) {
  Vector sums[kOutputs];
  for (auto& own : sums) own = zero();
  const auto add_inputs = [&](int64_t i, const auto& load_weights) {
    const Vector first = load(x_P + i), second = load(x_P + i + kLanes);
    for (int64_t o = 0; o < kOutputs; ++o) {
      const Pair own = load_weights(weight_OI + o * num_inputs + i);
      sums[o] = add_product(add_product(sums[o], first, own.first), second, own.second);
    }
  };
  const int64_t num_whole = num_inputs / kPair * kPair, num_left = num_inputs - num_whole;
  for (int64_t i = 0; i < num_whole; i += kPair) {
    add_inputs(i, [&](const T* from) {
      if constexpr (kAsksAhead) prefetch(from + kOutputs * num_inputs, kPair * sizeof(T));
      return load_pair(from);
    });
  }
  if (num_left > 0) add_inputs(num_whole, [&](const T* from) { return load_tail(from, num_left); });
  for (int64_t o = 0; o < kOutputs; ++o) products_O[o] = sum(sums[o]);
}

// Dot products [kRows, kTileOutputs], of which the first kOutputs are computed, of widened rows.
template <int64_t kRows, int64_t kOutputs, typename T>
void dot_tile(const float* x_TP, const float* weight_OP, int64_t stride, const Ahead<T>& ahead, float* products) {
  Vector sums[kRows][kOutputs];
  for (auto& row : sums) {
    for (auto& own : row) own = zero();
  }
  for (int64_t i = 0; i < stride; i += kLanes) {
    ahead.ask(i);
    Vector weights[kOutputs];
    for (int64_t o = 0; o < kOutputs; ++o) weights[o] = load(weight_OP + o * stride + i);
    for (int64_t t = 0; t < kRows; ++t) {
      const Vector x = load(x_TP + t * stride + i);
      for (int64_t o = 0; o < kOutputs; ++o) sums[t][o] = add_product(sums[t][o], x, weights[o]);
    }
  }
  for (int64_t t = 0; t < kRows; ++t) {
    for (int64_t o = 0; o < kOutputs; ++o) products[t * kTileOutputs + o] = sum(sums[t][o]);
  }
}

// The same for up to kRows rows.
template <int64_t kRows, int64_t kOutputs, typename T>
void dot_tile_of(
    int64_t num_rows, const float* x_TP, const float* weight_OP, int64_t stride, const Ahead<T>& ahead, float* products) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return dot_tile_of<kRows - 1, kOutputs>(num_rows, x_TP, weight_OP, stride, ahead, products);
  }
  dot_tile<kRows, kOutputs>(x_TP, weight_OP, stride, ahead, products);
}

template <typename T>
class Product {
 public:
  Product(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& out, RowWay way)
      : way_(way), num_rows_(x.size(0)), num_inputs_(weight.size(1)), num_outputs_(weight.size(0)), stride_(whole_pairs(num_inputs_)),
        weight_OI_(data<T>(weight)), bias_O_(bias.has_value() ? data<T>(*bias) : nullptr), out_TO_(mutable_data<T>(out)),
        wide_TP_(std::make_unique_for_overwrite<float[]>(num_rows_ * stride_)) {
    for_rows(num_rows_, stride_, [&](int64_t row) {
      widen(data<T>(x) + row * num_inputs_, wide_TP_.get() + row * stride_, num_inputs_);
    });
  }

  void run() const {
    const int64_t num_chunks = (num_outputs_ + kChunkOutputs - 1) / kChunkOutputs;
    const int64_t most_threads = std::max<int64_t>(1, num_outputs_ * num_inputs_ / kGrain);
    const int64_t num_threads = std::min<int64_t>(torch::stable::get_num_threads(), most_threads);
    std::atomic<int64_t> next{0};
    torch::stable::parallel_for(0, num_threads, 1, [&](int64_t, int64_t) {
      const auto wide_OP = std::make_unique_for_overwrite<float[]>(num_kept() * stride_);
      for (int64_t chunk = next++; chunk < num_chunks; chunk = next++) {
        const int64_t begin = chunk * kChunkOutputs, end = std::min(num_outputs_, begin + kChunkOutputs);
        if (num_rows_ == 1) compute_row<kMostRowOutputs>(begin, end); else compute_rows(begin, end, wide_OP.get());
      }
    });
  }

 private:
  // Whether weights are rows of whole pairs in float32 as they are.
  bool is_wide() const { return std::is_same_v<T, float> && stride_ == num_inputs_; }

  // Outputs whose widened weights are held at once: those of a chunk, if more than one block of rows will read them.
  int64_t num_kept() const {
    if (is_wide() || num_rows_ == 1) return 0;
    return num_rows_ > kBlockRows ? kChunkOutputs : kTileOutputs;
  }

  // As many outputs at once as the way says, of which there are at most so many.
  template <int64_t kOutputs>
  void compute_row(int64_t begin, int64_t end) const {
    if constexpr (kOutputs > 1) {
      if (way_.num_outputs < kOutputs) return compute_row<kOutputs / 2>(begin, end);
    }
    if (way_.asks_ahead) compute_row_by<kOutputs, true>(begin, end); else compute_row_by<kOutputs, false>(begin, end);
  }

  template <int64_t kOutputs, bool kAsksAhead>
  void compute_row_by(int64_t begin, int64_t end) const {
    float products[kOutputs];
    for (; begin + kOutputs <= end; begin += kOutputs) {
      dot_row<kOutputs, kAsksAhead>(wide_TP_.get(), weight_OI_ + begin * num_inputs_, num_inputs_, products);
      for (int64_t o = 0; o < kOutputs; ++o) write(0, begin + o, products[o]);
    }
    for (; begin < end; ++begin) {
      dot_row<1, kAsksAhead>(wide_TP_.get(), weight_OI_ + begin * num_inputs_, num_inputs_, products);
      write(0, begin, products[0]);
    }
  }

  void compute_rows(int64_t begin, int64_t end, float* wide_OP) const {
    for (int64_t first = 0; first < num_rows_; first += kBlockRows) {
      const int64_t last = std::min(num_rows_, first + kBlockRows);
      for (int64_t o = begin; o < end; o += kTileOutputs) {
        const int64_t num_own = std::min(kTileOutputs, end - o);
        float* kept_OP = wide_OP + (num_kept() == kChunkOutputs ? (o - begin) * stride_ : 0);
        compute_block(first, last, o, num_own, wide_weights(o, num_own, kept_OP, first == 0));
      }
    }
  }

  // Returns the weights of some outputs in float32, in `to` where they are not so themselves.
  const float* wide_weights(int64_t output, int64_t num_own, float* to, bool is_first) const {
    const T* rows_OI = weight_OI_ + output * num_inputs_;
    if constexpr (std::is_same_v<T, float>) {
      if (is_wide()) return rows_OI;
    }
    for (int64_t o = 0; o < num_own && is_first; ++o) widen(rows_OI + o * num_inputs_, to + o * stride_, num_inputs_);
    return to;
  }

  void compute_block(int64_t first, int64_t last, int64_t output, int64_t num_own, const float* weight_OP) const {
    const int64_t num_tiles = (last - first + kTileRows - 1) / kTileRows;
    const T* next_OI = weight_OI_ + (output + kTileOutputs) * num_inputs_;
    float products[kTileRows * kTileOutputs];
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const int64_t row = first + tile * kTileRows, num_rows = std::min(kTileRows, last - row);
      const float* x_TP = wide_TP_.get() + row * stride_;
      if (num_own == kTileOutputs) {
        const Ahead<T> ahead{next_OI, num_inputs_, tile, num_tiles, first == 0 ? kTileOutputs : 0};
        dot_tile_of<kTileRows, kTileOutputs>(num_rows, x_TP, weight_OP, stride_, ahead, products);
      } else {
        for (int64_t o = 0; o < num_own; ++o) {
          dot_tile_of<kTileRows, 1>(num_rows, x_TP, weight_OP + o * stride_, stride_, Ahead<T>{}, products + o);
        }
      }
      for (int64_t t = 0; t < num_rows; ++t) {
        for (int64_t o = 0; o < num_own; ++o) write(row + t, output + o, products[t * kTileOutputs + o]);
      }
    }
  }

  void write(int64_t row, int64_t output, float product) const {
    const float biased = bias_O_ == nullptr ? product : product + static_cast<float>(bias_O_[output]);
    out_TO_[row * num_outputs_ + output] = static_cast<T>(biased);
  }

  const RowWay way_;
  const int64_t num_rows_, num_inputs_, num_outputs_, stride_;
  const T *weight_OI_, *bias_O_;
  T* out_TO_;
  const std::unique_ptr<float[]> wide_TP_;
};

Tensor linear(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t row_outputs, bool asks_ahead) {
  check_contiguous(x);
  check_contiguous(weight);
  Tensor out = torch::stable::new_empty(x, {x.size(0), weight.size(0)});
  by_dtype(x, [&](auto zero) { Product<decltype(zero)>(x, weight, bias, out, {row_outputs, asks_ahead}).run(); });
  return out;
}

}  // namespace
