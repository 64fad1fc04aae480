// The kernels for the compiler's default instruction set (SSE2 on x86-64).
#include <cstring>
#include <new>

#ifdef __SSE2__
#include <immintrin.h>
#endif

#include "numeric.h"
#include "transfer.h"

#define DARIC_ISA baseline
#include "transfer_cpu_kernels.h"
