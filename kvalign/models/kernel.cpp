// What a decode step spends its time on: products of rows with packed weights, attention of one query of
// each row, and the search of a memory. `kvalign/models/kernel.py` builds it and says how weights lie;
// `kvalign/memory/memory.py` says what a search finds.
//
// Products: the inputs of a group are rounded to 8 bits, x = d p, as in llama.cpp's Q8_0. With w = s (q - o) + z
// a group then adds s d (sum of q p - o sum of p) + z d (sum of p) to an output: whole numbers but for
// the scales. A vector holds 16 outputs, so each row's sums are the same whatever rows come with it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include "search.h"

namespace {

constexpr int64_t GROUP = 32;

struct Group {  // the inputs of a group, rounded: p, four to a word, and what is known of them
  int32_t words[GROUP / 4];
  int32_t start;  // - o sum of p
  float scale, sum;  // d, d sum of p
};

Group rounded(const float* x, int offset) {
  const Floats low = load(x), high = load(x + 16);
  const int32_t found = greatest(max(magnitude_bits(low), magnitude_bits(high)));  // it may be a NaN
  float most;
  std::memcpy(&most, &found, sizeof most);
  const Floats inverse = floats(most < 1e-30f ? 0.0f : 127.0f / most);
  const Ints a = to_ints(low * inverse), b = to_ints(high * inverse);
  Group group;
  store_int8(group.words, a);
  store_int8(group.words + 4, b);
  const int32_t sum = total(a + b);
  group.start = -offset * sum;
  group.scale = most / 127.0f;
  group.sum = group.scale * sum;
  return group;
}

constexpr int64_t bytes_of(int bits) {  // of a group of 16 outputs: q, s, and z where it is of 4 bits
  return BLOCK * GROUP * bits / 8 + BLOCK * (bits == 4 ? 4 : 2);
}

template <int BITS, int ROWS>
void multiply(const uint8_t* block, const Group* rows, int64_t num_groups, float* out, int64_t num_out, int num_kept) {
  Floats sums[ROWS];
  for (int row = 0; row < ROWS; row++) sums[row] = floats(0);
  for (int64_t g = 0; g < num_groups; g++, block += bytes_of(BITS)) {
    Ints q[8];
    for (int i = 0; i < BITS; i++) {
      const Ints loaded = load_bytes(block + 64 * i);
      if (BITS == 4) {
        q[2 * i] = low_halves(loaded);
        q[2 * i + 1] = high_halves(loaded);
      } else {
        q[i] = loaded;
      }
    }
    const uint8_t* after = block + 64 * BITS;
    const Floats s = from_float16(after), z = BITS == 4 ? from_float16(after + 32) : floats(0);
    for (int row = 0; row < ROWS; row++) {
      const Group& x = rows[row * num_groups + g];
      sums[row] = fma(to_floats(dot<BITS, 8>(q, x.words, x.start)), s * floats(x.scale), sums[row]);
      if (BITS == 4) sums[row] = fma(z, floats(x.sum), sums[row]);
    }
  }
  for (int row = 0; row < ROWS; row++) store_first(out + row * num_out, sums[row], num_kept);
}

template <int BITS>
struct Product {
  const float* x;
  const uint8_t* packed;
  float* out;
  int64_t num_rows, num_groups, num_out;
  std::vector<Group> rows;

  void round(int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; g++) rows[g] = rounded(x + g * GROUP, offset_of(BITS));
  }

  void blocks(int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++) {
      const uint8_t* block = packed + b * num_groups * bytes_of(BITS);
      const int kept = std::min(num_out - b * BLOCK, BLOCK);
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

template <class Job>
AOTITorchError run_for(int64_t dim, Job& job, int64_t size) {  // `DIMS` of kernel.py
  switch (dim) {
    case 16: job.template run<1>(size); break;
    case 32: job.template run<2>(size); break;
    case 64: job.template run<4>(size); break;
    case 80: job.template run<5>(size); break;
    case 96: job.template run<6>(size); break;
    case 128: job.template run<8>(size); break;
    default: return AOTI_TORCH_FAILURE;
  }
  return AOTI_TORCH_SUCCESS;
}

AtenTensorHandle made(std::initializer_list<int64_t> sizes, int32_t dtype) {  // one stretch
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size() - 1; i > 0; i--) strides[i - 1] = strides[i] * sizes.begin()[i];
  AtenTensorHandle tensor = nullptr;
  aoti_torch_empty_strided(sizes.size(), sizes.begin(), strides.data(), dtype,
                           aoti_torch_device_type_cpu(), 0, &tensor);
  return tensor;
}

float* data_of(AtenTensorHandle tensor) {
  void* data = nullptr;
  aoti_torch_get_data_ptr(tensor, &data);
  return (float*)data;
}

Kind kind_of(AtenTensorHandle tensor) {
  int32_t dtype = 0;
  aoti_torch_get_dtype(tensor, &dtype);
  if (dtype == aoti_torch_dtype_float16()) return FLOAT16;
  if (dtype == aoti_torch_dtype_bfloat16()) return BFLOAT16;
  return dtype == aoti_torch_dtype_int8() ? INT8 : FLOAT32;
}

int64_t size_of(AtenTensorHandle tensor, int64_t d) {
  int64_t size = 0;
  aoti_torch_get_size(tensor, d, &size);
  return size;
}

int64_t numel_of(AtenTensorHandle tensor) {
  int64_t num = 0;
  aoti_torch_get_numel(tensor, &num);
  return num;
}

bool is_contiguous(AtenTensorHandle tensor) {
  bool is = false;
  aoti_torch_is_contiguous(tensor, &is);
  return is;
}

bool is_none(AtenTensorHandle tensor) { return numel_of(tensor) == 0; }  // of what kernel.py says of `_none`

int64_t stride_of(AtenTensorHandle tensor, int64_t d) {
  int64_t stride = 0;
  aoti_torch_get_stride(tensor, d, &stride);
  return stride;
}

}  // namespace

#define SHIM extern "C" __attribute__((visibility("default"))) AOTITorchError

// rows [M, K] float32, packed [blocks of outputs, K / 32, bytes of a group] uint8: [M, num_out] float32.
SHIM aoti_torch_cpu_packed_product(AtenTensorHandle rows, AtenTensorHandle packed, int64_t num_out,
                                   AtenTensorHandle* result) {
  if (!is_contiguous(rows)) return AOTI_TORCH_FAILURE;
  const int64_t num_rows = size_of(rows, 0), num_groups = size_of(packed, 1);
  *result = made({num_rows, num_out}, aoti_torch_dtype_float32());
  const float* x = data_of(rows);
  const uint8_t* q = (const uint8_t*)data_of(packed);
  if (size_of(packed, 2) == bytes_of(4))
    Product<4>{x, q, data_of(*result), num_rows, num_groups, num_out}.run();
  else
    Product<8>{x, q, data_of(*result), num_rows, num_groups, num_out}.run();
  return AOTI_TORCH_SUCCESS;
}

// Of what kernel.py says of `attend`, in its order: [B, 1, H, D] and [B, H].
SHIM aoti_torch_cpu_attend(AtenTensorHandle places, AtenTensorHandle query, AtenTensorHandle keys,
                           AtenTensorHandle values, AtenTensorHandle angles, AtenTensorHandle bases,
                           AtenTensorHandle asking, AtenTensorHandle key_means, AtenTensorHandle value_means,
                           AtenTensorHandle key_scales, AtenTensorHandle value_scales,
                           AtenTensorHandle beside, AtenTensorHandle of_beside, double scale, int64_t num_sinks,
                           AtenTensorHandle* result, AtenTensorHandle* of_all) {
  for (const auto tensor : {places, query, angles, bases, asking, key_means, value_means, key_scales, value_scales, beside, of_beside})
    if (!is_contiguous(tensor)) return AOTI_TORCH_FAILURE;
  for (const auto tensor : {keys, values})  // whose slots lie side by side
    for (int d = 0; d < 4; d++)
      if (stride_of(tensor, d) != (d == 2 ? size_of(keys, 3) : d == 3 ? 1 : stride_of(keys, d))) return AOTI_TORCH_FAILURE;
  const int64_t rows = size_of(query, 0), queries = size_of(query, 1), dim = size_of(query, 3);
  *result = made({rows, 1, queries, dim}, aoti_torch_dtype_float32());
  *of_all = made({rows, queries}, aoti_torch_dtype_float32());
  Attention attention{data_of(query), (char*)data_of(keys), (char*)data_of(values), (int64_t*)data_of(places)};
  attention.out = data_of(*result), attention.of_all = data_of(*of_all), attention.scale = scale;
  attention.num_heads = size_of(keys, 1), attention.num_queries = queries / attention.num_heads;
  attention.num_slots = size_of(keys, 2);
  attention.row_of_slots = stride_of(keys, 0) / size_of(keys, 3);
  attention.head_of_slots = stride_of(keys, 1) / size_of(keys, 3);
  attention.row_of_places = size_of(places, 0) == 1 ? 0 : attention.num_slots;
  attention.kind = kind_of(keys), attention.num_pairs = size_of(angles, 3);
  attention.cosines = data_of(angles), attention.sines = attention.cosines + size_of(angles, 2) * attention.num_pairs;
  attention.bases = is_none(bases) ? nullptr : data_of(bases);
  if (!is_none(beside)) attention.beside = data_of(beside), attention.of_beside = data_of(of_beside);
  const int64_t num_places = is_none(key_means) ? 0 : size_of(key_means, 1);
  if (num_places) {
    attention.asking = data_of(asking);
    attention.tables = {data_of(key_means), data_of(value_means), data_of(key_scales), data_of(value_scales), num_places, num_sinks};
  }
  const bool is_of_rows = size_of(places, 0) == 1 || size_of(places, 0) == rows;
  if (!is_of_rows || size_of(places, 1) != attention.num_slots) return AOTI_TORCH_FAILURE;
  const int64_t last = *std::max_element(attention.places, attention.places + size_of(places, 0) * attention.num_slots);
  if (attention.num_pairs && size_of(angles, 2) <= last) return AOTI_TORCH_FAILURE;
  if (num_places && num_places <= last) return AOTI_TORCH_FAILURE;
  return run_for(dim, attention, rows);
}

namespace {  // the same for PyTorch's dispatcher

AtenTensorHandle tensor(StableIValue value) { return (AtenTensorHandle)value; }

void give(StableIValue* stack, int num_tensors, AOTITorchError error, AtenTensorHandle result) {
  for (int i = 0; i < num_tensors; i++) aoti_torch_delete_tensor_object(tensor(stack[i]));
  if (error) throw std::runtime_error("a kernel of kvalign was given tensors that are not as it takes them");
  stack[0] = (StableIValue)result;
}

void packed_product(StableIValue* stack, uint64_t, uint64_t) {
  AtenTensorHandle result = nullptr;
  const auto error = aoti_torch_cpu_packed_product(tensor(stack[0]), tensor(stack[1]), (int64_t)stack[2], &result);
  give(stack, 2, error, result);
}

constexpr int ATTENDED = 13, WRITTEN = 10;  // tensors

void attend(AtenTensorHandle* x, StableIValue* stack, int num_tensors) {
  AtenTensorHandle result = nullptr, of_all = nullptr;
  double scale;
  std::memcpy(&scale, stack + num_tensors, sizeof scale);
  const auto error = aoti_torch_cpu_attend(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12],
                                           scale, (int64_t)stack[num_tensors + 1], &result, &of_all);
  give(stack, num_tensors, error, result);
  stack[1] = (StableIValue)of_all;
}

void attend(StableIValue* stack, uint64_t, uint64_t) {
  AtenTensorHandle x[ATTENDED];
  for (int i = 0; i < ATTENDED; i++) x[i] = tensor(stack[i]);
  attend(x, stack, ATTENDED);
}

// Of what kernel.py says of `write_and_attend`, in its order.
void write_and_attend(StableIValue* stack, uint64_t, uint64_t) {
  constexpr int GIVEN = ATTENDED + WRITTEN;
  AtenTensorHandle x[GIVEN];
  for (int i = 0; i < GIVEN; i++) x[i] = tensor(stack[i]);
  const auto ring = x[2], angles = x[4], bases = x[5], *new_entry = x + ATTENDED + 1, *network = x + ATTENDED + 4;
  const auto slot = x[ATTENDED], place = x[ATTENDED + 3];
  Writing all;
  all.is_int8 = kind_of(ring) == INT8;
  for (int i = 0; i < 2; i++) {
    auto& one = all.parts[i];
    const int64_t bytes = all.is_int8 ? 1 : sizeof(float);
    one.slots = (char*)data_of(x[2 + i]), one.entry = data_of(new_entry[i]);
    one.row_of_slots = stride_of(x[2 + i], 0) * bytes, one.head_of_slots = stride_of(x[2 + i], 1) * bytes;
    one.row = stride_of(new_entry[i], 0), one.head = stride_of(new_entry[i], 1);
    one.mean = data_of(x[7 + i]), one.scale = data_of(x[9 + i]);
    one.weight = data_of(network[2 + 2 * i]), one.bias = data_of(network[3 + 2 * i]);
  }
  all.hidden_weight = data_of(network[0]), all.hidden_bias = data_of(network[1]);
  all.num_hidden = is_none(network[0]) ? 0 : size_of(network[0], 0);
  all.num_pairs = size_of(angles, 3), all.cosines = data_of(angles), all.sines = all.cosines + size_of(angles, 2) * all.num_pairs;
  all.bases = is_none(bases) ? nullptr : data_of(bases);
  all.slot = (int64_t*)data_of(slot), all.place = (int64_t*)data_of(place);
  all.has_tables = !is_none(x[7]), all.num_places = all.has_tables ? size_of(x[7], 1) : 0;
  all.num_rows = size_of(*new_entry, 0), all.num_heads = size_of(*new_entry, 1), all.dim = size_of(*new_entry, 3);
  const auto is_of = [](int64_t index, int64_t num) { return index >= 0 && index < num; };
  bool is_fit = is_of(*all.slot, size_of(ring, 2)) && size_of(place, 0) == all.num_rows && all.num_hidden % 16 == 0;
  is_fit = is_fit && (all.is_int8 || kind_of(ring) == FLOAT32) && all.num_rows == size_of(ring, 0) && all.num_heads == size_of(ring, 1);
  for (int64_t row = 0; is_fit && row < all.num_rows; row++)
    is_fit = (!all.has_tables || is_of(all.place[row], all.num_places)) && (!all.num_pairs || is_of(all.place[row], size_of(angles, 2)));
  if (is_fit) all.run();
  else give(stack, GIVEN, AOTI_TORCH_FAILURE, nullptr);
  attend(x, stack, GIVEN);
}

// Of what kernel.py says of `alike_first`.
void alike_first(StableIValue* stack, uint64_t, uint64_t) {
  const auto keys = tensor(stack[0]);
  const int64_t num = size_of(keys, 0), length = size_of(keys, 1);
  AtenTensorHandle order = made({num, length}, aoti_torch_dtype_int64());
  Halving halving{data_of(keys), (int64_t*)data_of(order), length};
  give(stack, 1, run_for(size_of(keys, 2), halving, num), order);
}

// Of what kernel.py says of `write_sketch`, in its order.
void write_sketch(StableIValue* stack, uint64_t, uint64_t) {
  constexpr int GIVEN = 6;
  AtenTensorHandle given[GIVEN];
  for (int i = 0; i < GIVEN; i++) given[i] = tensor(stack[i]);
  const auto [keys, turn, slots, numbers, scales, fine] = given;
  Sketching all{data_of(keys), data_of(turn)};
  all.slots = is_none(slots) ? nullptr : (int64_t*)data_of(slots), all.fine = is_none(fine) ? nullptr : (uint8_t*)data_of(fine);
  all.numbers = (uint8_t*)data_of(numbers), all.scales = (uint8_t*)data_of(scales);
  all.length = size_of(keys, 1), all.first = (int64_t)stack[GIVEN], all.num_entries = size_of(scales, 1);
  bool is_fit = std::all_of(given, given + GIVEN, is_contiguous);
  is_fit = is_fit && all.first >= 0 && all.first + all.length <= all.num_entries && size_of(keys, 0) == size_of(scales, 0);
  is_fit = is_fit && all.num_entries % BLOCK == 0 && 4 * numel_of(numbers) == numel_of(scales) * size_of(keys, 2);
  const auto error = is_fit ? run_for(size_of(keys, 2), all, size_of(keys, 0)) : AOTI_TORCH_FAILURE;
  give(stack, GIVEN, error, nullptr);
}

// Of what kernel.py says of `find`, in its order.
void find(StableIValue* stack, uint64_t, uint64_t) {
  constexpr int GIVEN = 27;
  AtenTensorHandle given[GIVEN];
  for (int i = 0; i < GIVEN; i++) given[i] = tensor(stack[i]);
  const auto [queries, keys, values, bases, turn, sketch, scales, fine_keys, means, mean_scales, spreads, is_ordered,
              worths, newest, since, oldest, key_bases, cosines, sines, key_means,
              value_means, key_scales, value_scales, angles, far, age_bias, now] = given;
  const int64_t* nums = (int64_t*)stack + GIVEN;
  const int64_t rows = size_of(keys, 0), heads = size_of(keys, 1), group = size_of(queries, 2), tokens = size_of(queries, 3);
  const int64_t dim = size_of(queries, 4), num = nums[5];
  const int64_t num_given = nums[6] < 0 ? num : 0, num_seen = nums[6] < 0 ? 0 : group;
  AtenTensorHandle found[] = {made({rows, heads, tokens, num_given, dim}, aoti_torch_dtype_float32()),
                              made({rows, heads, tokens, num_given, dim}, aoti_torch_dtype_float32()),
                              made({rows, heads, tokens, num_given}, aoti_torch_dtype_int64()),
                              made({rows, heads, tokens, num_given}, aoti_torch_dtype_bool()),
                              made({rows, heads, num_seen, tokens, dim}, aoti_torch_dtype_float32()),
                              made({rows, heads, num_seen, tokens}, aoti_torch_dtype_float32())};
  bool is_fit = std::all_of(given, given + GIVEN, is_contiguous);
  const auto or_none = [](AtenTensorHandle x) { return is_none(x) ? nullptr : data_of(x); };
  const int64_t num_queries = rows * heads * group * tokens, num_turning = is_none(cosines) ? 0 : size_of(cosines, -1);
  const int64_t of_row = numel_of(cosines) > tokens * num_turning ? tokens : 0;
  is_fit = is_fit && 2 * num_turning <= dim && numel_of(cosines) == (of_row ? rows : 1) * tokens * num_turning;
  std::vector<float> own(data_of(queries), data_of(queries) + num_queries * dim);  // rotated
  for (int64_t i = 0; is_fit && num_turning && i < num_queries; i++) {
    const int64_t at = (i / (num_queries / rows) * of_row + i % tokens) * num_turning;
    rotate(&own[i * dim], data_of(cosines) + at, data_of(sines) + at, num_turning);
  }
  Search search{own.data(), data_of(bases), data_of(worths), data_of(turn)};
  search.sketch = (uint8_t*)data_of(sketch), search.scales = (uint8_t*)data_of(scales);
  search.fine_keys = (char*)data_of(fine_keys), search.keys = (char*)data_of(keys), search.values = (char*)data_of(values);
  search.kind = kind_of(keys);
  search.newest = (int64_t*)data_of(newest), search.since = (int64_t*)data_of(since);
  search.oldest = (int64_t*)data_of(oldest);
  search.found_keys = data_of(found[0]), search.found_values = data_of(found[1]);
  search.ages = (int64_t*)data_of(found[2]), search.visible = (bool*)data_of(found[3]);
  search.num_heads = heads, search.num_queries = group, search.num_tokens = tokens;
  search.num_slots = size_of(keys, 2), search.num_ages = size_of(worths, 0);
  search.means = (uint8_t*)data_of(means);
  search.mean_scales = (uint8_t*)data_of(mean_scales), search.spreads = (uint8_t*)data_of(spreads);
  search.is_ordered = (bool*)data_of(is_ordered), search.num_pages = size_of(is_ordered, 1);
  search.near = nums[0], search.num_blocks = nums[1], search.num_estimated = nums[2], search.num_scored = nums[3];
  search.num_compared = nums[4], search.num_recalled = num;
  search.first_place = nums[6], search.most_apart = nums[7], search.room = nums[8];
  search.are_on_disk = nums[9];
  search.rows_are_alike = size_of(since, 0) == 1;
  double alike, bias;
  std::memcpy(&alike, stack + GIVEN + 10, sizeof alike), std::memcpy(&bias, stack + GIVEN + 11, sizeof bias);
  search.alike = alike, search.bias = bias;
  if (search.first_place >= 0) search.out = data_of(found[4]), search.log_sums = data_of(found[5]);
  search.key_bases = or_none(key_bases), search.far = or_none(far), search.age_bias = or_none(age_bias);
  search.now = (int64_t*)or_none(now), search.num_pairs = size_of(angles, 3);
  search.cosines = data_of(angles), search.sines = search.cosines + size_of(angles, 2) * search.num_pairs;
  if (!is_none(key_means))
    search.tables = {data_of(key_means), data_of(value_means), data_of(key_scales), data_of(value_scales), size_of(key_means, 1), 0};
  const int64_t most = *std::max_element(search.oldest, search.oldest + size_of(oldest, 0) * tokens), behind = search.near + 1;
  is_fit = is_fit && size_of(spreads, 3) == PAGE / BLOCK && most < search.num_ages && (!search.far || most < size_of(far, 0)) && (!search.age_bias || most < size_of(age_bias, 0));
  if (search.tables.key_means) {
    const int64_t* last = search.now ? std::max_element(search.now, search.now + size_of(now, 0) * tokens) : nullptr;
    is_fit = is_fit && (last ? *last - behind : search.first_place + num - 1) < search.tables.num_places;
  }
  if (is_fit && search.num_pairs) {
    const int64_t away = search.far ? std::min((int64_t)search.far[most] + 1 + num * search.most_apart, search.room) : num - 1;
    is_fit = away < size_of(angles, 2);
  }
  const auto error = is_fit ? run_for(dim, search, rows) : AOTI_TORCH_FAILURE;
  give(stack, GIVEN, error, found[0]);
  for (int i = 1; i < 6; i++) stack[i] = (StableIValue)found[i];
}

struct Registered {
  Registered() {
    TorchLibraryHandle library;
    aoti_torch_library_init_impl("kvalign", "CPU", __FILE__, __LINE__, &library);
    aoti_torch_library_impl(library, "packed_product", packed_product);
    aoti_torch_library_impl(library, "attend", attend);
    aoti_torch_library_impl(library, "write_and_attend", write_and_attend);
    aoti_torch_library_impl(library, "find", find);
    aoti_torch_library_impl(library, "alike_first", alike_first);
    aoti_torch_library_impl(library, "write_sketch", write_sketch);
  }
} registered;

}  // namespace
