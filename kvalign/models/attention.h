// Attention of one query of each row, for `kernel.cpp`: entries as they are stored, at their places.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <sys/mman.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "vectors.h"

namespace {

constexpr int64_t BLOCK = 16;  // numbers of a vector
constexpr int64_t FEW = 1 << 17;  // multiplications that one thread does sooner than several
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

// Keys or values, as `kvalign/cache/layer.py` says; keys in 4 bits as `kvalign/memory/sketch.py` does.
template <int VECTORS, Kind KIND>
struct Entries {
  static constexpr int64_t dim = 16 * VECTORS;
  static constexpr int64_t bytes = KIND == INT4 ? dim / 2 + 4 : KIND == INT8 ? dim + sizeof(float) : dim * (KIND == FLOAT32 ? 4 : 2);
  const char* first;

  Entries from(int64_t slot) const { return {first + slot * bytes}; }

  void prefetch() const {  // the first of them
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(first + i);
    if (KIND == INT4) __builtin_prefetch(first + bytes - 1);  // it may end in another line
  }

  void fetch() const {  // the same from the disk, without waiting for it
    constexpr uintptr_t PAGE_LEN = 4096;
    const uintptr_t page = (uintptr_t)first / PAGE_LEN * PAGE_LEN;
    madvise((void*)page, (uintptr_t)first + bytes - page, MADV_WILLNEED);
  }

  Floats part(int64_t slot, int i) const {  // 16 numbers, of int8 still without their scale
    const char* one = first + slot * bytes;
    if (KIND == INT8) return from_int8(one + 16 * i);
    if (KIND == FLOAT16) return from_float16((const uint8_t*)(one + 32 * i));
    if (KIND == BFLOAT16) return from_bfloat16((const uint8_t*)(one + 32 * i));
    return load((const float*)one + 16 * i);
  }

  uint16_t half(int64_t entry, int i) const {  // of those behind its numbers: its scale, its slot
    uint16_t x;
    std::memcpy(&x, first + entry * bytes + dim / 2 + 2 * i, sizeof x);
    return x;
  }

  int64_t slot(int64_t entry) const { return half(entry, 1); }

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

// The same of a kind that is known when it runs.
template <int VECTORS>
struct Stored {
  const char* first;
  Kind kind;
  bool are_on_disk = false;

  template <typename Do>
  auto as(Do what) const {
    switch (kind) {
      case FLOAT16: return what(Entries<VECTORS, FLOAT16>{first});
      case BFLOAT16: return what(Entries<VECTORS, BFLOAT16>{first});
      case INT8: return what(Entries<VECTORS, INT8>{first});
      default: return what(Entries<VECTORS, FLOAT32>{first});
    }
  }

  Stored from(int64_t slot) const {
    return {as([&](auto x) { return x.from(slot).first; }), kind, are_on_disk};
  }
  void prefetch(int64_t slot) const {
    as([&](auto x) { are_on_disk ? x.from(slot).fetch() : x.from(slot).prefetch(); });
  }
  void copy(int64_t slot, float* to) const {
    as([&](auto x) { x.copy(slot, to); });
  }
  const float* read(int64_t slot, float* room) const {  // where it is not in floats, it is copied there
    if (kind == FLOAT32) return (const float*)from(slot).first;
    copy(slot, room);
    return room;
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

}  // namespace
