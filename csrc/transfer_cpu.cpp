// C interface of the CPU kernels: picks the instruction set once and shares the work out over OpenMP threads.
#include <exception>

#include "transfer.h"
#include "transfer_vector.h"

namespace daric {
namespace baseline {
void run(const Job& job, int64_t op, int64_t first, int64_t last);
}
#if defined(__x86_64__)
namespace avx2 {
void run(const Job& job, int64_t op, int64_t first, int64_t last);
}
#endif

using Run = void (*)(const Job&, int64_t, int64_t, int64_t);

static Run pick(int64_t isa) {
#if defined(__x86_64__)
  if (isa != 0 && __builtin_cpu_supports("avx2")) return avx2::run;
#endif
  return baseline::run;
}

struct ItemRunner {
  int64_t op;
  template <class S, class T, int kWidth, int kOp>
  int run(const Job& job) const {
    for (int64_t i = 0; i < job.num_pieces; ++i) {
      const int64_t items = items_per_piece<kWidth>(job, job.pieces[i], op);
      for (int64_t item = 0; item < items; ++item) move_item<S, T, kWidth, kOp>(job, job.pieces[i], item);
    }
    return 0;
  }
};

}  // namespace daric

// Returns 0, or 1 if memory for scratch ran out. `isa`: 0 baseline, 1 the best this CPU has.
DARIC_EXPORT int daric_transfer_cpu(const daric::Job* job, int64_t op, int64_t threads, int64_t isa) {
  const daric::Run run = daric::pick(isa);
  const int64_t pieces = job->num_pieces;
  const int64_t piece_bytes = job->block_size * job->num_kv_heads * job->head_dim * 2 * daric::dtype_size(job->cache_dtype);
  const int64_t worth = pieces * piece_bytes / (64 * 1024);  // waking a thread costs more than moving 64 KiB
  const int64_t workers = threads < 1 || worth <= 1 ? 1 : (threads < worth ? threads : worth);
  int failed = 0;
#pragma omp parallel for num_threads(workers) schedule(static) reduction(| : failed) if (workers > 1)
  for (int64_t worker = 0; worker < workers; ++worker) {
    try {
      run(*job, op, pieces * worker / workers, pieces * (worker + 1) / workers);
    } catch (const std::exception&) {
      failed |= 1;
    }
  }
  return failed;
}

// The CUDA kernel's work items, one after another on the CPU: how its index arithmetic is tested without a GPU.
// Returns 2 for a job that the CUDA kernels do not take.
DARIC_EXPORT int daric_transfer_items(const daric::Job* job, int64_t num_ranges, int64_t op) {
  const int width = daric::pick_width(*job, job->ranges, num_ranges, op);
  return width == 0 ? 2 : daric::dispatch(daric::ItemRunner{op}, *job, op, width);
}

DARIC_EXPORT int64_t daric_interface() { return daric::kInterface; }
