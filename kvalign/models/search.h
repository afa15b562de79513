// The search of a memory, for `kernel.cpp`, and attention over what it finds. `kvalign/memory/memory.py` says what it
// finds, `kvalign/memory/sketch.py` how keys lie in few bits.

#pragma once

#include "alike.h"
#include "attention.h"
#include "best.h"

namespace {

constexpr float FINE = 0.3352f / 0.996f;  // the distance of 16 levels, relative to that of four (`kvalign/memory/sketch.py`)
constexpr int64_t PAGE = 2048;  // entries that are put in order together, as `kvalign/memory/sketch.py` says

struct Search {
  const float *queries, *bases, *worths, *turn;  // `turn`: [D, D], of queries that meet the sketch
  const uint8_t *sketch, *scales, *means, *mean_scales, *spreads;
  const bool* is_ordered;
  const char *fine_keys, *keys, *values;
  const float* added;  // to the scores of each query, [B, H, G, T]
  const int64_t *newest, *since, *oldest;
  float *found_keys, *found_values;
  int64_t* ages;
  bool* visible;
  int64_t num_heads, num_queries, num_tokens, num_slots;  // queries of a head of keys, tokens that ask
  int64_t num_pages, num_blocks, num_ages, near, num_estimated, num_scored, num_compared, num_recalled;
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
    int32_t fours[4 * VECTORS];
    int8_t halves[(VECTORS + 3) / 4][64] = {};  // the same by eights of its numbers, as `fine` has them
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
  static Floats estimate(const std::vector<Asked<VECTORS>>& all, const uint8_t* block, const uint8_t* scale,
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

  // The scores of keys in these places, in vectors of 16: of each the greatest that a query gives it. Those of 4 bits have
  // scales apart.
  template <int VECTORS, Kind KIND>
  static void scores(const std::vector<Asked<VECTORS>>& all, Entries<VECTORS, KIND> x,
                     const std::vector<int32_t>& places, std::vector<float>& out) {
    constexpr int64_t AHEAD = 32;
    constexpr int CHUNKS = (VECTORS + 3) / 4, REST = 8 * VECTORS - 32 * (CHUNKS - 1);
    const int64_t num = places.size();
    out.assign((num + 15) / 16 * 16, -INFINITY);
    std::vector<Floats> sums(16 * all.size());
    for (int64_t j = 0; j < std::min(AHEAD, num); j++) x.from(places[j]).prefetch();
    for (int64_t first = 0; first < num; first += 16) {
      for (int64_t j = first + AHEAD; j < std::min(first + AHEAD + 16, num); j++) x.from(places[j]).prefetch();
      uint16_t halves_of[16] = {};
      for (int64_t j = first; KIND == INT4 && j < std::min(first + 16, num); j++) halves_of[j - first] = x.half(places[j], 0);
      for (int64_t j = 0; j < 16; j++) {
        const int64_t one = places[std::min(first + j, num - 1)];
        if (KIND == INT4) {
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
        } else {
          Floats x_of[VECTORS];
          for (int i = 0; i < VECTORS; i++) x_of[i] = x.part(one, i);
          for (size_t r = 0; r < all.size(); r++) {
            Floats sum = load(all[r].query) * x_of[0];
            for (int i = 1; i < VECTORS; i++) sum = fma(load(all[r].query + 16 * i), x_of[i], sum);
            sums[16 * r + j] = x.scaled(one, sum);
          }
        }
      }
      const Floats scales = from_float16((const uint8_t*)halves_of) * floats(FINE);
      for (size_t r = 0; r < all.size(); r++) {
        const auto& query = all[r];
        Floats found = totals(&sums[16 * r]);
        if (KIND == INT4)
          found = fma((found - floats(7.5f * query.sum)) * floats(query.scale), scales, floats(query.of_base));
        else
          found = found + floats(query.added);
        store(&out[first], max(found, load(&out[first])));
      }
    }
    std::fill(out.begin() + num, out.end(), -INFINITY);
  }

  // The entries of a row and head, as a token meets them.
  template <int VECTORS>
  struct View {
    const Search& of;
    int64_t row, head, last, after, farthest;  // slot of the newest, tokens after it, age of the oldest that is lost
    Entries<VECTORS, INT4> fine;
    const uint8_t *blocks, *scales;

    View(const Search& of, int64_t head, int64_t t) : of(of), row(head / of.num_heads), head(head) {
      const int64_t of_row = of.rows_are_alike ? 0 : row, of_token = of_row * of.num_tokens + t;
      last = of.newest[of_row] % of.num_slots, after = of.since[of_token], farthest = of.oldest[of_token];
      fine = Entries<VECTORS, INT4>{of.fine_keys}.from(head * of.num_slots);
      blocks = of.sketch + head * of.num_slots * 4 * VECTORS, scales = of.scales + head * of.num_slots * 2;
    }

    int64_t age(int64_t slot) const { return (slot > last ? last + of.num_slots - slot : last - slot) + after; }
    bool is_lost(int64_t age) const { return age > of.near && age <= farthest; }
    float worth_of(int64_t age) const { return of.worths[of.num_ages - 1 - age]; }
    int64_t slot_of(int64_t entry) const { return entry - entry % PAGE + fine.slot(entry); }
    bool is_in_order(int64_t page) const { return page < of.num_pages && of.is_ordered[row * of.num_pages + page]; }

    // Whether it is in order and behind the window; what is forgotten of it is left out when ages are asked for.
    bool is_behind(int64_t page) const {
      if (!is_in_order(page)) return false;
      const int64_t newest = age((page + 1) * PAGE - 1);
      return age(page * PAGE) - newest == PAGE - 1 && newest > of.near;
    }
    bool is_lost_page(int64_t page) const { return is_behind(page) && age((page + 1) * PAGE - 1) <= farthest; }

    float worth_in(int64_t slot) const {
      const int64_t old = age(slot);
      return is_lost(old) ? worth_of(old) : -INFINITY;
    }

    Floats worth_of_page(int64_t page) const { return floats(worth_of(age(page * PAGE) - PAGE / 2)); }  // its middle's
  };

  // The blocks, of the pages in order, whose mean promises most.
  template <int VECTORS>
  void find_blocks(const std::vector<Asked<VECTORS>>& all, const View<VECTORS>& view, Best& best, std::vector<int32_t>& blocks) const {
    std::vector<int64_t> lost;
    for (int64_t page = 0; page < num_pages; page++)
      if (view.is_lost_page(page)) lost.push_back(page);
    const bool are_few = (int64_t)lost.size() * PAGE <= num_blocks * BLOCK;
    best.begin(num_blocks, num_blocks / 8);
    for (const int64_t page : lost) {
      const int64_t first = (view.head * num_pages + page) * (PAGE / BLOCK);
      const Floats worth = view.worth_of_page(page);
      for (int64_t j = 0; j < PAGE / BLOCK; j += 16) {
        const int64_t at = first + j;
        Floats found = worth;
        if (!are_few) found = found + estimate<VECTORS>(all, means + at * 4 * VECTORS, mean_scales + at * 2, spreads + at * 2);
        best.see(found, page * (PAGE / BLOCK) + j);
      }
    }
    blocks = best.all();
  }

  // What the entries of these blocks may count by 2 bits.
  template <int VECTORS>
  void see_blocks(const std::vector<Asked<VECTORS>>& all, const View<VECTORS>& view, const std::vector<int32_t>& blocks, Best& best) const {
    constexpr int64_t BYTES = 64 * VECTORS;
    for (size_t j = 0; j < blocks.size(); j++) {
      if (j + 8 < blocks.size()) {
        for (int64_t line = 0; line < BYTES; line += 64) __builtin_prefetch(view.blocks + blocks[j + 8] * BYTES + line);
        __builtin_prefetch(view.scales + blocks[j + 8] * 2 * BLOCK);
      }
      const int64_t block = blocks[j];
      const Floats found = estimate<VECTORS>(all, view.blocks + block * BYTES, view.scales + block * 2 * BLOCK);
      best.see(found + view.worth_of_page(block * BLOCK / PAGE), block * BLOCK);
    }
  }

  // The same of the lost entries of other pages, in blocks of 16.
  template <int VECTORS>
  void see_others(const std::vector<Asked<VECTORS>>& all, const View<VECTORS>& view, Best& best) const {
    const auto see = [&](int64_t entry, const float* add, int64_t num) {
      const uint8_t *block = view.blocks + entry * 4 * VECTORS, *scale = view.scales + entry * 2;
      Floats least = floats(best.least);
      for (int64_t end = entry + 16 * num; entry < end; entry += 16, block += 64 * VECTORS, scale += 32, add += 16) {
        const Floats worth = estimate<VECTORS>(all, block, scale) + load(add);
        if (!num_at_least(worth, least)) continue;
        best.see(worth, entry);
        least = floats(best.least);
      }
    };
    for (int64_t entry = 0; entry < num_slots;) {
      const int64_t page = entry / PAGE, of_page = page < num_pages ? (page + 1) * PAGE : num_slots;
      if (view.is_behind(page)) {
        entry = of_page;
        continue;
      }
      float by_age[16];
      const int64_t first = view.age(entry), newest = view.age(entry + 15);
      const int64_t end = entry <= view.last ? std::min(view.last + 1, of_page) : of_page;
      const bool in_turn = first - newest == 15 && !view.is_in_order(page);  // but where the ring ends
      int64_t num = 1;
      if (in_turn && first <= view.farthest && newest > near) {  // all are lost, and of some blocks more
        num = std::min((end - entry) / 16, (newest - near + 15) / 16);
        see(entry, worths + num_ages - 1 - first, num);
      } else if (!in_turn || (first > near && newest <= view.farthest)) {
        for (int64_t j = 0; j < 16; j++)
          by_age[j] = view.worth_in(view.is_in_order(page) ? view.slot_of(entry + j) : entry + j);
        see(entry, by_age, 1);
      }
      entry += 16 * num;
    }
  }

  template <int VECTORS, Kind KIND>
  void tokens(int64_t begin, int64_t end) const {  // of all rows and heads
    using Stored = Entries<VECTORS, KIND>;
    constexpr int64_t dim = 16 * VECTORS;
    std::vector<float> of_slots, worth, taken[2];
    Apart<VECTORS> apart;
    for (auto& part : taken) part.resize(num_recalled * dim);
    std::vector<int64_t> old(num_recalled);
    std::vector<bool> is_unsaid;
    std::vector<Asked<VECTORS>> all;
    std::vector<Candidate> found;
    std::vector<int32_t> blocks, entries, slots;
    Best best;
    for (int64_t i = begin; i < end; i++) {
      const int64_t head = i / num_tokens, t = i % num_tokens;
      const View<VECTORS> view(*this, head, t);
      const float* add_to = added + head * num_queries * num_tokens + t;
      const float* query = queries + (head * num_queries * num_tokens + t) * dim;
      const Stored k = Stored{keys}.from(head * num_slots), v = Stored{values}.from(head * num_slots);
      // 1. What lost entries may count by 2 bits.
      all.clear();
      for (int64_t r = 0; r < num_queries; r++)
        all.emplace_back(query + r * num_tokens * dim, add_to[r * num_tokens], bases + head * dim, turn);
      find_blocks(all, view, best, blocks);
      const int64_t most = std::max(num_scored, std::min(num_estimated, (view.farthest - near) / 4));
      best.begin(most, most > num_scored ? most / 8 : 0);
      see_blocks(all, view, blocks, best);
      see_others(all, view, best);
      // 2. The best of them by 4 bits, if they are more than a few, and of those by their worth, in the order of time.
      entries = best.all();
      const auto best_of = [&](auto stored, const std::vector<int32_t>& places, int64_t num, auto slot) -> std::vector<int32_t>& {
        scores(all, stored, places, of_slots);
        for (size_t j = 0; j < places.size(); j++) of_slots[j] += view.worth_in(slot(places[j]));
        return best.of(of_slots, num);
      };
      const auto slot_of = [&](int64_t entry) { return view.slot_of(entry); };
      if (most > num_scored) {
        for (int32_t& j : best_of(view.fine, entries, num_scored, slot_of)) j = entries[j];
        std::swap(entries, best.found);
      }
      slots.clear();
      for (const int32_t j : entries) slots.push_back(slot_of(j));
      found.clear();
      for (const int32_t j : best_of(k, slots, num_compared, [](int64_t slot) { return slot; }))
        found.push_back({of_slots[j], slots[j], view.age(slots[j])});
      const auto is_before = [](const Candidate& one, const Candidate& other) { return one.slot < other.slot; };
      if (num_pages) std::sort(found.begin(), found.end(), is_before);
      const auto is_newer = [&](const Candidate& one) { return one.slot <= view.last; };  // than those beyond it
      std::rotate(found.begin(), std::find_if_not(found.begin(), found.end(), is_newer), found.end());
      // 3. Of those, the best that no newer one says again.
      apart.of(k, found);
      worth.assign((found.size() + 15) / 16 * 16, -INFINITY);
      for (size_t j = 0; j < found.size(); j++) worth[j] = found[j].worth;
      is_unsaid.assign(found.size(), false);
      for (bool are_unsaid = false; !are_unsaid;) {
        are_unsaid = true;
        for (const int32_t j : best.of(worth, num_recalled)) {
          if (is_unsaid[j]) continue;
          is_unsaid[j] = !apart.is_said_again(j, alike);
          if (!is_unsaid[j]) worth[j] = -INFINITY, are_unsaid = false;
        }
      }
      const auto& kept = best.found;
      const int64_t missing = num_recalled - kept.size();
      for (const int32_t j : kept) v.from(found[j].slot).prefetch();
      for (int64_t j = 0; j < num_recalled; j++) {
        const Candidate one = j < missing ? Candidate{0, 0, -1} : found[kept[j - missing]];
        old[j] = one.age;
        k.copy(one.slot, &taken[0][j * dim]);
        v.copy(one.slot, &taken[1][j * dim]);
      }
      if (out) {
        attend<VECTORS>(all, i, now ? now[(rows_are_alike ? 0 : view.row) * num_tokens + t] : 0, taken, old);
        continue;
      }
      const int64_t to = i * num_recalled;
      for (int64_t j = 0; j < num_recalled; j++) ages[to + j] = std::max(old[j], int64_t{0}), visible[to + j] = old[j] >= 0;
      std::copy(taken[0].begin(), taken[0].end(), found_keys + to * dim);
      std::copy(taken[1].begin(), taken[1].end(), found_values + to * dim);
    }
  }

  // What the queries of one token and head of keys see of what they found.
  template <int VECTORS>
  void attend(const std::vector<Asked<VECTORS>>& all, int64_t i, int64_t position, std::vector<float>* x,
              const std::vector<int64_t>& ages) const {
    constexpr int64_t dim = 16 * VECTORS;
    const int64_t head = i / num_tokens, own = head % num_heads;
    std::vector<float> queries, added(num_recalled), of_all(num_queries), seen(num_queries * dim);
    std::vector<int64_t> places(num_recalled, -1);
    double beyond = 0;
    for (int64_t j = num_recalled - 1; j >= 0; j--) {  // what is not there comes first
      const int64_t age = ages[j], newer = j == num_recalled - 1 ? -1 : ages[j + 1];
      if (age < 0) break;
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

}  // namespace
