// Writes keys of a memory in few bits, as `kvalign/memory/sketch.py` says that they lie.

#pragma once

#include "attention.h"

namespace {

constexpr int64_t PAGE = 2048;  // entries that are put in order together, as sketch.py says
// Distances of so many even levels that fit a normal distribution of variance 1 best (Max, Quantizing for minimum
// distortion, 1960).
constexpr float STEP_OF_4 = 0.996f, STEP_OF_16 = 0.3352f;

// The nearest of `num` even levels around 0, from 0 on, of 16 numbers; 0 of a NaN.
INLINE void levels(uint8_t* to, Floats x, int num) {
  const Floats level = nearest_whole(x + floats((num - 1) / 2.0f));
  store_int8(to, to_ints(min(max(level, floats(0)), floats(num - 1))));
}

struct Sketching {
  const float *keys, *turn;  // [sets, length, D], [D, D]
  const int64_t* slots;      // [sets, length], or none: an entry is its slot
  uint8_t *numbers, *scales, *fine;  // of all entries of each set; `fine` or none
  int64_t length, first, num_entries;

  template <int VECTORS>
  void write(int64_t set, int64_t j) const {
    constexpr int64_t dim = 16 * VECTORS, BYTES = dim / 2 + 4;
    const int64_t entry = first + j, to = set * num_entries + entry;
    const float* key = keys + (set * length + j) * dim;
    Floats turned[VECTORS], squares = floats(0);
    for (auto& part : turned) part = floats(0);
    for (int64_t d = 0; d < dim; d++)
      for (int i = 0; i < VECTORS; i++) turned[i] = fma(floats(key[d]), load(turn + d * dim + 16 * i), turned[i]);
    for (const auto& part : turned) squares = fma(part, part, squares);
    float size = std::sqrt(total(squares) / dim);  // it may be a NaN, and its scale is one then
    if (size < 1e-30f) size = 1e-30f;
    uint8_t scale[32], level[16];
    store_float16(scale, floats(std::min(size * STEP_OF_4, 65504.0f)));
    std::memcpy(scales + 2 * to, scale, 2);
    uint8_t* own = fine ? fine + to * BYTES : nullptr;
    for (int i = 0; i < VECTORS; i++) {
      uint32_t words[4];
      levels(level, turned[i] * floats(1 / (size * STEP_OF_4)), 4);
      std::memcpy(words, level, 16);
      words[0] |= words[1] << 2 | words[2] << 4 | words[3] << 6;
      std::memcpy(numbers + ((to / BLOCK * VECTORS + i) * BLOCK + to % BLOCK) * 4, words, 4);
      if (!own) continue;
      uint64_t halves[2];
      levels(level, turned[i] * floats(1 / (size * STEP_OF_16)), 16);
      std::memcpy(halves, level, 16);
      halves[0] |= halves[1] << 4;
      std::memcpy(own + 8 * i, halves, 8);
    }
    if (!own) return;
    const int16_t slot = (slots ? slots[set * length + j] : entry) % PAGE;
    std::memcpy(own + dim / 2, scale, 2), std::memcpy(own + dim / 2 + 2, &slot, 2);
  }

  template <int VECTORS>
  void run(int64_t num_sets) {
    auto keys = [](int64_t begin, int64_t end, void* self) {
      const auto& all = *(Sketching*)self;
      for (int64_t n = begin; n < end; n++) all.write<VECTORS>(n / all.length, n % all.length);
    };
    torch_parallel_for(0, num_sets * length, 64, keys, this);
  }
};

}  // namespace
