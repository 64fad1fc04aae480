// float16 / bfloat16 <-> float32 with round to nearest even, bit for bit what torch does.
#pragma once

#include <cstdint>
#include <cstring>

#include "transfer.h"

#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

namespace daric {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

DARIC_HD uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

DARIC_HD float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

DARIC_HD float to_float(float value) { return value; }

DARIC_HD float to_float(BFloat16 value) { return bits_float(static_cast<uint32_t>(value.bits) << 16); }

DARIC_HD float to_float(Half value) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(value.bits));
#else
  uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  uint32_t rest = static_cast<uint32_t>(value.bits & 0x7FFF) << 13;
  if (rest >= 0x0F800000) return bits_float(sign | (rest + 0x70000000));  // infinity, NaN
  // The exponent bias differs by 112; multiplying by 2^112 also normalises subnormals.
  return bits_float(sign | float_bits(bits_float(rest) * bits_float(0x77800000)));
#endif
}

DARIC_HD void from_float(float value, float& out) { out = value; }

DARIC_HD void from_float(float value, BFloat16& out) {
  uint32_t bits = float_bits(value);
  uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  out.bits = static_cast<uint16_t>(is_nan ? 0x7FC0 : rounded);
}

DARIC_HD void from_float(float value, Half& out) {
#ifdef __CUDA_ARCH__
  out.bits = __half_as_ushort(__float2half_rn(value));
#else
  uint32_t bits = float_bits(value);
  uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) {
    out.bits = static_cast<uint16_t>(sign | 0x7E00);
  } else if (magnitude >= 0x477FF000) {  // rounds to 65520 or more
    out.bits = static_cast<uint16_t>(sign | 0x7C00);
  } else if (magnitude < 0x38800000) {  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    out.bits = static_cast<uint16_t>(sign | (float_bits(bits_float(magnitude) + 0.5f) - 0x3F000000));
  } else {
    uint32_t odd = (magnitude >> 13) & 1;
    out.bits = static_cast<uint16_t>(sign | ((magnitude - 0x38000000 + 0xFFF + odd) >> 13));
  }
#endif
}

}  // namespace daric
