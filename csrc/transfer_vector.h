// The CUDA kernel's body as host/device functions: vectors of kWidth elements, moved as 16-byte words.
//
// A work item is one vector of one head of one token, keys or values. With NeoX rotation the two dims of a pair lie
// rotary_dim / 2 apart, so an item then takes two vectors: items [0, rotary_dim / 2 / kWidth) of a row are such pairs,
// the rest of the row (partial rotary) are single vectors.
#pragma once

#include <initializer_list>

#include "numeric.h"
#include "transfer.h"

namespace daric {

template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth < 16 ? sizeof(T) * kWidth : 16) Vector {
  T at[kWidth];
};

template <class T, int kWidth>
DARIC_HD void load(const T* source, float (&values)[kWidth]) {
  Vector<T, kWidth> vector = *reinterpret_cast<const Vector<T, kWidth>*>(source);
  for (int i = 0; i < kWidth; ++i) values[i] = to_float(vector.at[i]);
}

template <class T, int kWidth>
DARIC_HD void store(const float (&values)[kWidth], T* target) {
  Vector<T, kWidth> vector;
  for (int i = 0; i < kWidth; ++i) from_float(values[i], vector.at[i]);
  *reinterpret_cast<Vector<T, kWidth>*>(target) = vector;
}

// Products and sums are rounded one by one on every device, so that CPU and GPU agree to the bit.
DARIC_HD float product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

DARIC_HD float sum(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

DARIC_HD void rotate_pair(float& x, float& y, float cos, float sin) {
  float new_x = sum(product(x, cos), -product(y, sin));
  y = sum(product(y, cos), product(x, sin));
  x = new_x;
}

DARIC_HD int64_t paired_dims(const Job& job) { return job.neox ? job.rotary_dim / 2 : 0; }

template <int kWidth>
DARIC_HD int64_t items_per_row(const Job& job) {
  return (job.head_dim - paired_dims(job)) / kWidth;
}

// Items of one piece: keys of all its tokens and heads, then (unless rotating in place) values.
template <int kWidth>
DARIC_HD int64_t items_per_piece(const Job& job, const Piece& piece, int64_t op) {
  return (op == kRotate ? 1 : 2) * (piece.end - piece.begin) * job.num_kv_heads * items_per_row<kWidth>(job);
}

template <class S, class T, int kWidth, int kOp>
DARIC_HD void move_item(const Job& job, const Piece& piece, int64_t item) {
  const int64_t per_row = items_per_row<kWidth>(job), paired = paired_dims(job);
  const int64_t vector = item % per_row, head = item / per_row % job.num_kv_heads;
  const int64_t row = item / per_row / job.num_kv_heads, tokens = piece.end - piece.begin;
  const int64_t is_value = row / tokens, token = row % tokens;
  const Range& range = job.ranges[piece.range];
  const bool turn = kOp != kGather && !is_value && range.rope_row >= 0;
  if (kOp == kRotate && !turn) return;

  const bool is_pair = vector * kWidth < paired;
  const int64_t dim = is_pair ? vector * kWidth : vector * kWidth + paired;
  const Order& order = is_value ? job.value : job.key;
  T* slot = static_cast<T*>(job.cache) + area_offset(job, piece, is_value, head) +
            (piece.begin + token) * order.tile_stride + dim;
  S* record = nullptr;
  if (kOp != kRotate) {
    record = reinterpret_cast<S*>(record_row(job, range, piece.first_token + token, is_value, head)) + dim;
  }

  float x[kWidth], y[kWidth] = {};
  if (kOp == kScatter) {
    load<S, kWidth>(record, x);
    if (is_pair) load<S, kWidth>(record + paired, y);
  } else {
    load<T, kWidth>(slot, x);
    if (is_pair) load<T, kWidth>(slot + paired, y);
  }
  if (turn && dim < job.rotary_dim) {
    const int64_t half = job.rotary_dim / 2, row_start = range.rope_row * half;
    if (is_pair) {
      for (int i = 0; i < kWidth; ++i)
        rotate_pair(x[i], y[i], job.cos[row_start + dim + i], job.sin[row_start + dim + i]);
    } else {
      for (int i = 0; i + 1 < kWidth; i += 2) {
        const int64_t pair = row_start + (dim + i) / 2;
        if (dim + i < job.rotary_dim) rotate_pair(x[i], x[i + 1], job.cos[pair], job.sin[pair]);
      }
    }
  }
  if (kOp == kGather) {
    store<S, kWidth>(x, record);
    if (is_pair) store<S, kWidth>(y, record + paired);
  } else {
    store<T, kWidth>(x, slot);
    if (is_pair) store<T, kWidth>(y, slot + paired);
  }
}

// Calls run<S, T, kWidth, kOp>(job) of `runner` for the job's dtypes; returns what it returns.
template <class Runner, class S, class T, int kWidth>
int dispatch_op(const Runner& runner, const Job& job, int64_t op) {
  if (op == kScatter) return runner.template run<S, T, kWidth, kScatter>(job);
  if (op == kGather) return runner.template run<S, T, kWidth, kGather>(job);
  return runner.template run<T, T, kWidth, kRotate>(job);
}

template <class Runner, class S, class T>
int dispatch_width(const Runner& runner, const Job& job, int64_t op, int width) {
  if (width == 8) return dispatch_op<Runner, S, T, 8>(runner, job, op);
  if (width == 4) return dispatch_op<Runner, S, T, 4>(runner, job, op);
  return dispatch_op<Runner, S, T, 2>(runner, job, op);
}

template <class Runner, class T>
int dispatch_storage(const Runner& runner, const Job& job, int64_t op, int width) {
  if (job.storage_dtype == kFloat32) return dispatch_width<Runner, float, T>(runner, job, op, width);
  if (job.storage_dtype == kFloat16) return dispatch_width<Runner, Half, T>(runner, job, op, width);
  return dispatch_width<Runner, BFloat16, T>(runner, job, op, width);
}

template <class Runner>
int dispatch(const Runner& runner, const Job& job, int64_t op, int width) {
  if (job.cache_dtype == kFloat32) return dispatch_storage<Runner, float>(runner, job, op, width);
  if (job.cache_dtype == kFloat16) return dispatch_storage<Runner, Half>(runner, job, op, width);
  return dispatch_storage<Runner, BFloat16>(runner, job, op, width);
}

inline bool divides(int64_t divisor, int64_t number) { return number % divisor == 0; }

inline bool is_aligned(int64_t address, int64_t bytes) { return divides(bytes < 16 ? bytes : 16, address); }

inline bool width_fits(const Job& job, const Range* ranges, int64_t num_ranges, int64_t op, int64_t width) {
  for (int64_t length : {job.head_dim, paired_dims(job), job.block_stride, job.head_stride, job.value_offset,
                         job.key.tile_stride, job.value.tile_stride})
    if (!divides(width, length)) return false;
  if (!is_aligned(reinterpret_cast<int64_t>(job.cache), width * dtype_size(job.cache_dtype))) return false;
  for (int64_t i = 0; op != kRotate && i < num_ranges; ++i)
    if (!is_aligned(ranges[i].record_address, width * dtype_size(job.storage_dtype))) return false;
  return true;
}

// Elements a vector: 16 bytes of the narrower dtype if all strides and addresses allow it, less otherwise. 0: this job
// cannot be cut into vectors at all. `ranges` are the job's ranges in host memory (on a GPU, job.ranges are not).
inline int pick_width(const Job& job, const Range* ranges, int64_t num_ranges, int64_t op) {
  if (job.key.tile != 1 || job.value.tile != 1) return 0;
  const bool both_wide = job.storage_dtype == kFloat32 && job.cache_dtype == kFloat32;
  for (int width : {8, 4, 2})
    if (!(both_wide && width == 8) && width_fits(job, ranges, num_ranges, op, width)) return width;
  return 0;
}

}  // namespace daric
