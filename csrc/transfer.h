// One transfer of one layer, as the CPU and CUDA kernels receive it, and the index arithmetic that they share.
// Free of torch headers: both kernel libraries have a plain C interface.
#pragma once

#include <cstdint>

#define DARIC_EXPORT extern "C" __attribute__((visibility("default")))

#ifdef __CUDACC__
#define DARIC_HD __host__ __device__ __forceinline__
#else
#define DARIC_HD inline __attribute__((always_inline))
#endif

namespace daric {

enum Dtype : int64_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };
enum Op : int64_t { kScatter = 0, kGather = 1, kRotate = 2 };

// A row of TransferPlan.ranges.
struct Range {
  int64_t record_address, record_tokens, src_token_start, num_tokens, dst_token_start, block_table_offset, rope_row;
};

// A row of TransferPlan.pieces: the part of a range that lies in one block.
struct Piece {
  int64_t range, block, begin, end, first_token;
};

// Order of (token, dim) in a K or V area: see PackedOrder in kv_layout.py. `tile` 0: use `offsets`.
struct Order {
  const int32_t* offsets;
  int64_t tile, pair, tile_stride;
};

// Mirrored field by field by `Job` in engine/worker/transfer/kernels.py.
struct Job {
  void* cache;
  const Range* ranges;
  const Piece* pieces;
  Order key, value;
  const float* cos;
  const float* sin;
  int64_t num_pieces, layer;
  int64_t block_stride, head_stride, value_offset;  // in elements
  int64_t num_kv_heads, block_size, head_dim;
  int64_t rotary_dim, neox;
  int64_t storage_dtype, cache_dtype;
};

// What the Python side compares before it trusts a library: raise the version when the meaning of a field changes.
constexpr int64_t kInterface = 1 * 4096 + sizeof(Job);

DARIC_HD int64_t dtype_size(int64_t dtype) { return dtype == kFloat32 ? 4 : 2; }

// Byte address of dim 0 of one head of one token in a record [layers, 2, tokens, heads, head_dim].
DARIC_HD char* record_row(const Job& job, const Range& range, int64_t token, int64_t is_value, int64_t head) {
  int64_t row = (job.layer * 2 + is_value) * range.record_tokens + range.src_token_start + token;
  int64_t element = (row * job.num_kv_heads + head) * job.head_dim;
  return reinterpret_cast<char*>(range.record_address) + element * dtype_size(job.storage_dtype);
}

// Offset in elements of the K (V) area of one (block, head) in the cache.
DARIC_HD int64_t area_offset(const Job& job, const Piece& piece, int64_t is_value, int64_t head) {
  return piece.block * job.block_stride + head * job.head_stride + is_value * job.value_offset;
}

}  // namespace daric
