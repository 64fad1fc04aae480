// The CUDA kernels: one launch a layer; a thread block per piece (the part of a range that lies in one KV block).
// Records lie in pinned host memory, which unified addressing lets kernels use as it is, or in a buffer on the device.
// Free of torch headers: compiles wherever nvcc is, also without a GPU.
#include <cuda_runtime.h>

#include "transfer.h"
#include "transfer_vector.h"

namespace daric {

constexpr int kThreads = 256;

template <class S, class T, int kWidth, int kOp>
__global__ void __launch_bounds__(kThreads) transfer_kernel(const Job job) {
  const Piece piece = job.pieces[blockIdx.x];
  const int64_t items = items_per_piece<kWidth>(job, piece, kOp);
  // Neighbouring threads take neighbouring 16-byte words of the record: whole PCIe transactions, and coalesced rows.
  const int64_t stride = static_cast<int64_t>(gridDim.y) * kThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x; item < items; item += stride) {
    move_item<S, T, kWidth, kOp>(job, piece, item);
  }
}

struct Launcher {
  cudaStream_t stream;
  template <class S, class T, int kWidth, int kOp>
  int run(const Job& job) const {
    const int64_t most = 2 * job.block_size * job.num_kv_heads * items_per_row<kWidth>(job);
    const int64_t wanted = (most + 4 * kThreads - 1) / (4 * kThreads);  // about four items a thread
    const dim3 grid(static_cast<unsigned>(job.num_pieces), static_cast<unsigned>(wanted < 64 ? wanted : 64));
    transfer_kernel<S, T, kWidth, kOp><<<grid, kThreads, 0, stream>>>(job);
    return cudaPeekAtLastError() == cudaSuccess ? 0 : 1;
  }
};

// This library has a CUDA runtime of its own, whose current device is not torch's.
struct DeviceGuard {
  int before = 0;
  explicit DeviceGuard(int device) {
    cudaGetDevice(&before);
    cudaSetDevice(device);
  }
  ~DeviceGuard() { cudaSetDevice(before); }
  DeviceGuard(const DeviceGuard&) = delete;
};

}  // namespace daric

// Enqueues one layer on `stream` of `device`. All pointers of `job` are device pointers; the records' addresses are that
// or pinned host memory. `host_ranges` is a host copy of job->ranges. Returns 0; 1 after a CUDA error (see
// daric_cuda_error); 2 for a job that the kernels do not take.
DARIC_EXPORT int daric_transfer_cuda(const daric::Job* job, const daric::Range* host_ranges, int64_t num_ranges,
                                     int64_t op, int device, void* stream) {
  if (job->num_pieces == 0) return 0;
  const int width = daric::pick_width(*job, host_ranges, num_ranges, op);
  if (width == 0) return 2;
  const daric::DeviceGuard guard(device);
  return daric::dispatch(daric::Launcher{static_cast<cudaStream_t>(stream)}, *job, op, width);
}

// Sets pinned[i] to whether kernels can use record i where it is: page-locked, and mapped at the same address.
DARIC_EXPORT void daric_pinned(const daric::Range* ranges, int64_t num_ranges, bool* pinned) {
  for (int64_t i = 0; i < num_ranges; ++i) {
    void* address = reinterpret_cast<void*>(ranges[i].record_address);
    cudaPointerAttributes attributes;
    const bool known = cudaPointerGetAttributes(&attributes, address) == cudaSuccess;
    if (!known) cudaGetLastError();  // clears it
    pinned[i] = known && attributes.type == cudaMemoryTypeHost && attributes.devicePointer == address;
  }
}

DARIC_EXPORT const char* daric_cuda_error() { return cudaGetErrorString(cudaGetLastError()); }

DARIC_EXPORT int64_t daric_interface() { return daric::kInterface; }
