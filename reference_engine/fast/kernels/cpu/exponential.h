// e^x as a sweep of vectors.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

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

}  // namespace
