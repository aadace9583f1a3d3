// A register of float32 numbers, as wide as the instructions that the file is compiled for, and how 16 bits get there.

#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)

using Vector = __m512;
constexpr int64_t kLanes = 16;

inline Vector zero() { return _mm512_setzero_ps(); }
inline Vector fill(float x) { return _mm512_set1_ps(x); }
inline Vector load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Vector x) { _mm512_storeu_ps(to, x); }
inline Vector add(Vector x, Vector y) { return _mm512_add_ps(x, y); }
inline Vector add_product(Vector sum, Vector x, Vector y) { return _mm512_fmadd_ps(x, y, sum); }
inline float sum(Vector x) { return _mm512_reduce_add_ps(x); }

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

using Vector = __m256;
constexpr int64_t kLanes = 8;

inline Vector zero() { return _mm256_setzero_ps(); }
inline Vector fill(float x) { return _mm256_set1_ps(x); }
inline Vector load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Vector x) { _mm256_storeu_ps(to, x); }
inline Vector add(Vector x, Vector y) { return _mm256_add_ps(x, y); }
inline Vector add_product(Vector sum, Vector x, Vector y) { return _mm256_fmadd_ps(x, y, sum); }
inline float sum(Vector x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

#else

constexpr int64_t kLanes = 8;
struct Vector {
  float lanes[kLanes];
};

inline Vector zero() { return {}; }
inline Vector fill(float x) {
  Vector filled;
  std::fill(filled.lanes, filled.lanes + kLanes, x);
  return filled;
}
inline Vector load(const float* from) {
  Vector x;
  std::copy(from, from + kLanes, x.lanes);
  return x;
}
inline void store(float* to, const Vector& x) { std::copy(x.lanes, x.lanes + kLanes, to); }
inline Vector add(Vector x, const Vector& y) {
  for (int64_t i = 0; i < kLanes; ++i) x.lanes[i] += y.lanes[i];
  return x;
}
inline Vector add_product(Vector sum, const Vector& x, const Vector& y) {
  for (int64_t i = 0; i < kLanes; ++i) sum.lanes[i] += x.lanes[i] * y.lanes[i];
  return sum;
}
inline float sum(const Vector& x) {
  float total = 0;
  for (float lane : x.lanes) total += lane;
  return total;
}

#endif

constexpr int64_t kPair = 2 * kLanes;

// 2 * kLanes neighbours of a row, in an order that depends on their dtype alone: that of a dot product is free.
struct Pair {
  Vector first, second;
};

inline Pair load_pair(const float* from) { return {load(from), load(from + kLanes)}; }

// Where `load_pair` puts the elements of a row: side by side, or bfloat16's even ones first.
template <typename T>
constexpr bool kSplitsEvenAndOdd = false;

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
template <>
constexpr bool kSplitsEvenAndOdd<c10::BFloat16> = true;
#endif

#if defined(__AVX512F__)

// bfloat16 is the upper half of float32. Even elements are shifted up, odd ones are where they belong.
inline Pair load_pair(const c10::BFloat16* from) {
  const __m512i both = _mm512_loadu_si512(from);
  const __m512i odd = _mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), _mm512_castsi512_ps(odd)};
}
inline Pair load_pair(const c10::Half* from) {
  const auto* halves = reinterpret_cast<const __m256i*>(from);
  return {_mm512_cvtph_ps(_mm256_loadu_si256(halves)), _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1))};
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

inline Pair load_pair(const c10::BFloat16* from) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m256i odd = _mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)), _mm256_castsi256_ps(odd)};
}
inline Pair load_pair(const c10::Half* from) {
  const auto* halves = reinterpret_cast<const __m128i*>(from);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}

#else

template <typename T>
Pair load_pair(const T* from) {
  Pair pair;
  for (int64_t i = 0; i < kLanes; ++i) {
    pair.first.lanes[i] = static_cast<float>(from[i]);
    pair.second.lanes[i] = static_cast<float>(from[i + kLanes]);
  }
  return pair;
}

#endif

// The same of the last `size` elements of a row, and zeros.
template <typename T>
Pair load_tail(const T* from, int64_t size) {
  T padded[kPair] = {};
  std::copy(from, from + size, padded);
  return load_pair(static_cast<const T*>(padded));
}

inline int64_t whole_pairs(int64_t size) { return (size + kPair - 1) / kPair * kPair; }

// A row in float32, in the order of `load_pair`, filled up with zeros to whole pairs.
template <typename T>
void widen(const T* row, float* wide, int64_t size) {
  for (int64_t i = 0; i < size; i += kPair) {
    const Pair pair = i + kPair <= size ? load_pair(row + i) : load_tail(row + i, size - i);
    store(wide + i, pair.first);
    store(wide + i + kLanes, pair.second);
  }
}

// The other way around, rounded.
template <typename T>
void narrow(const float* wide, T* row, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    const int64_t place = i % kPair;
    row[i] = static_cast<T>(wide[kSplitsEvenAndOdd<T> ? i - place + place / 2 + place % 2 * kLanes : i]);
  }
}

}  // namespace
