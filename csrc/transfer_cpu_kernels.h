// The CPU kernels. Included once per instruction set by transfer_cpu_*.cpp, which define DARIC_ISA (a namespace) and,
// for AVX2, DARIC_AVX2, after a pragma that switches code generation.
//
// Record rows are read and written in the order in which they lie. Packed keys pass through a scratch of rows in the
// cache's dtype: record -> rows (converted, rotated) -> packed area, and back.

namespace daric {
namespace DARIC_ISA {

#ifdef DARIC_AVX2
constexpr int64_t kLanes = 8;

inline __m256 load8(const float* source) { return _mm256_loadu_ps(source); }

inline __m256 load8(const Half* source) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
}

inline __m256 load8(const BFloat16* source) {
  const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(packed), 16));
}

inline void store8(__m256 value, float* target) { _mm256_storeu_ps(target, value); }

inline void store8(__m256 value, Half* target) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

inline void store8(__m256 value, BFloat16* target) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, up), 16);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  const __m256i wide = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), is_nan);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), packed);
}
#endif

template <class S, class T>
void convert(const S* source, T* target, int64_t count) {
  int64_t i = 0;
#ifdef DARIC_AVX2
  for (; i + kLanes <= count; i += kLanes) store8(load8(source + i), target + i);
#endif
  for (; i < count; ++i) from_float(to_float(source[i]), target[i]);
}

// Same dtype: bytes as they are (a NaN keeps its payload). Rows are short, so that a call of memcpy would show.
template <class T>
void convert(const T* source, T* target, int64_t count) {
  constexpr int64_t kStep = 64 / sizeof(T);
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) memcpy(target + i, source + i, 64);
  if (i < count) memcpy(target + i, source + i, (count - i) * sizeof(T));
}

// Float32 rows, GPT-J style (dims 2i and 2i + 1 are a pair), in place.
inline void rotate_interleaved(const float* cos, const float* sin, int64_t half, float* row) {
  for (int64_t i = 0; i < half; ++i) {
    float x = row[2 * i], y = row[2 * i + 1];
    row[2 * i] = x * cos[i] - y * sin[i];
    row[2 * i + 1] = y * cos[i] + x * sin[i];
  }
}

// NeoX style (dims i and i + half are a pair), converted on the way; `target` may be `source`.
template <class S, class T>
void rotate_halves(const float* cos, const float* sin, int64_t half, const S* source, T* target) {
  int64_t i = 0;
#ifdef DARIC_AVX2
  for (; i + kLanes <= half; i += kLanes) {
    const __m256 x = load8(source + i), y = load8(source + half + i), c = load8(cos + i), s = load8(sin + i);
    store8(_mm256_sub_ps(_mm256_mul_ps(x, c), _mm256_mul_ps(y, s)), target + i);
    store8(_mm256_add_ps(_mm256_mul_ps(y, c), _mm256_mul_ps(x, s)), target + half + i);
  }
#endif
  for (; i < half; ++i) {
    const float x = to_float(source[i]), y = to_float(source[half + i]);
    from_float(x * cos[i] - y * sin[i], target[i]);
    from_float(y * cos[i] + x * sin[i], target[half + i]);
  }
}

// One row of the rope table. Copied into locals, as all that a loop over rows needs: the compiler must assume that a
// vector store may change whatever is reached by reference.
struct Rope {
  const float* cos;
  const float* sin;
  int64_t half;
  bool neox;

  Rope(const Job& job, const Range& range)
      : cos(job.cos + range.rope_row * (job.rotary_dim / 2)),
        sin(job.sin + range.rope_row * (job.rotary_dim / 2)),
        half(job.rotary_dim / 2),
        neox(job.neox != 0) {}
};

// R(delta) of one head, converted; `target` may be `source`. `wide` is scratch for one row.
template <class S, class T>
void rotate_row(const Rope rope, int64_t head_dim, const S* source, T* target, float* wide) {
  if (rope.neox) {
    rotate_halves(rope.cos, rope.sin, rope.half, source, target);
    if (static_cast<const void*>(source) != target && head_dim > 2 * rope.half)
      convert(source + 2 * rope.half, target + 2 * rope.half, head_dim - 2 * rope.half);
  } else {
    convert(source, wide, head_dim);
    rotate_interleaved(rope.cos, rope.sin, rope.half, wide);
    convert(wide, target, head_dim);
  }
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

constexpr int64_t kChunk = 32;  // tokens that pass through the scratch at once

// Rows [num_kv_heads, kChunk, head_dim] of the tokens at hand, and one row in float32. Not a std::vector: its code would
// be shared with, and compiled for the instruction set of, whichever file links first.
template <class T>
struct Scratch {
  T* rows;
  float* wide;
  int64_t head_stride;
  explicit Scratch(const Job& job) : rows(nullptr), wide(nullptr), head_stride((kChunk + 1) * job.head_dim) {
    rows = static_cast<T*>(::operator new(job.num_kv_heads * head_stride * sizeof(T) + job.head_dim * sizeof(float) + 64));
    wide = reinterpret_cast<float*>(rows + job.num_kv_heads * head_stride);
  }
  ~Scratch() { ::operator delete(rows); }
  Scratch(const Scratch&) = delete;
};

// Tokens [begin, end) of a piece, at most kChunk, and one of K and V: what is moved at once.
struct Step {
  const Job& job;
  const Range& range;
  const Order& order;
  const Piece& piece;
  int64_t is_value, begin, end;

  char* record(int64_t token) const {
    return record_row(job, range, piece.first_token + token - piece.begin, is_value, 0);
  }
  template <class T>
  T* area(int64_t head) const {
    return static_cast<T*>(job.cache) + area_offset(job, piece, is_value, head);
  }
};

template <bool kPlace, class T>
void move_heads(const Step& step, Scratch<T>& scratch) {
  for (int64_t head = 0; head < step.job.num_kv_heads; ++head)
    move_rows<kPlace>(step.order, step.job.head_dim, step.begin, step.end, scratch.rows + head * scratch.head_stride,
                      step.area<T>(head));
}

// The rows of a step in the cache's dtype: in the area itself if rows lie there as they are, else in the scratch.
template <class T>
struct Rows {
  T* start;
  int64_t head_stride, token_stride;

  Rows(const Step& step, Scratch<T>& scratch)
      : start(scratch.rows), head_stride(scratch.head_stride), token_stride(step.job.head_dim) {
    if (step.order.tile != 1) return;
    start = step.area<T>(0) + step.begin * step.order.tile_stride;
    head_stride = step.job.head_stride;
    token_stride = step.order.tile_stride;
  }
};

template <class T>
void fetch_for_writing(const T* start, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(start + i, 1);
}

// Record rows -> area; keys are rotated if the range has a rope row.
template <class S, class T>
void scatter(const Step& step, Scratch<T>& scratch) {
  const Rows<T> rows(step, scratch);
  const bool turn = !step.is_value && step.range.rope_row >= 0;
  const Rope rope(step.job, step.range);
  const int64_t head_dim = step.job.head_dim, heads = step.job.num_kv_heads, tokens = step.end - step.begin;
  const S* source = reinterpret_cast<const S*>(step.record(step.begin));
  float* const wide = scratch.wide;
  // A packed area is written in columns, which the hardware does not foresee: have its lines come in meanwhile.
  const bool packed = step.order.tile != 1;
  const T* area = step.area<T>(0) + step.begin * head_dim;
  const int64_t area_stride = step.job.head_stride;
  for (int64_t token = 0; token < tokens; ++token) {
    T* target = rows.start + token * rows.token_stride;
    for (int64_t head = 0; head < heads; ++head, source += head_dim, target += rows.head_stride) {
      if (packed) fetch_for_writing(area + head * area_stride + token * head_dim, head_dim);
      if (turn)
        rotate_row(rope, head_dim, source, target, wide);
      else
        convert(source, target, head_dim);
    }
  }
  if (step.order.tile != 1) move_heads<true>(step, scratch);
}

template <class S, class T>
void gather(const Step& step, Scratch<T>& scratch) {
  if (step.order.tile != 1) move_heads<false>(step, scratch);
  const Rows<T> rows(step, scratch);
  const int64_t head_dim = step.job.head_dim, heads = step.job.num_kv_heads, tokens = step.end - step.begin;
  S* target = reinterpret_cast<S*>(step.record(step.begin));
  for (int64_t token = 0; token < tokens; ++token) {
    const T* source = rows.start + token * rows.token_stride;
    for (int64_t head = 0; head < heads; ++head, target += head_dim, source += rows.head_stride)
      convert(source, target, head_dim);
  }
}

template <class T>
void rotate_in_place(const Step& step, Scratch<T>& scratch) {
  if (step.range.rope_row < 0) return;
  if (step.order.tile != 1) move_heads<false>(step, scratch);
  const Rows<T> rows(step, scratch);
  const Rope rope(step.job, step.range);
  const int64_t head_dim = step.job.head_dim, heads = step.job.num_kv_heads, tokens = step.end - step.begin;
  float* const wide = scratch.wide;
  for (int64_t head = 0; head < heads; ++head) {
    T* row = rows.start + head * rows.head_stride;
    for (int64_t token = 0; token < tokens; ++token, row += rows.token_stride)
      rotate_row<T, T>(rope, head_dim, row, row, wide);
  }
  if (step.order.tile != 1) move_heads<true>(step, scratch);
}

template <class S, class T>
void run_pieces(const Job& job, int64_t op, int64_t first, int64_t last) {
  Scratch<T> scratch(job);
  for (const Piece* piece = job.pieces + first; piece < job.pieces + last; ++piece) {
    for (int64_t is_value = 0; is_value < (op == kRotate ? 1 : 2); ++is_value) {
      for (int64_t begin = piece->begin; begin < piece->end; begin += kChunk) {
        const int64_t end = begin + kChunk < piece->end ? begin + kChunk : piece->end;
        const Step step{job, job.ranges[piece->range], is_value ? job.value : job.key, *piece, is_value, begin, end};
        if (op == kScatter)
          scatter<S, T>(step, scratch);
        else if (op == kGather)
          gather<S, T>(step, scratch);
        else
          rotate_in_place<T>(step, scratch);
      }
    }
  }
}

template <class T>
void run_with_storage(const Job& job, int64_t op, int64_t first, int64_t last) {
  if (job.storage_dtype == kFloat32) return run_pieces<float, T>(job, op, first, last);
  if (job.storage_dtype == kFloat16) return run_pieces<Half, T>(job, op, first, last);
  run_pieces<BFloat16, T>(job, op, first, last);
}

void run(const Job& job, int64_t op, int64_t first, int64_t last) {
  if (job.cache_dtype == kFloat32) return run_with_storage<float>(job, op, first, last);
  if (job.cache_dtype == kFloat16) return run_with_storage<Half>(job, op, first, last);
  run_with_storage<BFloat16>(job, op, first, last);
}

}  // namespace DARIC_ISA
}  // namespace daric
