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

#include "vectors.h"

namespace {

constexpr int64_t GROUP = 32, BLOCK = 16;
constexpr int64_t FEW = 1 << 17;  // multiplications that one thread does sooner than several

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

constexpr int64_t KEYS = 64;  // that are read for all queries before the next

Floats exponential(Floats x) {  // of numbers up to 0; Taylor's series around the nearest power of 2
  x = max(floats(-87.0f), x);
  const Floats power = nearest_whole(x * floats(1.44269504f));
  x = fma(power, floats(-0.693359375f), x);  // ln 2, in two parts
  x = fma(power, floats(2.12194440e-4f), x);
  Floats sum = floats(1.0f / 720);
  for (const float term : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = fma(sum, x, floats(term));
  return times_power_of_2(sum, power);
}

// Of numbers in vectors of 16; the logarithm of the sum of their exponentials.
float softmax(float* scores, int64_t length) {
  Floats highest = floats(-INFINITY), sum = floats(0);
  for (int64_t s = 0; s < length; s += 16) highest = max(highest, load(scores + s));
  const Floats most = floats(greatest(highest));
  for (int64_t s = 0; s < length; s += 16) {
    const Floats share = exponential(load(scores + s) - most);
    store(scores + s, share);
    sum = sum + share;
  }
  const Floats whole = floats(total(sum));
  for (int64_t s = 0; s < length; s += 16) store(scores + s, load(scores + s) / whole);
  return greatest(highest) == -INFINITY ? -INFINITY : greatest(highest) + std::log(total(sum));
}

enum Kind { FLOAT32, FLOAT16, BFLOAT16, INT8, INT4 };

// Keys or values, as `kvalign/cache/layer.py` says; keys in 4 bits as `kvalign/memory/memory.py` does.
template <int VECTORS, Kind KIND>
struct Entries {
  static constexpr int64_t dim = 16 * VECTORS;
  static constexpr int64_t bytes = KIND == INT4 ? dim / 2 : KIND == INT8 ? dim + sizeof(float) : dim * (KIND == FLOAT32 ? 4 : 2);
  const char* first;

  Entries from(int64_t slot) const { return {first + slot * bytes}; }

  void prefetch() const {  // the first of them
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(first + i);
  }

  Floats part(int64_t slot, int i) const {  // 16 numbers, of int8 and int4 still without their scale
    const char* one = first + slot * bytes;
    if (KIND == INT4) return from_int4(one + 8 * i) - floats(7.5f);
    if (KIND == INT8) return from_int8(one + 16 * i);
    if (KIND == FLOAT16) return from_float16((const uint8_t*)(one + 32 * i));
    if (KIND == BFLOAT16) return from_bfloat16((const uint8_t*)(one + 32 * i));
    return load((const float*)one + 16 * i);
  }

  Floats scaled(int64_t slot, Floats x) const {
    if (KIND != INT8) return x;
    float scale;
    std::memcpy(&scale, first + slot * bytes + dim, sizeof scale);
    return x * floats(scale);
  }

  Floats read(int64_t slot, int i) const { return scaled(slot, part(slot, i)); }

  void copy(int64_t slot, float* to) const {
    for (int i = 0; i < VECTORS; i++) store(to + 16 * i, read(slot, i));
  }
};

void rotate(float* x, const float* c, const float* s, int64_t num_pairs, float sign = 1) {  // -1: back
  float* other = x + num_pairs;  // the other half; the rest does not rotate
  int64_t j = 0;
  for (; j + 16 <= num_pairs; j += 16) {
    const Floats a = load(x + j), b = load(other + j), sines = load(s + j) * floats(sign);
    store(x + j, a * load(c + j) - b * sines);
    store(other + j, b * load(c + j) + a * sines);
  }
  for (; j < num_pairs; j++) {
    const float a = x[j], b = other[j], sine = s[j] * sign;
    x[j] = a * c[j] - b * sine;
    other[j] = b * c[j] + a * sine;
  }
}

// A key or a value of a multiple of 16 numbers in 8 bits, as `kvalign/cache/int8.py` says.
void encode(const float* x, int64_t dim, char* to) {
  Ints most = ints(0);
  for (int64_t d = 0; d < dim; d += 16) most = max(most, magnitude_bits(load(x + d)));
  const int32_t found = greatest(most);  // it may be a NaN
  float scale;
  std::memcpy(&scale, &found, sizeof scale);
  scale /= 127;
  const Floats divisor = floats(std::max(std::numeric_limits<float>::min(), scale));
  for (int64_t d = 0; d < dim; d += 16) store_int8(to + d, to_ints(load(x + d) / divisor));
  std::memcpy(to + dim, &scale, sizeof scale);
}

// What entries are at a place, [heads, places, dim] and [heads, places]: mean + scale * (what is stored).
struct Tables {
  const float *key_means, *value_means, *key_scales, *value_scales;
  int64_t num_places, num_sinks;  // entries before `num_sinks` are stored as they are

  bool places(int64_t at) const { return key_means && at >= num_sinks; }
  int64_t row(int64_t head, int64_t at) const { return head * num_places + at; }
};

struct Attention {
  const float* query;
  const char *keys, *values;
  const int64_t* places;  // of each row's slots; negative where it has no entry
  float* out;
  float* of_all = nullptr;  // for each query the logarithm of the sum of its exponentials; or not asked for
  const float* bias = nullptr;  // of each row's slots, added to scores; or none
  int64_t num_heads, num_queries, num_slots;  // queries of a head of keys
  float scale;
  Kind kind;
  const float *cosines, *sines, *bases;  // the angles of places, and what to add to keys before; or none
  int64_t num_pairs;
  const float* asking = nullptr;  // the queries as they meet the means of tables
  Tables tables{};
  const float *beside = nullptr, *of_beside = nullptr;  // other attention of each query, and what `of_all` is there; or none
  int64_t row_of_places = 0, row_of_slots = 0, head_of_slots = 0;  // from one to the next; 0: all are alike, or side by side

  template <int VECTORS>
  void place(const float* base, int64_t at, float* key) const {  // at its place among those of its row
    if (base)
      for (int i = 0; i < VECTORS; i++) store(key + 16 * i, load(key + 16 * i) + load(base + 16 * i));
    rotate(key, cosines + at * num_pairs, sines + at * num_pairs, num_pairs);
  }

  // Products of a query with 16 vectors.
  template <int VECTORS, class Part>
  static Floats products(const Floats* x, Part part) {
    Floats sums[16];
    for (int j = 0; j < 16; j++) {
      sums[j] = x[0] * part(j, 0);
      for (int i = 1; i < VECTORS; i++) sums[j] = fma(x[i], part(j, i), sums[j]);
    }
    return totals(sums);
  }

  template <int VECTORS, Kind KIND>
  void head(int64_t h) {  // of all rows
    using Stored = Entries<VECTORS, KIND>;
    constexpr int64_t dim = 16 * VECTORS;
    static constexpr float none[dim] = {};
    const int64_t length = num_slots, own = h % num_heads, row = h / num_heads, *at = places + row * row_of_places;
    const int64_t first_slot = row * row_of_slots + own * head_of_slots;
    const Stored k = Stored{keys}.from(first_slot), v = Stored{values}.from(first_slot);
    const float* q = query + h * num_queries * dim;
    float* to = out + h * num_queries * dim;
    const int64_t filled = (length + 15) / 16 * 16;
    std::vector<float> scores(num_queries * filled, -INFINITY);
    Floats x[VECTORS];
    const bool moves = KIND != FLOAT32 || num_pairs;
    std::vector<float> placed(moves ? KEYS * dim : 0);
    const float* base = bases ? bases + own * dim : nullptr;
    const float* add = bias ? bias + row * num_slots : nullptr;
    for (int64_t first = 0; first < length; first += KEYS) {
      const int64_t end = std::min(first + KEYS, length);
      Entries<VECTORS, FLOAT32> seen{k.from(first).first};
      if (moves) {
        for (int64_t s = first; s < end; s++) {
          if (at[s] < 0) continue;
          k.copy(s, &placed[(s - first) * dim]);
          place<VECTORS>(base, at[s], &placed[(s - first) * dim]);
        }
        seen.first = (const char*)placed.data();
      }
      for (int64_t s = first; s < end; s += 16) {
        const int64_t num = std::min(end - s, BLOCK);
        const float* means[16];
        float scales[16], of_block[16];
        if (tables.key_means)
          for (int64_t j = 0; j < 16; j++) {
            const int64_t place = at[s + std::min(j, num - 1)], in_table = tables.row(own, place);
            means[j] = tables.places(place) ? tables.key_means + in_table * dim : none;
            scales[j] = tables.places(place) ? tables.key_scales[in_table] : 1;
          }
        for (int64_t r = 0; r < num_queries; r++) {
          for (int i = 0; i < VECTORS; i++) x[i] = load(q + r * dim + 16 * i);
          const auto key = [&](int j, int i) { return seen.part(s - first + std::min<int64_t>(j, num - 1), i); };
          Floats sums = products<VECTORS>(x, key);
          if (tables.key_means) {
            const float* asks = asking + (h * num_queries + r) * dim;
            for (int i = 0; i < VECTORS; i++) x[i] = load(asks + 16 * i);
            const auto mean = [&](int j, int i) { return load(means[j] + 16 * i); };
            sums = fma(sums, load(scales), products<VECTORS>(x, mean));
          }
          store(of_block, sums * floats(scale));
          for (int64_t j = 0; j < num; j++)
            if (at[s + j] >= 0) scores[r * filled + s + j] = of_block[j] + (add ? add[s + j] : 0);
        }
      }
    }
    for (int64_t r = 0; r < num_queries; r++) {
      const float sum = softmax(&scores[r * filled], filled);
      if (of_all) of_all[h * num_queries + r] = sum;
    }
    std::memset(to, 0, num_queries * dim * sizeof(float));
    for (int64_t first = 0; first < length; first += KEYS)
      for (int64_t r = 0; r < num_queries; r++) {
        for (int i = 0; i < VECTORS; i++) x[i] = load(to + r * dim + 16 * i);
        for (int64_t s = first; s < std::min(first + KEYS, length); s++) {
          if (at[s] < 0) continue;
          float share = scores[r * filled + s];
          if (tables.places(at[s])) {
            const int64_t in_table = tables.row(own, at[s]);
            const float* mean = tables.value_means + in_table * dim;
            for (int i = 0; i < VECTORS; i++) x[i] = fma(floats(share), load(mean + 16 * i), x[i]);
            share *= tables.value_scales[in_table];
          }
          const Floats scaled = v.scaled(s, floats(share));
          for (int i = 0; i < VECTORS; i++) x[i] = fma(scaled, v.part(s, i), x[i]);
        }
        for (int i = 0; i < VECTORS; i++) store(to + r * dim + 16 * i, x[i]);
      }
    if (beside)
      for (int64_t r = h * num_queries; r < (h + 1) * num_queries; r++) merge<VECTORS>(r);
  }

  template <int VECTORS>
  void merge(int64_t r) const {  // as if both had been one attention
    const float share = 1 / (1 + std::exp(of_all[r] - of_beside[r]));
    for (int64_t i = 16 * VECTORS * r; i < 16 * VECTORS * (r + 1); i += 16) {
      const Floats own = load(out + i);
      store(out + i, fma(floats(share), load(beside + i) - own, own));
    }
  }

  template <int VECTORS>
  void head(int64_t h) {
    switch (kind) {
      case FLOAT32: return head<VECTORS, FLOAT32>(h);
      case FLOAT16: return head<VECTORS, FLOAT16>(h);
      case BFLOAT16: return head<VECTORS, BFLOAT16>(h);
      case INT8: return head<VECTORS, INT8>(h);
      case INT4: return;  // no slots of a cache
    }
  }

  template <int VECTORS>
  void run(int64_t num_rows) {
    auto heads = [](int64_t begin, int64_t end, void* self) {
      auto& all = *(Attention*)self;
      for (int64_t h = begin; h < end; h++) all.head<VECTORS>(h);
    };
    const int64_t products = num_queries * num_slots * 16 * VECTORS;
    torch_parallel_for(0, num_rows * num_heads, FEW / products + 1, heads, this);
  }
};

// Entries of one token of each row, as they are stored: without the means and scales of their places and corrected
// by a network, or keys without their rotation and base; any of them may be missing.
struct Writing {
  struct Part {  // keys, or values
    char* slots;
    const float *entry, *mean, *scale, *weight, *bias;
    int64_t row, head, row_of_slots, head_of_slots;  // from one to the next; of slots in bytes
  } parts[2];
  const float *hidden_weight, *hidden_bias, *cosines, *sines, *bases;
  const int64_t *slot, *place;
  int64_t num_places, num_rows, num_heads, dim, num_hidden, num_pairs;
  bool has_tables, is_int8;

  static float product(const float* a, const float* b, int64_t num) {  // of a multiple of 16
    Floats sum = floats(0);
    for (int64_t i = 0; i < num; i += 16) sum = fma(load(a + i), load(b + i), sum);
    return total(sum);
  }

  void run() const {
    const int64_t num = num_heads * dim, bytes = is_int8 ? dim + sizeof(float) : dim * sizeof(float);
    std::vector<float> both(2 * num), hidden(num_hidden);
    for (int64_t row = 0; row < num_rows; row++) {
      for (int i = 0; i < 2; i++)
        for (int64_t h = 0; h < num_heads; h++) {
          const Part& part = parts[i];
          const float* from = part.entry + row * part.row + h * part.head;
          float* x = &both[i * num + h * dim];
          std::memcpy(x, from, dim * sizeof(float));
          const int64_t at = h * num_places + place[row];
          for (int64_t d = 0; has_tables && d < dim; d++) x[d] = (x[d] - part.mean[at * dim + d]) / part.scale[at];
        }
      for (int64_t j = 0; j < num_hidden; j++)
        hidden[j] = std::max(product(hidden_weight + j * 2 * num, both.data(), 2 * num) + hidden_bias[j], 0.0f);
      for (int i = 0; i < 2; i++)
        for (int64_t h = 0; h < num_heads; h++) {
          const Part& part = parts[i];
          float* x = &both[i * num + h * dim];
          for (int64_t n = h * dim; num_hidden && n < (h + 1) * dim; n++)
            x[n - h * dim] += product(part.weight + n * num_hidden, hidden.data(), num_hidden) + part.bias[n];
          if (i == 0) rotate(x, cosines + place[row] * num_pairs, sines + place[row] * num_pairs, num_pairs, -1);
          for (int64_t d = 0; i == 0 && bases && d < dim; d++) x[d] -= bases[h * dim + d];
          char* to = part.slots + row * part.row_of_slots + h * part.head_of_slots + *slot * bytes;
          if (is_int8) encode(x, dim, to);
          else std::memcpy(to, x, bytes);
        }
    }
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

int32_t rank_of(float x) {  // a greater number has a greater one
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}

float of_rank(int32_t rank) {
  const int32_t bits = rank < 0 ? rank ^ 0x7fffffff : rank;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// A number that so many of these reach, or up to `slack` more, in vectors of 16; or, where some are equal, as few more
// as can be. None is a NaN, and so many are not -inf.
float reached_by(const float* numbers, int64_t length, int64_t num, int64_t slack) {
  Floats most = floats(-INFINITY), least = floats(INFINITY);
  for (int64_t i = 0; i < length; i += 16) most = max(load(numbers + i), most);
  for (int64_t i = 0; i < num; i += 16) least = min(load(numbers + i), least);
  float all[16];
  store(all, least);
  int64_t low = rank_of(*std::min_element(all, all + 16)), high = rank_of(greatest(most)) + int64_t{1};
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    const Floats reached = floats(of_rank(middle));
    int64_t found = 0;
    for (int64_t i = 0; i < length; i += 16) found += num_at_least(load(numbers + i), reached);
    if (found >= num && found <= num + slack) return of_rank(middle);
    (found > num ? low : high) = middle;
  }
  return of_rank(low);
}

// Finds the best so many of numbers that come in vectors of 16, or up to `slack` more, in their order; -inf is none.
struct Best {
  std::vector<float> worths;
  std::vector<int32_t> found;
  int64_t num, slack, room, end;
  float least;  // what a number must reach

  void begin(int64_t most, int64_t more = 0) {
    num = most, slack = more, room = 4 * (num + slack), end = 0, least = std::numeric_limits<float>::lowest();
    found.resize(room + 32), worths.resize(room + 32);
  }

  void see(Floats worth, int64_t first) {  // none is a NaN
    end += store_at_least(&found[end], &worths[end], lanes() + ints(first), worth, floats(least));
    if (end >= room) keep();
  }

  void keep() {
    if (end <= num + slack) return;
    std::fill(&worths[end], &worths[end] + 16, -INFINITY);
    const float last = reached_by(worths.data(), end, num, slack);
    int64_t kept = 0;
    for (int64_t i = 0; i < end; i += 16)
      kept += store_at_least(&found[kept], &worths[kept], load_bytes(&found[i]), load(&worths[i]), floats(last));
    end = kept, least = std::nextafter(last, INFINITY);
    for (int64_t over = kept - num - slack, i = kept - 1; over > 0; i--) {  // of equal ones, the first
      if (worths[i] > last) continue;
      std::copy(&found[i + 1], &found[end], &found[i]), std::copy(&worths[i + 1], &worths[end], &worths[i]);
      end--, over--;
    }
  }

  std::vector<int32_t>& all() {
    keep();
    found.resize(end);
    return found;
  }

  std::vector<int32_t>& of(const std::vector<float>& numbers, int64_t most) {
    begin(most);
    for (size_t i = 0; i < numbers.size(); i += 16) see(load(&numbers[i]), i);
    return all();
  }
};

struct Candidate {
  float worth;
  int64_t slot, age;
};

constexpr float FINE = 0.3352f / 0.996f;  // the distance of 16 levels, relative to that of four (`kvalign/memory/memory.py`)

struct Search {
  const float *queries, *bases, *worths, *turn;  // `turn`: [D, D], of queries that meet the sketch
  const uint8_t *sketch, *scales;
  const char *fine_keys, *keys, *values;
  const float* added;  // to the scores of each query, [B, H, G, T]
  const int64_t *newest, *since, *oldest;
  float *found_keys, *found_values;
  int64_t* ages;
  bool* visible;
  int64_t num_heads, num_queries, num_tokens, num_slots;  // queries of a head of keys, tokens that ask
  int64_t num_ages, near, num_estimated, num_scored, num_compared, num_recalled;
  Kind kind;
  bool rows_are_alike;  // one row of `since`, `oldest` and `now` for all
  float alike;
  // How the queries see what is found, as kernel.py says of `Placing`; or nobody asks.
  float *out = nullptr, *log_sums = nullptr;
  const float *key_bases, *far, *age_bias, *cosines, *sines;
  const int64_t* now;
  Tables tables{};
  int64_t num_pairs, first_place, most_apart, room;
  float bias;

  // A query, and how it meets a sketch: turned, and rounded to 8 bits, by fours of its numbers.
  template <int VECTORS>
  struct Asked {
    const float* query;
    float added, of_base;  // to its scores with keys, and with a sketch
    float turned[16 * VECTORS];
    int32_t fours[4 * VECTORS];
    float scale, middle;  // score = scale * (sum of products - middle) * scale of a key + of_base

    Asked(const float* query, float added, const float* base, const float* turn) : query(query), added(added) {
      constexpr int64_t dim = 16 * VECTORS;
      Floats products = floats(0), sums[VECTORS];
      for (auto& sum : sums) sum = floats(0);
      for (int i = 0; i < VECTORS; i++) products = fma(load(query + 16 * i), load(base + 16 * i), products);
      of_base = total(products) + added;
      for (int64_t j = 0; j < dim; j++)
        for (int i = 0; i < VECTORS; i++) sums[i] = fma(floats(query[j]), load(turn + j * dim + 16 * i), sums[i]);
      Ints most = ints(0), sum = ints(0);
      for (int i = 0; i < VECTORS; i++) {
        store(turned + 16 * i, sums[i]);
        most = max(most, magnitude_bits(sums[i]));
      }
      const int32_t found = greatest(most);  // it may be a NaN
      std::memcpy(&scale, &found, sizeof scale);
      scale /= 127;
      for (int i = 0; i < VECTORS; i++) {
        const Ints whole = to_ints(sums[i] * floats(scale > 0 ? 1 / scale : 0));
        store_int8(fours + 4 * i, whole);
        sum = sum + whole;
      }
      middle = 1.5f * total(sum);
    }
  };

  // What 16 keys of a sketch may count for the queries: of each the greatest.
  template <int VECTORS>
  static Floats estimate(const std::vector<Asked<VECTORS>>& all, const uint8_t* block, const uint8_t* scale) {
    Ints fours[4 * VECTORS];
    for (int c = 0; c < 4 * VECTORS; c++) fours[c] = quarters(load_bytes(block + 64 * (c / 4)), c % 4);
    Floats most = floats(-INFINITY), of_keys = from_float16(scale);
    for (const auto& query : all) {
      const Floats sum = to_floats(dot<2, 4 * VECTORS>(fours, query.fours, 0));
      const Floats score = (sum - floats(query.middle)) * floats(query.scale);
      most = max(fma(score, of_keys, floats(query.of_base)), most);  // none is a NaN
    }
    return most;
  }

  // The scores of keys in slots, in vectors of 16: of each the greatest that a query gives it. Those of 4 bits have
  // scales apart.
  template <int VECTORS, Kind KIND>
  static void scores(const std::vector<Asked<VECTORS>>& all, Entries<VECTORS, KIND> x, const uint16_t* scale_of,
                     const std::vector<int32_t>& slots, std::vector<float>& out) {
    constexpr int64_t AHEAD = 32;
    const int64_t num = slots.size();
    out.assign((num + 15) / 16 * 16, -INFINITY);
    Floats x_of[VECTORS];
    std::vector<Floats> sums(16 * all.size());
    for (int64_t j = 0; j < std::min(AHEAD, num); j++) x.from(slots[j]).prefetch();
    for (int64_t first = 0; first < num; first += 16) {
      for (int64_t j = first + AHEAD; j < std::min(first + AHEAD + 16, num); j++) x.from(slots[j]).prefetch();
      uint16_t halves[16] = {};
      for (int64_t j = first; KIND == INT4 && j < std::min(first + 16, num); j++) halves[j - first] = scale_of[slots[j]];
      const Floats scales = from_float16((const uint8_t*)halves) * floats(FINE);
      for (int64_t j = 0; j < 16; j++) {
        const int64_t one = slots[std::min(first + j, num - 1)];
        for (int i = 0; i < VECTORS; i++) x_of[i] = x.part(one, i);
        for (size_t r = 0; r < all.size(); r++) {
          const float* q = KIND == INT4 ? all[r].turned : all[r].query;
          Floats sum = load(q) * x_of[0];
          for (int i = 1; i < VECTORS; i++) sum = fma(load(q + 16 * i), x_of[i], sum);
          sums[16 * r + j] = x.scaled(one, sum);
        }
      }
      for (size_t r = 0; r < all.size(); r++) {
        Floats found = totals(&sums[16 * r]);
        found = KIND == INT4 ? fma(found, scales, floats(all[r].of_base)) : found + floats(all[r].added);
        store(&out[first], max(found, load(&out[first])));
      }
    }
    std::fill(out.begin() + num, out.end(), -INFINITY);
  }

  template <int VECTORS, Kind KIND>
  void tokens(int64_t begin, int64_t end) const {  // of all rows and heads
    using Stored = Entries<VECTORS, KIND>;
    constexpr int64_t dim = 16 * VECTORS;
    std::vector<float> of_slots, apart, worth;
    std::vector<bool> is_unsaid;
    std::vector<Asked<VECTORS>> all;
    std::vector<Candidate> found;
    std::vector<int32_t> slots;
    Best best;
    for (int64_t i = begin; i < end; i++) {
      const int64_t head = i / num_tokens, t = i % num_tokens, row = head / num_heads;
      const int64_t of_row = rows_are_alike ? 0 : row, of_token = of_row * num_tokens + t;
      const float* add_to = added + head * num_queries * num_tokens + t;
      const float* query = queries + (head * num_queries * num_tokens + t) * dim;
      const Stored k = Stored{keys}.from(head * num_slots), v = Stored{values}.from(head * num_slots);
      const int64_t last = newest[of_row] % num_slots, after = since[of_token], farthest = oldest[of_token];
      auto age = [&](int64_t slot) { return (slot > last ? last + num_slots - slot : last - slot) + after; };
      auto is_lost = [&](int64_t age) { return age > near && age <= farthest; };
      auto worth_of = [&](int64_t age) { return worths[num_ages - 1 - age]; };
      // 1. What the lost entries may count by 2 bits, in blocks of 16 slots.
      all.clear();
      for (int64_t r = 0; r < num_queries; r++)
        all.emplace_back(query + r * num_tokens * dim, add_to[r * num_tokens], bases + head * dim, turn);
      best.begin(num_estimated, num_estimated / 8);
      const auto see = [&](int64_t slot, const float* add, int64_t num_blocks) {
        const int64_t at = head * num_slots + slot;
        const uint8_t *block = sketch + at * (dim / 4), *scale = scales + at * 2;
        Floats least = floats(best.least);
        for (int64_t end = slot + 16 * num_blocks; slot < end; slot += 16, block += 4 * dim, scale += 32, add += 16) {
          const Floats worth = estimate<VECTORS>(all, block, scale) + load(add);
          if (!num_at_least(worth, least)) continue;
          best.see(worth, slot);
          least = floats(best.least);
        }
      };
      for (int64_t slot = 0; slot < num_slots;) {
        float by_age[16];
        const int64_t first = age(slot), newest = age(slot + 15), end = slot <= last ? last + 1 : num_slots;
        const bool in_turn = first - newest == 15;  // but where the ring ends
        int64_t num_blocks = 1;
        if (in_turn && first <= farthest && newest > near) {  // all are lost, and of some blocks more
          num_blocks = std::min((end - slot) / 16, (newest - near + 15) / 16);
          see(slot, worths + num_ages - 1 - first, num_blocks);
        } else if (!in_turn || (first > near && newest <= farthest)) {
          for (int64_t j = 0; j < 16; j++) by_age[j] = is_lost(age(slot + j)) ? worth_of(age(slot + j)) : -INFINITY;
          see(slot, by_age, 1);
        }
        slot += 16 * num_blocks;
      }
      // 2. The best of them by 4 bits, and of those their worth, in the order of time.
      slots = best.all();
      const auto best_of_slots = [&](auto entries, int64_t num) -> std::vector<int32_t>& {
        scores(all, entries, (const uint16_t*)scales + head * num_slots, slots, of_slots);
        for (size_t j = 0; j < slots.size(); j++) of_slots[j] += worth_of(age(slots[j]));
        return best.of(of_slots, num);
      };
      const Entries<VECTORS, INT4> fine{fine_keys};
      for (int32_t& j : best_of_slots(fine.from(head * num_slots), num_scored)) j = slots[j];
      slots = best.found;
      found.clear();
      for (const int32_t j : best_of_slots(k, num_compared)) found.push_back({of_slots[j], slots[j], age(slots[j])});
      const auto is_newer = [&](const Candidate& one) { return one.slot <= last; };  // than those beyond it
      std::rotate(found.begin(), std::find_if_not(found.begin(), found.end(), is_newer), found.end());
      // 3. Of those, the best that no newer one says again.
      keys_apart(k, found, apart);
      worth.assign((found.size() + 15) / 16 * 16, -INFINITY);
      for (size_t j = 0; j < found.size(); j++) worth[j] = found[j].worth;
      is_unsaid.assign(found.size(), false);
      for (bool are_unsaid = false; !are_unsaid;) {
        are_unsaid = true;
        for (const int32_t j : best.of(worth, num_recalled)) {
          if (is_unsaid[j]) continue;
          is_unsaid[j] = !is_said_again<VECTORS>(apart, j, found.size());
          if (!is_unsaid[j]) worth[j] = -INFINITY, are_unsaid = false;
        }
      }
      const auto& kept = best.found;
      const int64_t missing = num_recalled - kept.size();
      for (const int32_t j : kept) v.from(found[j].slot).prefetch();
      for (int64_t j = 0; j < num_recalled; j++) {
        const int64_t to = i * num_recalled + j;
        const Candidate one = j < missing ? Candidate{0, 0, 0} : found[kept[j - missing]];
        ages[to] = one.age;
        visible[to] = j >= missing;
        k.copy(one.slot, found_keys + to * dim);
        v.copy(one.slot, found_values + to * dim);
      }
      if (out) attend<VECTORS>(all, i, now ? now[of_token] : 0);
    }
  }

  // What the queries of one token and head of keys see of what they found.
  template <int VECTORS>
  void attend(const std::vector<Asked<VECTORS>>& all, int64_t i, int64_t position) const {
    constexpr int64_t dim = 16 * VECTORS;
    const int64_t first = i * num_recalled, head = i / num_tokens, own = head % num_heads;
    std::vector<float> x[2] = {{found_keys + first * dim, found_keys + (first + num_recalled) * dim},
                               {found_values + first * dim, found_values + (first + num_recalled) * dim}};
    std::vector<float> queries, added(num_recalled), of_all(num_queries), seen(num_queries * dim);
    std::vector<int64_t> places(num_recalled, -1);
    double beyond = 0;
    for (int64_t j = num_recalled - 1; j >= 0; j--) {  // what is not there comes first
      const int64_t age = ages[first + j], newer = j == num_recalled - 1 ? -1 : ages[first + j + 1];
      if (!visible[first + j]) break;
      if (far) beyond += std::max<float>(far[age] - (newer < 0 ? 0 : far[newer]), newer < 0 ? 0 : std::min(age - newer, most_apart));
      const int64_t away = far ? std::min((int64_t)std::nearbyint((float)beyond), room) : num_recalled - 1 - j;
      const int64_t at = tables.row(own, now ? std::max(position - near - 1 - away, int64_t{0}) : first_place + j);
      const float* means[] = {tables.key_means, tables.value_means};
      const float* scales[] = {tables.key_scales, tables.value_scales};
      for (int64_t d = 0; key_bases && d < dim; d++) x[0][j * dim + d] += key_bases[own * dim + d];
      for (int part = 0; tables.key_means && part < 2; part++)
        for (int64_t d = 0; d < dim; d++) {
          float& number = x[part][j * dim + d];
          number = means[part][at * dim + d] + number * scales[part][at];
        }
      rotate(&x[0][j * dim], cosines + away * num_pairs, sines + away * num_pairs, num_pairs);
      places[j] = 0, added[j] = bias + (age_bias ? age_bias[age] : 0);
    }
    for (const auto& one : all) queries.insert(queries.end(), one.query, one.query + dim);
    Attention attention{queries.data(), (char*)x[0].data(), (char*)x[1].data(), places.data(), seen.data(), of_all.data(), added.data()};
    attention.num_heads = 1, attention.num_queries = num_queries, attention.num_slots = num_recalled, attention.scale = 1;
    attention.num_pairs = 0, attention.bases = nullptr;
    attention.template head<VECTORS, FLOAT32>(0);
    for (int64_t r = 0; r < num_queries; r++) {
      const int64_t to = (head * num_queries + r) * num_tokens + i % num_tokens;
      std::memcpy(out + to * dim, &seen[r * dim], dim * sizeof(float));
      log_sums[to] = of_all[r];
    }
  }

  template <int VECTORS, Kind KIND>  // the keys of entries less their mean, of length 1
  static void keys_apart(Entries<VECTORS, KIND> k, const std::vector<Candidate>& found, std::vector<float>& apart) {
    constexpr int64_t dim = 16 * VECTORS;
    apart.resize(found.size() * dim);
    Floats mean[VECTORS], x[VECTORS];
    for (auto& part : mean) part = floats(0);
    for (const auto& entry : found)
      for (int i = 0; i < VECTORS; i++) mean[i] = mean[i] + k.read(entry.slot, i);
    for (auto& part : mean) part = part / floats(found.size());
    for (size_t j = 0; j < found.size(); j++) {
      Floats squares = floats(0);
      for (int i = 0; i < VECTORS; i++) {
        x[i] = k.read(found[j].slot, i) - mean[i];
        squares = fma(x[i], x[i], squares);
      }
      const float length = std::max(std::sqrt(total(squares)), 1e-12f);
      for (int i = 0; i < VECTORS; i++) store(&apart[j * dim + 16 * i], x[i] / floats(length));
    }
  }

  template <int VECTORS>
  bool is_said_again(const std::vector<float>& apart, int64_t j, int64_t num) const {
    constexpr int64_t dim = 16 * VECTORS;
    Floats x[VECTORS];
    for (int i = 0; i < VECTORS; i++) x[i] = load(&apart[j * dim + 16 * i]);
    for (int64_t newer = j + 1; newer < num; newer += 16) {
      Floats sums[16];
      for (int64_t k = 0; k < 16; k++) {
        const float* other = &apart[std::min(newer + k, num - 1) * dim];
        sums[k] = x[0] * load(other);
        for (int i = 1; i < VECTORS; i++) sums[k] = fma(x[i], load(other + 16 * i), sums[k]);
      }
      if (num_at_least(totals(sums), floats(std::nextafter(alike, INFINITY)))) return true;
    }
    return false;
  }

  template <int VECTORS>
  void run(int64_t num_rows) {
    auto all = [](int64_t begin, int64_t end, void* self) {
      const auto& search = *(Search*)self;
      switch (search.kind) {
        case FLOAT32: return search.tokens<VECTORS, FLOAT32>(begin, end);
        case FLOAT16: return search.tokens<VECTORS, FLOAT16>(begin, end);
        case BFLOAT16: return search.tokens<VECTORS, BFLOAT16>(begin, end);
        case INT8: return search.tokens<VECTORS, INT8>(begin, end);
        case INT4: return;
      }
    };
    torch_parallel_for(0, num_rows * num_heads * num_tokens, 1, all, this);
  }
};

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

bool is_none(AtenTensorHandle tensor) {  // of what kernel.py says of `_none`
  int64_t num = 0;
  aoti_torch_get_numel(tensor, &num);
  return num == 0;
}

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
  bool is_contiguous = false;
  aoti_torch_is_contiguous(rows, &is_contiguous);
  if (!is_contiguous) return AOTI_TORCH_FAILURE;
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
  for (const auto tensor : {places, query, angles, bases, asking, key_means, value_means, key_scales, value_scales, beside, of_beside}) {
    bool is_contiguous = false;
    aoti_torch_is_contiguous(tensor, &is_contiguous);
    if (!is_contiguous) return AOTI_TORCH_FAILURE;
  }
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

// Of what kernel.py says of `rotate`, in its order.
void rotate_rows(StableIValue* stack, uint64_t, uint64_t) {
  const auto x = tensor(stack[0]), cosines = tensor(stack[1]), sines = tensor(stack[2]);
  const int64_t rows = size_of(x, 0), others = size_of(x, 1), tokens = size_of(x, 2), dim = size_of(x, 3);
  const int64_t num_pairs = size_of(cosines, 2);
  const bool are_alike = size_of(cosines, 0) == 1;
  AtenTensorHandle result = made({rows, others, tokens, dim}, aoti_torch_dtype_float32());
  float* to = data_of(result);
  std::memcpy(to, data_of(x), rows * others * tokens * dim * sizeof(float));
  for (int64_t i = 0; i < rows * others * tokens; i++, to += dim) {
    const int64_t at = ((are_alike ? 0 : i / tokens / others * tokens) + i % tokens) * num_pairs;
    rotate(to, data_of(cosines) + at, data_of(sines) + at, num_pairs);
  }
  give(stack, 3, AOTI_TORCH_SUCCESS, result);
}

// Of what kernel.py says of `find`, in its order.
void find(StableIValue* stack, uint64_t, uint64_t) {
  constexpr int GIVEN = 22;
  AtenTensorHandle given[GIVEN];
  for (int i = 0; i < GIVEN; i++) given[i] = tensor(stack[i]);
  const auto [queries, keys, values, bases, turn, sketch, scales, fine_keys, worths, newest, since, oldest, added, key_means,
              value_means, key_scales, value_scales, key_bases, angles, far, age_bias, now] = given;
  const int64_t* nums = (int64_t*)stack + GIVEN;
  const int64_t rows = size_of(keys, 0), heads = size_of(keys, 1), group = size_of(queries, 2), tokens = size_of(queries, 3);
  const int64_t dim = size_of(queries, 4), num = nums[4];
  AtenTensorHandle found[] = {made({rows, heads, tokens, num, dim}, aoti_torch_dtype_float32()),
                              made({rows, heads, tokens, num, dim}, aoti_torch_dtype_float32()),
                              made({rows, heads, tokens, num}, aoti_torch_dtype_int64()),
                              made({rows, heads, tokens, num}, aoti_torch_dtype_bool()),
                              made({rows, heads, group, tokens, dim}, aoti_torch_dtype_float32()),
                              made({rows, heads, group, tokens}, aoti_torch_dtype_float32())};
  const auto or_none = [](AtenTensorHandle x) { return is_none(x) ? nullptr : data_of(x); };
  Search search{data_of(queries), data_of(bases), data_of(worths), data_of(turn)};
  search.sketch = (uint8_t*)data_of(sketch), search.scales = (uint8_t*)data_of(scales);
  search.fine_keys = (char*)data_of(fine_keys), search.keys = (char*)data_of(keys), search.values = (char*)data_of(values);
  search.kind = kind_of(keys), search.added = data_of(added);
  search.newest = (int64_t*)data_of(newest), search.since = (int64_t*)data_of(since);
  search.oldest = (int64_t*)data_of(oldest);
  search.found_keys = data_of(found[0]), search.found_values = data_of(found[1]);
  search.ages = (int64_t*)data_of(found[2]), search.visible = (bool*)data_of(found[3]);
  search.num_heads = heads, search.num_queries = group, search.num_tokens = tokens;
  search.num_slots = size_of(keys, 2), search.num_ages = size_of(worths, 0);
  search.near = nums[0], search.num_estimated = nums[1], search.num_scored = nums[2], search.num_compared = nums[3];
  search.num_recalled = num, search.first_place = nums[5], search.most_apart = nums[6], search.room = nums[7];
  search.rows_are_alike = size_of(since, 0) == 1;
  double alike, bias;
  std::memcpy(&alike, stack + GIVEN + 8, sizeof alike), std::memcpy(&bias, stack + GIVEN + 9, sizeof bias);
  search.alike = alike, search.bias = bias;
  if (search.first_place >= 0) search.out = data_of(found[4]), search.log_sums = data_of(found[5]);
  search.key_bases = or_none(key_bases), search.far = or_none(far), search.age_bias = or_none(age_bias);
  search.now = (int64_t*)or_none(now), search.num_pairs = size_of(angles, 3);
  search.cosines = data_of(angles), search.sines = search.cosines + size_of(angles, 2) * search.num_pairs;
  if (!is_none(key_means))
    search.tables = {data_of(key_means), data_of(value_means), data_of(key_scales), data_of(value_scales), size_of(key_means, 1), 0};
  const int64_t most = *std::max_element(search.oldest, search.oldest + size_of(oldest, 0) * tokens), behind = search.near + 1;
  bool is_fit = most < search.num_ages && (!search.far || most < size_of(far, 0)) && (!search.age_bias || most < size_of(age_bias, 0));
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
    aoti_torch_library_impl(library, "rotate", rotate_rows);
    aoti_torch_library_impl(library, "find", find);
  }
} registered;

}  // namespace
