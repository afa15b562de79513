// Products of rows with packed weights, for CPUs with AVX-512 VNNI: `kvalign/models/kernel.py` builds
// it and says how weights lie.
//
// The inputs of a group are rounded to 8 bits, x = d p, as in llama.cpp's Q8_0. With w = s (q - o) + z
// a group then adds s d (sum of q p - o sum of p) + z d (sum of p) to an output: whole numbers but for
// the scales. A vector holds 16 outputs, so each row's sums are the same whatever rows come with it.

#include <immintrin.h>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

namespace {

constexpr int64_t GROUP = 32, BLOCK = 16;
constexpr int64_t FEW = 1 << 17;  // multiplications that one thread does sooner than several
constexpr int64_t AHEAD = 2048;   // bytes that are asked for before they are needed

struct Group {  // the inputs of a group, rounded: p, four to a word, and what is known of them
  int32_t words[GROUP / 4];
  int32_t start;  // - o sum of p
  float scale, sum;  // d, d sum of p
};

Group rounded(const float* x, int offset) {
  const __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
  const __m512i bits = _mm512_set1_epi32(0x7fffffff);  // as whole numbers the greatest may be a NaN
  const __m512i most = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(low), bits),
                                        _mm512_and_si512(_mm512_castps_si512(high), bits));
  const int32_t found = _mm512_reduce_max_epi32(most);
  float greatest;
  std::memcpy(&greatest, &found, sizeof greatest);
  const __m512 inverse = _mm512_set1_ps(greatest < 1e-30f ? 0.0f : 127.0f / greatest);
  const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse));
  const __m512i b = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
  Group group;
  _mm_storeu_si128((__m128i*)group.words, _mm512_cvtsepi32_epi8(a));
  _mm_storeu_si128((__m128i*)(group.words + 4), _mm512_cvtsepi32_epi8(b));
  const int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
  group.start = -offset * sum;
  group.scale = greatest / 127.0f;
  group.sum = group.scale * sum;
  return group;
}

__m512 scales(const uint8_t* from) {  // bfloat16
  const __m256i halves = _mm256_loadu_si256((const __m256i*)from);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

constexpr int64_t bytes_of(int bits) {  // of a group of 16 outputs: q, s, and z where it is of 4 bits
  return BLOCK * GROUP * bits / 8 + BLOCK * (bits == 4 ? 4 : 2);
}

template <int BITS, int ROWS>
void multiply(const uint8_t* block, const Group* rows, int64_t num_groups, float* out, int64_t num_out,
              __mmask16 kept) {
  const __m512i nibble = _mm512_set1_epi8(15);
  __m512 sums[ROWS];
  for (int row = 0; row < ROWS; row++) sums[row] = _mm512_setzero_ps();
  for (int64_t g = 0; g < num_groups; g++, block += bytes_of(BITS)) {
    __m512i q[8];
    for (int i = 0; i < BITS; i++) {
      _mm_prefetch(block + AHEAD + 64 * i, _MM_HINT_T0);
      const __m512i loaded = _mm512_loadu_si512(block + 64 * i);
      if (BITS == 4) {
        q[2 * i] = _mm512_and_si512(loaded, nibble);
        q[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(loaded, 4), nibble);
      } else {
        q[i] = loaded;
      }
    }
    const uint8_t* after = block + 64 * BITS;
    const __m512 s = scales(after), z = BITS == 4 ? scales(after + 32) : _mm512_setzero_ps();
    for (int row = 0; row < ROWS; row++) {
      const Group& x = rows[row * num_groups + g];
      __m512i even = _mm512_set1_epi32(x.start), odd = _mm512_setzero_si512();
      for (int i = 0; i < 8; i += 2) {
        even = _mm512_dpbusd_epi32(even, q[i], _mm512_set1_epi32(x.words[i]));
        odd = _mm512_dpbusd_epi32(odd, q[i + 1], _mm512_set1_epi32(x.words[i + 1]));
      }
      const __m512 dot = _mm512_cvtepi32_ps(_mm512_add_epi32(even, odd));
      sums[row] = _mm512_fmadd_ps(dot, _mm512_mul_ps(s, _mm512_set1_ps(x.scale)), sums[row]);
      if (BITS == 4) sums[row] = _mm512_fmadd_ps(z, _mm512_set1_ps(x.sum), sums[row]);
    }
  }
  for (int row = 0; row < ROWS; row++) _mm512_mask_storeu_ps(out + row * num_out, kept, sums[row]);
}

template <int BITS>
struct Product {
  const float* x;
  const uint8_t* packed;
  float* out;
  int64_t num_rows, num_groups, num_out;
  std::vector<Group> rows;

  void round(int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; g++) rows[g] = rounded(x + g * GROUP, 1 << (BITS - 1));
  }

  void blocks(int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++) {
      const uint8_t* block = packed + b * num_groups * bytes_of(BITS);
      const int64_t left = num_out - b * BLOCK;
      const __mmask16 kept = left < BLOCK ? (1 << left) - 1 : 0xffff;
      float* to = out + b * BLOCK;
      int64_t row = 0;
      for (; row + 4 <= num_rows; row += 4)
        multiply<BITS, 4>(block, &rows[row * num_groups], num_groups, to + row * num_out, num_out, kept);
      for (; row < num_rows; row++)
        multiply<BITS, 1>(block, &rows[row * num_groups], num_groups, to + row * num_out, num_out, kept);
    }
  }

  void run() {
    rows.resize(num_rows * num_groups);
    auto round = [](int64_t begin, int64_t end, void* self) { ((Product*)self)->round(begin, end); };
    auto blocks = [](int64_t begin, int64_t end, void* self) { ((Product*)self)->blocks(begin, end); };
    torch_parallel_for(0, rows.size(), FEW / GROUP, round, this);
    const int64_t grain = FEW / (rows.size() * GROUP * BLOCK + 1);
    torch_parallel_for(0, (num_out + BLOCK - 1) / BLOCK, grain + 1, blocks, this);
  }
};

// What the op gives a dispatcher, and what it takes.
void boxed(StableIValue* stack, uint64_t, uint64_t);

struct Registered {
  Registered() {
    TorchLibraryHandle library;
    aoti_torch_library_init_impl("kvalign", "CPU", __FILE__, __LINE__, &library);
    aoti_torch_library_impl(library, "packed_product", boxed);
  }
} registered;

}  // namespace

// rows [M, K] float32, packed [blocks of outputs, K / 32, bytes of a group] uint8: [M, num_out] float32.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_packed_product(
    AtenTensorHandle rows, AtenTensorHandle packed, int64_t num_out, AtenTensorHandle* result) {
  bool is_contiguous;
  int64_t num_rows, num_groups, num_bytes;
  void *x, *q, *out;
  AOTITorchError error = aoti_torch_is_contiguous(rows, &is_contiguous);
  error |= aoti_torch_get_size(rows, 0, &num_rows) | aoti_torch_get_size(packed, 1, &num_groups);
  error |= aoti_torch_get_size(packed, 2, &num_bytes);
  error |= aoti_torch_get_data_ptr(rows, &x) | aoti_torch_get_data_ptr(packed, &q);
  if (error || !is_contiguous) return AOTI_TORCH_FAILURE;
  const int64_t sizes[] = {num_rows, num_out}, strides[] = {num_out, 1};
  error = aoti_torch_empty_strided(2, sizes, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0,
                                   result);
  if (error) return error;
  aoti_torch_get_data_ptr(*result, &out);
  if (num_bytes == bytes_of(4))
    Product<4>{(float*)x, (uint8_t*)q, (float*)out, num_rows, num_groups, num_out}.run();
  else
    Product<8>{(float*)x, (uint8_t*)q, (float*)out, num_rows, num_groups, num_out}.run();
  return AOTI_TORCH_SUCCESS;
}

namespace {

void boxed(StableIValue* stack, uint64_t, uint64_t) {
  auto rows = (AtenTensorHandle)stack[0], packed = (AtenTensorHandle)stack[1];
  AtenTensorHandle result = nullptr;
  const AOTITorchError error = aoti_torch_cpu_packed_product(rows, packed, (int64_t)stack[2], &result);
  aoti_torch_delete_tensor_object(rows);
  aoti_torch_delete_tensor_object(packed);
  if (error) throw std::runtime_error("packed_product: rows must be contiguous");
  stack[0] = (StableIValue)result;
}

}  // namespace
