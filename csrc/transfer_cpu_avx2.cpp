// The kernels for AVX2 + F16C, in a library that still loads on CPUs without them: transfer_cpu.cpp asks the CPU first.
// Headers come before the pragma, so that no inline function of the standard library is compiled for AVX2.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>
#include <new>

#include "transfer.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif

#include "numeric.h"

#define DARIC_ISA avx2
#define DARIC_AVX2
#include "transfer_cpu_kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
