// Scores of queries with keys of a memory, for `search.h`: estimated from few bits, or exact.

#pragma once

#include "sketch.h"

namespace {

// A query, and how it meets a sketch: turned, and rounded to 8 bits, by fours of its numbers.
template <int VECTORS>
struct Asked {
  const float* query;
  float added, of_base;  // to its scores with keys, and with a sketch
  int32_t fours[4 * VECTORS];
  int8_t halves[(VECTORS + 3) / 4][64] = {};  // the same by eights of its numbers, as keys in 4 bits have them
  float scale, sum;  // score = scale * (sum of products - middle of a key's numbers * sum) * scale of a key + of_base
  float length;

  Asked(const float* query, float added, const float* base, const float* turn) : query(query), added(added) {
    constexpr int64_t dim = 16 * VECTORS;
    Floats products = floats(0), sums[VECTORS];
    for (auto& sum : sums) sum = floats(0);
    for (int i = 0; i < VECTORS; i++) products = fma(load(query + 16 * i), load(base + 16 * i), products);
    of_base = total(products) + added;
    for (int64_t j = 0; j < dim; j++)
      for (int i = 0; i < VECTORS; i++) sums[i] = fma(floats(query[j]), load(turn + j * dim + 16 * i), sums[i]);
    Ints most = ints(0), all = ints(0);
    products = floats(0);
    for (int i = 0; i < VECTORS; i++) {
      products = fma(sums[i], sums[i], products);
      most = max(most, magnitude_bits(sums[i]));
    }
    const int32_t found = greatest(most);  // it may be a NaN
    std::memcpy(&scale, &found, sizeof scale);
    scale /= 127;
    for (int i = 0; i < VECTORS; i++) {
      const Ints whole = to_ints(sums[i] * floats(scale > 0 ? 1 / scale : 0));
      store_int8(fours + 4 * i, whole);
      std::memcpy(halves[i / 4] + 8 * (i % 4), fours + 4 * i, 8);
      std::memcpy(halves[i / 4] + 32 + 8 * (i % 4), fours + 4 * i + 2, 8);
      all = all + whole;
    }
    sum = total(all);
    length = std::sqrt(total(products));
  }
};

// What 16 keys of a sketch may count for the queries, or means of keys that are so far from there: of each the
// greatest.
template <int VECTORS>
Floats estimate(const std::vector<Asked<VECTORS>>& all, const uint8_t* block, const uint8_t* scale,
                       const uint8_t* spread = nullptr) {
  Ints fours[4 * VECTORS];
  for (int c = 0; c < 4 * VECTORS; c++) fours[c] = quarters(load_bytes(block + 64 * (c / 4)), c % 4);
  Floats most = floats(-INFINITY), of_keys = from_float16(scale);
  for (const auto& query : all) {
    const Floats sum = to_floats(dot<2, 4 * VECTORS>(fours, query.fours, 0));
    const Floats score = (sum - floats(1.5f * query.sum)) * floats(query.scale);
    const Floats best = spread ? fma(from_float16(spread), floats(query.length), floats(query.of_base)) : floats(query.of_base);
    most = max(fma(score, of_keys, best), most);  // none is a NaN
  }
  return most;
}

// The same of single keys in 4 bits, in vectors of 16.
template <int VECTORS>
void estimates(const std::vector<Asked<VECTORS>>& all, Entries<VECTORS, INT4> x, const std::vector<int32_t>& places,
               std::vector<float>& out) {
  constexpr int64_t AHEAD = 32;
  constexpr int CHUNKS = (VECTORS + 3) / 4, REST = 8 * VECTORS - 32 * (CHUNKS - 1);
  const int64_t num = places.size();
  out.assign((num + 15) / 16 * 16, -INFINITY);
  std::vector<Floats> sums(16 * all.size());
  for (int64_t j = 0; j < std::min(AHEAD, num); j++) x.from(places[j]).prefetch();
  for (int64_t first = 0; first < num; first += 16) {
    for (int64_t j = first + AHEAD; j < std::min(first + AHEAD + 16, num); j++) x.from(places[j]).prefetch();
    uint16_t scales[16];
    for (int64_t j = 0; j < 16; j++) {
      const int64_t one = places[std::min(first + j, num - 1)];
      Ints x_of[CHUNKS];
      for (int c = 0; c < CHUNKS; c++) {
        uint8_t bytes[32] = {};
        std::memcpy(bytes, x.from(one).first + 32 * c, c < CHUNKS - 1 ? 32 : REST);
        x_of[c] = halves(bytes);
      }
      for (size_t r = 0; r < all.size(); r++) {
        Ints sum = ints(0);
        for (int c = 0; c < CHUNKS; c++) sum = products(x_of[c], load_bytes(all[r].halves[c]), sum);
        sums[16 * r + j] = to_floats(sum);
      }
      scales[j] = x.half(one, 0);
    }
    const Floats of_keys = from_float16((const uint8_t*)scales) * floats(STEP_OF_16 / STEP_OF_4);
    for (size_t r = 0; r < all.size(); r++) {
      const Floats score = (totals(&sums[16 * r]) - floats(7.5f * all[r].sum)) * floats(all[r].scale);
      store(&out[first], max(fma(score, of_keys, floats(all[r].of_base)), load(&out[first])));  // none is a NaN
    }
  }
  std::fill(out.begin() + num, out.end(), -INFINITY);
}

// And exact ones.
template <int VECTORS>
void scores(const std::vector<Asked<VECTORS>>& all, Stored<VECTORS> keys, const std::vector<int32_t>& places,
            std::vector<float>& out) {
  constexpr int64_t AHEAD = 32;
  const int64_t num = places.size();
  out.assign((num + 15) / 16 * 16, -INFINITY);
  std::vector<Floats> sums(16 * all.size());
  float room[16 * VECTORS];
  for (int64_t j = 0; j < std::min(AHEAD, num); j++) keys.prefetch(places[j]);
  for (int64_t first = 0; first < num; first += 16) {
    for (int64_t j = 0; j < 16; j++) {
      if (first + AHEAD + j < num) keys.prefetch(places[first + AHEAD + j]);
      const float* key = keys.read(places[std::min(first + j, num - 1)], room);
      Floats parts[VECTORS];
      for (int i = 0; i < VECTORS; i++) parts[i] = load(key + 16 * i);
      for (size_t r = 0; r < all.size(); r++) {
        Floats sum = load(all[r].query) * parts[0];
        for (int i = 1; i < VECTORS; i++) sum = fma(load(all[r].query + 16 * i), parts[i], sum);
        sums[16 * r + j] = sum;
      }
    }
    for (size_t r = 0; r < all.size(); r++) {
      const Floats score = totals(&sums[16 * r]) + floats(all[r].added);
      store(&out[first], max(score, load(&out[first])));
    }
  }
  std::fill(out.begin() + num, out.end(), -INFINITY);
}

// Exact scores of the queries of several tokens: a key is read once for all of them.
template <int VECTORS>
struct Together {
  static constexpr int64_t dim = 16 * VECTORS;
  static constexpr int ROWS = 6;      // queries whose sums are in registers
  std::vector<float> queries, added;  // [rows / ROWS, D, ROWS], [rows]

  void begin() { queries.clear(), added.clear(); }

  void add(const float* query, float to_scores) {
    const int64_t row = added.size();
    if (row % ROWS == 0) queries.resize(queries.size() + ROWS * dim, 0);
    for (int64_t d = 0; d < dim; d++) queries[(row / ROWS * dim + d) * ROWS + row % ROWS] = query[d];
    added.push_back(to_scores);
  }

  // Those of 16 keys, one behind another: for each `group` queries the greatest, if it is more than `out` has there, so
  // far from those of the group before.
  void scores(Stored<VECTORS> keys, int64_t group, float* out, int64_t stride) const {
    float part[16 * dim], numbers[16 * dim];  // 16 of each number
    for (int64_t j = 0; j < 16; j++) keys.copy(j, &part[j * dim]);
    for (int i = 0; i < VECTORS; i++) transpose(&part[16 * i], dim, &numbers[16 * 16 * i]);
    const int64_t num = added.size();
    for (int64_t first = 0; first < num; first += ROWS) {
      Floats sums[ROWS];
      for (auto& sum : sums) sum = floats(0);
      const float* query = &queries[first * dim];
      for (int64_t d = 0; d < dim; d++, query += ROWS) {
        const Floats of_keys = load(&numbers[16 * d]);
        for (int r = 0; r < ROWS; r++) sums[r] = fma(floats(query[r]), of_keys, sums[r]);
      }
      for (int64_t r = first; r < std::min(first + ROWS, num); r++) {
        float* to = out + r / group * stride;
        store(to, max(sums[r - first] + floats(added[r]), load(to)));  // none is a NaN
      }
    }
  }
};

}  // namespace
