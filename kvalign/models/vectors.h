// Vectors of 16 numbers, for `kernel.cpp`: one register of AVX-512 VNNI, or two of AVX2.

#pragma once

#include <immintrin.h>
#include <cstdint>
#include <cstring>

#define INLINE inline __attribute__((always_inline))

#ifdef __AVX512VNNI__

struct Floats {
  __m512 x;
};
struct Ints {  // 16 of 32 bits, or 64 bytes
  __m512i x;
};

INLINE Floats floats(float x) { return {_mm512_set1_ps(x)}; }
INLINE Floats load(const float* from) { return {_mm512_loadu_ps(from)}; }
INLINE void store(float* to, Floats x) { _mm512_storeu_ps(to, x.x); }
INLINE void store_first(float* to, Floats x, int num) {
  _mm512_mask_storeu_ps(to, num < 16 ? (1 << num) - 1 : 0xffff, x.x);
}
INLINE Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.x, b.x)}; }
INLINE Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.x, b.x)}; }
INLINE Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.x, b.x)}; }
INLINE Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.x, b.x)}; }
INLINE Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
INLINE Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.x, b.x)}; }  // b where one is a NaN
INLINE Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.x, b.x)}; }
INLINE Floats square_root(Floats x) { return {_mm512_sqrt_ps(x.x)}; }
INLINE Floats nearest_whole(Floats x) { return {_mm512_roundscale_ps(x.x, 0)}; }
INLINE float total(Floats x) { return _mm512_reduce_add_ps(x.x); }
INLINE float greatest(Floats x) { return _mm512_reduce_max_ps(x.x); }
INLINE Floats times_power_of_2(Floats x, Floats power) { return {_mm512_scalef_ps(x.x, power.x)}; }

INLINE Ints ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
INLINE Ints lanes() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
INLINE Ints load_bytes(const void* from) { return {_mm512_loadu_si512(from)}; }
INLINE Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.x, b.x)}; }
INLINE Ints operator-(Ints a, Ints b) { return {_mm512_sub_epi32(a.x, b.x)}; }
INLINE Ints magnitude_bits(Floats x) {
  return {_mm512_and_si512(_mm512_castps_si512(x.x), _mm512_set1_epi32(0x7fffffff))};
}
INLINE Ints max(Ints a, Ints b) { return {_mm512_max_epi32(a.x, b.x)}; }
INLINE int32_t greatest(Ints x) { return _mm512_reduce_max_epi32(x.x); }
INLINE int32_t total(Ints x) { return _mm512_reduce_add_epi32(x.x); }
INLINE Ints to_ints(Floats x) { return {_mm512_cvtps_epi32(x.x)}; }
INLINE Floats to_floats(Ints x) { return {_mm512_cvtepi32_ps(x.x)}; }
INLINE void store_int8(void* to, Ints x) { _mm_storeu_si128((__m128i*)to, _mm512_cvtsepi32_epi8(x.x)); }
INLINE void store_uint8(void* to, const Ints* x) {  // of 4 vectors, each number 128 more, in an order of its own
  const __m512i a = _mm512_packs_epi32(x[0].x, x[1].x), b = _mm512_packs_epi32(x[2].x, x[3].x);
  _mm512_storeu_si512(to, _mm512_xor_si512(_mm512_packs_epi16(a, b), _mm512_set1_epi8(-128)));
}
INLINE Floats from_int8(const char* from) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)))};
}
INLINE Floats from_float16(const uint8_t* from) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from))};
}
INLINE void store_float16(uint8_t* to, Floats x) {
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph(x.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE Floats from_bfloat16(const uint8_t* from) {
  const __m512i numbers = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(numbers, 16))};
}
INLINE Ints low_halves(Ints bytes) { return {_mm512_and_si512(bytes.x, _mm512_set1_epi8(15))}; }
INLINE Ints high_halves(Ints bytes) { return low_halves({_mm512_srli_epi16(bytes.x, 4)}); }
INLINE Ints halves(const uint8_t* from) {  // of 32 bytes: the low ones, then the high ones
  const __m256i bytes = _mm256_loadu_si256((const __m256i*)from), low = _mm256_set1_epi8(15);
  const __m256i high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
  return {_mm512_inserti64x4(_mm512_castsi256_si512(_mm256_and_si256(bytes, low)), high, 1)};
}
INLINE Ints quarters(Ints bytes, int i) {  // bits 2 i and 2 i + 1 of each
  return {_mm512_and_si512(_mm512_srli_epi16(bytes.x, 2 * i), _mm512_set1_epi8(3))};
}

INLINE int num_at_least(Floats x, Floats least) {
  return __builtin_popcount(_mm512_cmp_ps_mask(x.x, least.x, _CMP_GE_OQ));
}
// Write all x that are at least so great, and their indices; their number. There is room for 16.
INLINE int store_at_least(int32_t* to, float* numbers, Ints indices, Floats x, Floats least) {
  const __mmask16 are = _mm512_cmp_ps_mask(x.x, least.x, _CMP_GE_OQ);
  if (!are) return 0;
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(are, indices.x));
  _mm512_storeu_ps(numbers, _mm512_maskz_compress_ps(are, x.x));
  return __builtin_popcount(are);
}

constexpr int offset_of(int bits) { return 1 << (bits - 1); }  // what `dot` does not take off q
// start + sum of q p: four q to a word, without a sign, and four p, of -127 to 127.
template <int BITS, int NUM>
INLINE Ints dot(const Ints* q, const int32_t* p, int32_t start) {
  __m512i even = _mm512_set1_epi32(start), odd = _mm512_setzero_si512();
  for (int i = 0; i < NUM; i += 2) {
    even = _mm512_dpbusd_epi32(even, q[i].x, _mm512_set1_epi32(p[i]));
    odd = _mm512_dpbusd_epi32(odd, q[i + 1].x, _mm512_set1_epi32(p[i + 1]));
  }
  return {_mm512_add_epi32(even, odd)};
}

// sum + products, by fours of bytes: q of 0 to 15, and p of -127 to 127.
INLINE Ints products(Ints q, Ints p, Ints sum) { return {_mm512_dpbusd_epi32(sum.x, q.x, p.x)}; }

INLINE Floats totals(Floats* x) {  // of each of 16 vectors
  for (int i = 0; i < 8; i++)
    x[i].x = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i].x, x[2 * i + 1].x),
                           _mm512_unpackhi_ps(x[2 * i].x, x[2 * i + 1].x));
  for (int i = 0; i < 4; i++) {
    const __m512d a = _mm512_castps_pd(x[2 * i].x), b = _mm512_castps_pd(x[2 * i + 1].x);
    x[i].x = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  for (int num = 2; num > 0; num /= 2)  // now by quarters of a vector
    for (int i = 0; i < num; i++)
      x[i].x = _mm512_add_ps(_mm512_shuffle_f32x4(x[2 * i].x, x[2 * i + 1].x, 0x88),
                             _mm512_shuffle_f32x4(x[2 * i].x, x[2 * i + 1].x, 0xdd));
  return x[0];
}

#else

struct Floats {
  __m256 a, b;
};
struct Ints {  // 16 of 32 bits, or 64 bytes
  __m256i a, b;
};

INLINE Floats floats(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
INLINE void store(float* to, Floats x) {
  _mm256_storeu_ps(to, x.a);
  _mm256_storeu_ps(to + 8, x.b);
}
INLINE void store_first(float* to, Floats x, int num) {
  if (num >= 16) return store(to, x);
  float all[16];
  store(all, x);
  std::memcpy(to, all, num * sizeof(float));
}
INLINE Floats operator+(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE Floats operator-(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE Floats operator*(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE Floats operator/(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
INLINE Floats max(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE Floats min(Floats x, Floats y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE Floats square_root(Floats x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
INLINE Floats nearest_whole(Floats x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
INLINE float total(Floats x) {
  const __m256 both = _mm256_add_ps(x.a, x.b);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE float greatest(Floats x) {
  float all[16], most;
  store(all, x);
  most = all[0];
  for (const float one : all) most = one > most ? one : most;
  return most;
}
INLINE __m256 power_of_2(__m256 x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127)), 23));
}
INLINE Floats times_power_of_2(Floats x, Floats power) {
  return {_mm256_mul_ps(x.a, power_of_2(power.a)), _mm256_mul_ps(x.b, power_of_2(power.b))};
}

INLINE Ints ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE Ints lanes() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
INLINE Ints load_bytes(const void* from) {
  const __m256i* both = (const __m256i*)from;
  return {_mm256_loadu_si256(both), _mm256_loadu_si256(both + 1)};
}
INLINE Ints operator+(Ints x, Ints y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE Ints operator-(Ints x, Ints y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
INLINE Ints magnitude_bits(Floats x) {
  const __m256i bits = _mm256_set1_epi32(0x7fffffff);
  return {_mm256_and_si256(_mm256_castps_si256(x.a), bits), _mm256_and_si256(_mm256_castps_si256(x.b), bits)};
}
INLINE Ints max(Ints x, Ints y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
INLINE int32_t greatest(Ints x) {
  const __m256i both = _mm256_max_epi32(x.a, x.b);
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
INLINE int32_t total(Ints x) {
  const __m256i both = _mm256_add_epi32(x.a, x.b);
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
INLINE Ints to_ints(Floats x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE void store_int8(void* to, Ints x) {
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(halves, halves), 0x08);
  _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(bytes));
}
INLINE __m256i to_uint8(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
  return _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
}
INLINE void store_uint8(void* to, const Ints* x) {
  _mm256_storeu_si256((__m256i*)to, to_uint8(x[0].a, x[1].a, x[2].a, x[3].a));
  _mm256_storeu_si256((__m256i*)to + 1, to_uint8(x[0].b, x[1].b, x[2].b, x[3].b));
}
INLINE Floats from_int8(const char* from) {
  return to_floats({_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)),
                    _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8)))});
}
INLINE Floats from_float16(const uint8_t* from) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + 16)))};
}
INLINE void store_float16(uint8_t* to, Floats x) {
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(to + 16), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
INLINE Floats from_bfloat16(const uint8_t* from) {
  const __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
  const __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(from + 16)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}
INLINE Ints low_halves(Ints bytes) {
  const __m256i low = _mm256_set1_epi8(15);
  return {_mm256_and_si256(bytes.a, low), _mm256_and_si256(bytes.b, low)};
}
INLINE Ints high_halves(Ints bytes) {
  return low_halves({_mm256_srli_epi16(bytes.a, 4), _mm256_srli_epi16(bytes.b, 4)});
}
INLINE Ints halves(const uint8_t* from) {
  const __m256i bytes = _mm256_loadu_si256((const __m256i*)from), low = _mm256_set1_epi8(15);
  return {_mm256_and_si256(bytes, low), _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low)};
}
INLINE Ints quarters(Ints bytes, int i) {
  const __m256i low = _mm256_set1_epi8(3);
  return {_mm256_and_si256(_mm256_srli_epi16(bytes.a, 2 * i), low),
          _mm256_and_si256(_mm256_srli_epi16(bytes.b, 2 * i), low)};
}

INLINE uint32_t lanes_at_least(Floats x, Floats least) {  // a bit of each
  const uint32_t a = _mm256_movemask_ps(_mm256_cmp_ps(x.a, least.a, _CMP_GE_OQ));
  return a | _mm256_movemask_ps(_mm256_cmp_ps(x.b, least.b, _CMP_GE_OQ)) << 8;
}
INLINE int num_at_least(Floats x, Floats least) { return __builtin_popcount(lanes_at_least(x, least)); }
struct Chosen {  // the lanes of 8 that a mask has, a byte each
  uint64_t of[256] = {};
  constexpr Chosen() {
    for (int mask = 0; mask < 256; mask++)
      for (int lane = 0, num = 0; lane < 8; lane++)
        if (mask >> lane & 1) of[mask] |= uint64_t(lane) << 8 * num++;
  }
};
constexpr Chosen CHOSEN;
INLINE int store_at_least(int32_t* to, float* numbers, Ints indices, Floats x, Floats least) {
  const uint32_t are = lanes_at_least(x, least), num = __builtin_popcount(are & 255);
  if (!are) return 0;
  const __m256i a = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(CHOSEN.of[are & 255]));
  const __m256i b = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(CHOSEN.of[are >> 8]));
  _mm256_storeu_ps(numbers, _mm256_permutevar8x32_ps(x.a, a));
  _mm256_storeu_ps(numbers + num, _mm256_permutevar8x32_ps(x.b, b));
  _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(indices.a, a));
  _mm256_storeu_si256((__m256i*)(to + num), _mm256_permutevar8x32_epi32(indices.b, b));
  return __builtin_popcount(are);
}

constexpr int offset_of(int bits) { return bits == 4 ? 8 : 0; }
template <int BITS, int NUM>
INLINE Ints dot(const Ints* q, const int32_t* p, int32_t start) {
  const __m256i ones = _mm256_set1_epi16(1), middle = _mm256_set1_epi8(-128);
  Ints sum = ints(start);
  constexpr int AT_ONCE = BITS == 2 ? 32 : BITS == 4 ? 8 : 1;  // sums of pairs that 16 bits hold
  for (int first = 0; first < NUM; first += AT_ONCE) {
    __m256i a = _mm256_setzero_si256(), b = a;
    for (int i = first; i < first + AT_ONCE && i < NUM; i++) {
      const __m256i x = _mm256_set1_epi32(p[i]);
      if (BITS < 8) {
        a = _mm256_add_epi16(a, _mm256_maddubs_epi16(q[i].a, x));
        b = _mm256_add_epi16(b, _mm256_maddubs_epi16(q[i].b, x));
      } else {  // (q - 128) x, since the sum of two q x may need more
        const __m256i size = _mm256_abs_epi8(x);
        a = _mm256_maddubs_epi16(size, _mm256_sign_epi8(_mm256_xor_si256(q[i].a, middle), x));
        b = _mm256_maddubs_epi16(size, _mm256_sign_epi8(_mm256_xor_si256(q[i].b, middle), x));
      }
    }
    sum = sum + Ints{_mm256_madd_epi16(a, ones), _mm256_madd_epi16(b, ones)};
  }
  return sum;
}

INLINE Ints products(Ints q, Ints p, Ints sum) {
  const __m256i ones = _mm256_set1_epi16(1);
  return sum + Ints{_mm256_madd_epi16(_mm256_maddubs_epi16(q.a, p.a), ones),
                    _mm256_madd_epi16(_mm256_maddubs_epi16(q.b, p.b), ones)};
}

INLINE __m256 totals_of_8(const Floats* x) {
  __m256 both[8];
  for (int i = 0; i < 8; i++) both[i] = _mm256_add_ps(x[i].a, x[i].b);
  for (int i = 0; i < 4; i++) both[i] = _mm256_hadd_ps(both[2 * i], both[2 * i + 1]);
  for (int i = 0; i < 2; i++) both[i] = _mm256_hadd_ps(both[2 * i], both[2 * i + 1]);
  return _mm256_add_ps(_mm256_permute2f128_ps(both[0], both[1], 0x20), _mm256_permute2f128_ps(both[0], both[1], 0x31));
}
INLINE Floats totals(Floats* x) { return {totals_of_8(x), totals_of_8(x + 8)}; }  // of each of 16 vectors

#endif

// 16 rows of 16 numbers, each so far from the one before, as columns.
INLINE void transpose(const float* from, int64_t stride, float* to) {
  for (int block = 0; block < 4; block++) {
    const float* x = from + block / 2 * 8 * stride + block % 2 * 8;
    float* y = to + block % 2 * 8 * 16 + block / 2 * 8;
    __m256 twos[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
      const __m256 a = _mm256_loadu_ps(x + stride * i), b = _mm256_loadu_ps(x + stride * (i + 1));
      twos[i] = _mm256_unpacklo_ps(a, b), twos[i + 1] = _mm256_unpackhi_ps(a, b);
    }
    for (int i = 0; i < 8; i += 4)
      for (int j = 0; j < 2; j++) {
        fours[i + 2 * j] = _mm256_shuffle_ps(twos[i + j], twos[i + j + 2], 0x44);
        fours[i + 2 * j + 1] = _mm256_shuffle_ps(twos[i + j], twos[i + j + 2], 0xee);
      }
    for (int i = 0; i < 4; i++) {
      _mm256_storeu_ps(y + 16 * i, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
      _mm256_storeu_ps(y + 16 * (i + 4), _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
    }
  }
}
