// The best of many numbers, for `search.h`.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

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
// as can be. None is a NaN; it is -inf where fewer are more.
float reached_by(const float* numbers, int64_t length, int64_t num, int64_t slack) {
  Floats most = floats(-INFINITY), least = floats(INFINITY);
  for (int64_t i = 0; i < length; i += 16) most = max(load(numbers + i), most);
  for (int64_t i = 0; i < num; i += 16) least = min(load(numbers + i), least);
  float all[16];
  store(all, least);
  int64_t low = rank_of(*std::min_element(all, all + 16)), high = rank_of(greatest(most)) + int64_t{1};
  for (int round = 0; high - low > 1; round++) {
    int64_t middle = low + (high - low) / 2;
    if (round < 16) {  // half of the way by their size takes fewer, but where it has no end
      const float least = of_rank(low), half = least + (of_rank(high) - least) / 2;
      middle = std::min(std::max<int64_t>(rank_of(half), low + 1), high - 1);
    }
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

  std::vector<int32_t>& of(const float* numbers, int64_t length, int64_t most, int64_t more = 0) {
    begin(most, more);
    if (length > room) least = std::max(least, reached_by(numbers, length, num, num / 8));
    for (int64_t i = 0; i < length; i += 16) see(load(numbers + i), i);
    return all();
  }
};

}  // namespace
