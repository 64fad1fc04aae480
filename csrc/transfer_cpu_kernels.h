// The CPU kernels. Included once per instruction set by transfer_cpu_*.cpp, which define DARIC_ISA (a namespace) and,
// for AVX2, DARIC_AVX2, after a pragma that switches code generation.
//
// A work unit is one head of one piece. Keys pass through `rows`, a scratch of [tokens, head_dim] in the cache's dtype
// that stays in L1: record -> rows (converted, rotated) -> packed area, and back.

namespace daric {
namespace DARIC_ISA {

template <class S>
void widen(const S* source, float* target, int64_t count) {
  for (int64_t i = 0; i < count; ++i) target[i] = to_float(source[i]);
}

template <class T>
void narrow(const float* source, T* target, int64_t count) {
  for (int64_t i = 0; i < count; ++i) from_float(source[i], target[i]);
}

#ifdef DARIC_AVX2
template <>
void widen<Half>(const Half* source, float* target, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    _mm256_storeu_ps(target + i, _mm256_cvtph_ps(packed));
  }
  for (; i < count; ++i) target[i] = to_float(source[i]);
}

template <>
void narrow<BFloat16>(const float* source, BFloat16* target, int64_t count) {
  const __m256i one = _mm256_set1_epi32(1), bias = _mm256_set1_epi32(0x7FFF), nan = _mm256_set1_epi32(0x7FC0);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    __m256i packed[2];
    for (int part = 0; part < 2; ++part) {
      const __m256 value = _mm256_loadu_ps(source + i + 8 * part);
      const __m256i bits = _mm256_castps_si256(value);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
      const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, bias)), 16);
      const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
      packed[part] = _mm256_blendv_epi8(rounded, nan, is_nan);
    }
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(packed[0], packed[1]), 0xD8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + i), both);
  }
  for (; i < count; ++i) from_float(source[i], target[i]);
}

template <>
void narrow<Half>(const float* source, Half* target, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    __m128i packed = _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i), packed);
  }
  for (; i < count; ++i) from_float(source[i], target[i]);
}
#endif

template <class S, class T>
struct Convert {
  static void row(const S* source, T* target, float* wide, int64_t count) {
    widen(source, wide, count);
    narrow(wide, target, count);
  }
};

template <class T>
struct Convert<T, T> {
  static void row(const T* source, T* target, float*, int64_t count) {
    memcpy(target, source, count * sizeof(T));
  }
};

// R(delta) of one head; `target` may be `source`.
inline void rotate(const Job& job, int64_t rope_row, const float* source, float* target) {
  const int64_t half = job.rotary_dim / 2;
  const float* cos = job.cos + rope_row * half;
  const float* sin = job.sin + rope_row * half;
  if (job.neox) {
#pragma GCC ivdep
    for (int64_t i = 0; i < half; ++i) {
      float x = source[i], y = source[i + half];
      target[i] = x * cos[i] - y * sin[i];
      target[i + half] = y * cos[i] + x * sin[i];
    }
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < half; ++i) {
      float x = source[2 * i], y = source[2 * i + 1];
      target[2 * i] = x * cos[i] - y * sin[i];
      target[2 * i + 1] = y * cos[i] + x * sin[i];
    }
  }
  if (source != target) memcpy(target + job.rotary_dim, source + job.rotary_dim, (job.head_dim - job.rotary_dim) * sizeof(float));
}

template <class S, class T>
void rotate_row(const Job& job, int64_t rope_row, const S* source, T* target, float* wide) {
  widen(source, wide, job.head_dim);
  rotate(job, rope_row, wide, wide);
  narrow(wide, target, job.head_dim);
}

template <>
inline void rotate_row<float, float>(const Job& job, int64_t rope_row, const float* source, float* target, float*) {
  rotate(job, rope_row, source, target);
}

// target[c * target_stride + r] = source[r * source_stride + c]; strides in units of U.
template <class U>
void transpose_plain(const U* source, int64_t source_stride, U* target, int64_t target_stride, int64_t rows,
                     int64_t columns) {
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = 0; r < rows; ++r) target[c * target_stride + r] = source[r * source_stride + c];
}

// One square of kSide x kSide units; the vector versions below replace it where they exist.
template <class U>
struct Square {
  static constexpr int64_t kSide = 8;
  static void transpose(const U* source, int64_t source_stride, U* target, int64_t target_stride) {
    transpose_plain(source, source_stride, target, target_stride, kSide, kSide);
  }
};

#ifdef __SSE2__
template <>
struct Square<uint16_t> {
  static constexpr int64_t kSide = 8;
  static void transpose(const uint16_t* source, int64_t source_stride, uint16_t* target, int64_t target_stride) {
    __m128i row[8], a[8], b[8];
    for (int i = 0; i < 8; ++i)
      row[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i * source_stride));
    for (int i = 0; i < 4; ++i) {
      a[2 * i] = _mm_unpacklo_epi16(row[2 * i], row[2 * i + 1]);
      a[2 * i + 1] = _mm_unpackhi_epi16(row[2 * i], row[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
      b[4 * i] = _mm_unpacklo_epi32(a[4 * i], a[4 * i + 2]);
      b[4 * i + 1] = _mm_unpackhi_epi32(a[4 * i], a[4 * i + 2]);
      b[4 * i + 2] = _mm_unpacklo_epi32(a[4 * i + 1], a[4 * i + 3]);
      b[4 * i + 3] = _mm_unpackhi_epi32(a[4 * i + 1], a[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
      __m128i low = _mm_unpacklo_epi64(b[i], b[i + 4]), high = _mm_unpackhi_epi64(b[i], b[i + 4]);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(target + (2 * i) * target_stride), low);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(target + (2 * i + 1) * target_stride), high);
    }
  }
};
#endif

#ifdef DARIC_AVX2
template <>
struct Square<uint32_t> {
  static constexpr int64_t kSide = 8;
  static void transpose(const uint32_t* source, int64_t source_stride, uint32_t* target, int64_t target_stride) {
    __m256 row[8], a[8], b[8];
    // Rows 0..3 and 4..7 share registers from the start, so that no lane has to be crossed later.
    for (int i = 0; i < 4; ++i) {
      for (int side = 0; side < 2; ++side) {
        const float* low = reinterpret_cast<const float*>(source + i * source_stride + 4 * side);
        const float* high = reinterpret_cast<const float*>(source + (i + 4) * source_stride + 4 * side);
        row[i + 4 * side] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
      }
    }
    for (int i = 0; i < 8; i += 4) {
      a[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
      a[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
      a[i + 2] = _mm256_unpacklo_ps(row[i + 2], row[i + 3]);
      a[i + 3] = _mm256_unpackhi_ps(row[i + 2], row[i + 3]);
    }
    for (int i = 0; i < 8; i += 4) {
      b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
      b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xEE);
      b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
      b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xEE);
    }
    for (int i = 0; i < 8; ++i) _mm256_storeu_ps(reinterpret_cast<float*>(target + i * target_stride), b[i]);
  }
};
#endif

template <class U>
void transpose(const void* source_start, int64_t source_stride, void* target_start, int64_t target_stride, int64_t rows,
               int64_t columns) {
  constexpr int64_t kSide = Square<U>::kSide;
  const U* source = static_cast<const U*>(source_start);
  U* target = static_cast<U*>(target_start);
  const int64_t full_rows = rows / kSide * kSide, full_columns = columns / kSide * kSide;
  for (int64_t c = 0; c < full_columns; c += kSide)
    for (int64_t r = 0; r < full_rows; r += kSide)
      Square<U>::transpose(source + r * source_stride + c, source_stride, target + c * target_stride + r,
                           target_stride);
  transpose_plain(source + full_rows * source_stride, source_stride, target + full_rows, target_stride,
                  rows - full_rows, columns);
  transpose_plain(source + full_columns, source_stride, target + full_columns * target_stride, target_stride,
                  full_rows, columns - full_columns);
}

// Moves rows [tokens, head_dim] into (kPlace) or out of (!kPlace) tokens [begin, end) of an area.
template <bool kPlace, class T, class U>
void move_tiles(const Order& order, int64_t head_dim, int64_t begin, int64_t end, T* rows, T* area) {
  const int64_t units = head_dim / order.pair;
  for (int64_t token = begin; token < end;) {
    const int64_t inside = token % order.tile;
    const int64_t count = order.tile - inside < end - token ? order.tile - inside : end - token;
    T* packed = area + token / order.tile * order.tile_stride + inside * order.pair;
    T* plain = rows + (token - begin) * head_dim;
    if (kPlace)
      transpose<U>(plain, units, packed, order.tile, count, units);
    else
      transpose<U>(packed, order.tile, plain, units, units, count);
    token += count;
  }
}

template <bool kPlace, class T>
void move_rows(const Order& order, int64_t head_dim, int64_t begin, int64_t end, T* rows, T* area) {
  const int64_t unit_bytes = order.pair * static_cast<int64_t>(sizeof(T));
  if (order.tile == 1) {
    for (int64_t token = begin; token < end; ++token) {
      T* packed = area + token * order.tile_stride;
      T* plain = rows + (token - begin) * head_dim;
      memcpy(kPlace ? packed : plain, kPlace ? plain : packed, head_dim * sizeof(T));
    }
  } else if (order.tile > 1 && unit_bytes == 2) {
    move_tiles<kPlace, T, uint16_t>(order, head_dim, begin, end, rows, area);
  } else if (order.tile > 1 && unit_bytes == 4) {
    move_tiles<kPlace, T, uint32_t>(order, head_dim, begin, end, rows, area);
  } else if (order.tile > 1 && unit_bytes == 8) {
    move_tiles<kPlace, T, uint64_t>(order, head_dim, begin, end, rows, area);
  } else {
    const int32_t* offsets = order.offsets + begin * head_dim;
    for (int64_t i = 0; i < (end - begin) * head_dim; ++i) {
      if (kPlace)
        area[offsets[i]] = rows[i];
      else
        rows[i] = area[offsets[i]];
    }
  }
}

// Not a std::vector: its code would be shared with, and compiled for the instruction set of, whichever file links last.
template <class T>
struct Scratch {
  T* rows;
  float* wide;
  explicit Scratch(const Job& job)
      : rows(static_cast<T*>(::operator new(job.block_size * job.head_dim * sizeof(T)))), wide(nullptr) {
    wide = static_cast<float*>(::operator new(job.head_dim * sizeof(float)));
  }
  ~Scratch() {
    ::operator delete(rows);
    ::operator delete(wide);
  }
  Scratch(const Scratch&) = delete;
};

// What the next area of work touches, fetched row by row while the current one is worked on: rows of one head are short
// and far apart, which the hardware does not foresee.
struct Ahead {
  const char* record;
  const char* area;
  int64_t record_stride, record_bytes, area_bytes, rows;

  Ahead(const Job& job, int64_t op, int64_t unit, int64_t is_value) : rows(0) {
    if (unit >= job.num_pieces * job.num_kv_heads) return;
    const Piece& piece = job.pieces[unit / job.num_kv_heads];
    const int64_t head = unit % job.num_kv_heads, size = dtype_size(job.cache_dtype);
    rows = piece.end - piece.begin;
    area_bytes = job.head_dim * size;
    area = static_cast<const char*>(job.cache) + area_offset(job, piece, is_value, head) * size;
    if (is_value ? job.value.tile == 1 : job.key.tile == 1) area += piece.begin * area_bytes;
    record_bytes = op == kRotate ? 0 : job.head_dim * dtype_size(job.storage_dtype);
    record_stride = record_bytes * job.num_kv_heads;
    record = record_bytes ? record_row(job, job.ranges[piece.range], piece.first_token, is_value, head) : nullptr;
  }

  void fetch(int64_t row) const {
    if (row >= rows) return;
    for (int64_t byte = 0; byte < record_bytes; byte += 64) __builtin_prefetch(record + row * record_stride + byte);
    for (int64_t byte = 0; byte < area_bytes; byte += 64) __builtin_prefetch(area + row * area_bytes + byte, 1);
  }
};

// Record rows -> area, for keys (rotated if the range has a rope row) or values.
template <class S, class T>
void scatter_area(const Job& job, const Piece& piece, int64_t head, int64_t is_value, Scratch<T>& scratch,
                  const Ahead& ahead) {
  const Range& range = job.ranges[piece.range];
  const Order& order = is_value ? job.value : job.key;
  const bool turn = !is_value && range.rope_row >= 0;
  T* area = static_cast<T*>(job.cache) + area_offset(job, piece, is_value, head);
  const bool direct = order.tile == 1;
  for (int64_t i = 0; i < piece.end - piece.begin; ++i) {
    ahead.fetch(i);
    const S* source = reinterpret_cast<const S*>(record_row(job, range, piece.first_token + i, is_value, head));
    T* target = direct ? area + (piece.begin + i) * order.tile_stride : scratch.rows + i * job.head_dim;
    if (turn)
      rotate_row<S, T>(job, range.rope_row, source, target, scratch.wide);
    else
      Convert<S, T>::row(source, target, scratch.wide, job.head_dim);
  }
  if (!direct) move_rows<true>(order, job.head_dim, piece.begin, piece.end, scratch.rows, area);
}

template <class S, class T>
void gather_area(const Job& job, const Piece& piece, int64_t head, int64_t is_value, Scratch<T>& scratch,
                 const Ahead& ahead) {
  const Range& range = job.ranges[piece.range];
  const Order& order = is_value ? job.value : job.key;
  T* area = static_cast<T*>(job.cache) + area_offset(job, piece, is_value, head);
  const bool direct = order.tile == 1;
  if (!direct) move_rows<false>(order, job.head_dim, piece.begin, piece.end, scratch.rows, area);
  for (int64_t i = 0; i < piece.end - piece.begin; ++i) {
    ahead.fetch(i);
    const T* source = direct ? area + (piece.begin + i) * order.tile_stride : scratch.rows + i * job.head_dim;
    S* target = reinterpret_cast<S*>(record_row(job, range, piece.first_token + i, is_value, head));
    Convert<T, S>::row(source, target, scratch.wide, job.head_dim);
  }
}

template <class T>
void rotate_area(const Job& job, const Piece& piece, int64_t head, Scratch<T>& scratch, const Ahead& ahead) {
  const Range& range = job.ranges[piece.range];
  if (range.rope_row < 0) return;
  T* area = static_cast<T*>(job.cache) + area_offset(job, piece, 0, head);
  move_rows<false>(job.key, job.head_dim, piece.begin, piece.end, scratch.rows, area);
  for (int64_t i = 0; i < piece.end - piece.begin; ++i) {
    ahead.fetch(i);
    T* row = scratch.rows + i * job.head_dim;
    rotate_row<T, T>(job, range.rope_row, row, row, scratch.wide);
  }
  move_rows<true>(job.key, job.head_dim, piece.begin, piece.end, scratch.rows, area);
}

template <class S, class T>
void run_units(const Job& job, int64_t op, int64_t first, int64_t last) {
  Scratch<T> scratch(job);
  for (int64_t unit = first; unit < last; ++unit) {
    const Piece& piece = job.pieces[unit / job.num_kv_heads];
    const int64_t head = unit % job.num_kv_heads;
    if (op == kRotate) {
      rotate_area<T>(job, piece, head, scratch, Ahead(job, op, unit + 1, 0));
      continue;
    }
    for (int64_t is_value = 0; is_value < 2; ++is_value) {
      const Ahead ahead(job, op, unit + is_value, 1 - is_value);
      if (op == kScatter)
        scatter_area<S, T>(job, piece, head, is_value, scratch, ahead);
      else
        gather_area<S, T>(job, piece, head, is_value, scratch, ahead);
    }
  }
}

template <class T>
void run_with_storage(const Job& job, int64_t op, int64_t first, int64_t last) {
  if (job.storage_dtype == kFloat32) return run_units<float, T>(job, op, first, last);
  if (job.storage_dtype == kFloat16) return run_units<Half, T>(job, op, first, last);
  run_units<BFloat16, T>(job, op, first, last);
}

void run(const Job& job, int64_t op, int64_t first, int64_t last) {
  if (job.cache_dtype == kFloat32) return run_with_storage<float>(job, op, first, last);
  if (job.cache_dtype == kFloat16) return run_with_storage<Half>(job, op, first, last);
  run_with_storage<BFloat16>(job, op, first, last);
}

}  // namespace DARIC_ISA
}  // namespace daric
