// Which keys of a memory are alike, for `search.h`.

#pragma once

#include "attention.h"
#include "best.h"

namespace {

struct Candidate {
  float worth;
  int64_t slot, age;
};

// Keys of entries less their mean, of length 1 and in 8 bits, each number 128 more, by fours: of each key, and of 16 keys
// together. Their numbers are in an order of their own.
template <int VECTORS>
struct Apart {
  static constexpr int64_t dim = 16 * VECTORS, FOURS = (dim / 4 + 15) / 16 * 16;
  std::vector<const float*> keys;
  std::vector<float> room, by;  // `by`: one over the lengths of keys less their mean
  std::vector<int32_t> own, blocks;
  Floats mean[VECTORS];
  int64_t num;

  Floats part(int64_t j, int i) const { return load(keys[j] + 16 * i) - mean[i]; }

  void of(Stored<VECTORS> k, const Candidate* found, int64_t num_found) {
    constexpr int64_t AHEAD = 16;
    num = num_found;
    const int64_t most = (num + 15) / 16 * 16;
    keys.resize(most), by.resize(most), own.resize(most * FOURS), blocks.resize(most * FOURS);
    if (k.kind != FLOAT32) room.resize(num * dim);
    for (auto& one : mean) one = floats(0);
    for (int64_t j = 0; j < num; j++) {
      if (j + AHEAD < num && !k.are_on_disk) k.prefetch(found[j + AHEAD].slot);
      keys[j] = k.read(found[j].slot, room.data() + (k.kind == FLOAT32 ? 0 : j * dim));
      for (int i = 0; i < VECTORS; i++) mean[i] = mean[i] + load(keys[j] + 16 * i);
    }
    for (int64_t j = num; j < most; j++) keys[j] = keys[num - 1];
    for (auto& one : mean) one = one / floats(num);
    for (int64_t first = 0; first < num; first += 16) {
      Floats squares[16];
      for (int64_t j = 0; j < 16; j++) {
        squares[j] = floats(0);
        for (int i = 0; i < VECTORS; i++) {
          const Floats one = part(first + j, i);
          squares[j] = fma(one, one, squares[j]);
        }
      }
      store(&by[first], floats(1) / max(square_root(totals(squares)), floats(1e-12f)));
      for (int64_t j = first; j < first + 16; j++) {
        Ints whole[(VECTORS + 3) / 4 * 4] = {};
        for (int i = 0; i < VECTORS; i++) whole[i] = to_ints(part(j, i) * floats(127 * by[j]));
        for (int i = 0; i < VECTORS; i += 4) store_uint8(&own[j * FOURS + 4 * i], whole + i);
      }
      for (int64_t c = 0; c < FOURS; c += 16)
        transpose((const float*)&own[first * FOURS + c], FOURS, (float*)&blocks[first * FOURS + 16 * c]);
    }
  }

  // Whether a newer key is as much like this one: by 8 bits, and where these do not decide exactly.
  bool is_said_again(int64_t j, float alike) const {
    constexpr float UNSURE = 0.02f, ONE = 127 * 127;
    int32_t p[FOURS], sum = 0;
    for (int64_t c = 0; c < FOURS; c++) p[c] = own[j * FOURS + c] ^ 0x80808080;
    for (int64_t d = 0; d < 4 * FOURS; d++) sum += ((const int8_t*)p)[d];
    for (int64_t first = (j + 1) / 16 * 16; first < num; first += 16) {
      Ints of_block[FOURS];
      for (int c = 0; c < FOURS; c++) of_block[c] = load_bytes(&blocks[first * FOURS + c * 16]);
      const Floats cosines = to_floats(dot<8, FOURS>(of_block, p, -offset_of(8) * sum));
      if (!num_at_least(cosines, floats((alike - UNSURE) * ONE))) continue;
      float all[16];
      store(all, cosines);
      for (int64_t newer = std::max(first, j + 1); newer < std::min(first + 16, num); newer++)
        if (all[newer - first] >= (alike - UNSURE) * ONE && cosine(j, newer) > alike) return true;
    }
    return false;
  }

  float cosine(int64_t j, int64_t other) const {
    Floats sum = floats(0);
    for (int i = 0; i < VECTORS; i++) sum = fma(part(j, i), part(other, i), sum);
    return total(sum) * by[j] * by[other];
  }
};

// Puts each of many sets of keys in an order in which blocks of 16 are alike: halves them along their longest axis
// until they are blocks.
struct Halving {
  const float* keys;
  int64_t *order, length;

  struct Along {
    int32_t rank, number;
    bool operator<(const Along& other) const { return rank != other.rank ? rank < other.rank : number < other.number; }
  };

  template <int VECTORS>
  static void halve(const float* x, std::vector<Along>& all, int64_t begin, int64_t end) {
    constexpr int64_t dim = 16 * VECTORS;
    const int64_t middle = begin + (end - begin) / 2;
    if (middle - begin < BLOCK) return;
    Floats mean[VECTORS], axis[VECTORS], sums[VECTORS];
    const auto add_up = [&](auto of_key) {  // over all keys, less their mean
      for (auto& part : sums) part = floats(0);
      for (int64_t j = begin; j < end; j++) {
        Floats apart[VECTORS];
        for (int i = 0; i < VECTORS; i++) apart[i] = load(x + all[j].number * dim + 16 * i) - mean[i];
        of_key(apart);
      }
    };
    const auto along = [&](const Floats* apart) {
      Floats sum = axis[0] * apart[0];
      for (int i = 1; i < VECTORS; i++) sum = fma(axis[i], apart[i], sum);
      return total(sum);
    };
    for (auto& part : mean) part = floats(0);
    add_up([&](const Floats* apart) { for (int i = 0; i < VECTORS; i++) sums[i] = sums[i] + apart[i]; });
    for (int i = 0; i < VECTORS; i++) mean[i] = sums[i] / floats(end - begin);
    // The power method, from the axis of the number that differs most on.
    add_up([&](const Floats* apart) { for (int i = 0; i < VECTORS; i++) sums[i] = fma(apart[i], apart[i], sums[i]); });
    float numbers[dim];
    for (int i = 0; i < VECTORS; i++) store(numbers + 16 * i, sums[i]);
    const int64_t most = std::max_element(numbers, numbers + dim) - numbers;
    std::fill(numbers, numbers + dim, 0), numbers[most] = 1;
    for (int i = 0; i < VECTORS; i++) axis[i] = load(numbers + 16 * i);
    for (int round = 0; round < 4; round++) {
      add_up([&](const Floats* apart) {
        const Floats by = floats(along(apart));
        for (int i = 0; i < VECTORS; i++) sums[i] = fma(by, apart[i], sums[i]);
      });
      Floats squares = floats(0);
      for (const auto& part : sums) squares = fma(part, part, squares);
      const float length = std::sqrt(total(squares));
      for (int i = 0; i < VECTORS; i++) axis[i] = sums[i] * floats(length > 0 ? 1 / length : 0);
    }
    int64_t next = begin;
    add_up([&](const Floats* apart) { all[next++].rank = rank_of(along(apart)); });
    std::nth_element(&all[begin], &all[middle], &all[0] + end);
    halve<VECTORS>(x, all, begin, middle);
    halve<VECTORS>(x, all, middle, end);
  }

  template <int VECTORS>
  void run(int64_t num) {
    auto sets = [](int64_t begin, int64_t end, void* self) {
      const auto [keys, order, length] = *(Halving*)self;
      std::vector<Along> all(length);
      for (int64_t n = begin; n < end; n++) {
        for (int32_t j = 0; j < length; j++) all[j].number = j;
        halve<VECTORS>(keys + n * length * 16 * VECTORS, all, 0, length);
        for (int64_t j = 0; j < length; j++) order[n * length + j] = all[j].number;
      }
    };
    torch_parallel_for(0, num, 1, sets, this);
  }
};

}  // namespace
