// The search of a memory, for `kernel.cpp`, and attention over what it finds. `kvalign/memory/memory.py` says what it
// finds, `kvalign/memory/sketch.py` how keys lie in few bits.

#pragma once

#include "alike.h"
#include "attention.h"
#include "best.h"
#include "scores.h"

namespace {

struct Search {
  const float *queries, *bases, *worths, *turn;  // `turn`: [D, D], of queries that meet the sketch
  const uint8_t *sketch, *scales, *means, *mean_scales, *spreads;
  const bool* is_ordered;
  const char *fine_keys, *keys, *values;
  const int64_t *newest, *since, *oldest;
  float *found_keys, *found_values;
  int64_t* ages;
  bool* visible;
  int64_t num_heads, num_queries, num_tokens, num_slots;  // queries of a head of keys, tokens that ask
  int64_t num_pages, num_blocks, num_ages, near, num_estimated, num_scored, num_compared, num_recalled;
  Kind kind;
  bool are_on_disk;     // keys and values
  bool rows_are_alike;  // one row of `since`, `oldest` and `now` for all
  float alike;
  // How the queries see what is found, as kernel.py says of `Placing`; or nobody asks.
  float *out = nullptr, *log_sums = nullptr;
  const float *key_bases, *far, *age_bias, *cosines, *sines;
  const int64_t* now;
  Tables tables{};
  int64_t num_pairs, first_place, most_apart, room;
  float bias;

  template <int VECTORS>
  void run(int64_t num_rows);
};

// The entries of a row and head, as a token meets them.
template <int VECTORS>
struct View {
  const Search* of;
  int64_t row, head, t, last, after, farthest;  // slot of the newest, tokens after it, age of the oldest that is lost
  int64_t lead;                                 // tokens after the first of those that ask together
  Entries<VECTORS, INT4> fine;
  const uint8_t *blocks, *scales;

  View(const Search& of, int64_t head, int64_t t, int64_t lead)
      : of(&of), row(head / of.num_heads), head(head), t(t), lead(lead) {
    const int64_t of_row = of.rows_are_alike ? 0 : row, of_token = of_row * of.num_tokens + t;
    last = of.newest[of_row] % of.num_slots, after = of.since[of_token], farthest = of.oldest[of_token];
    fine = Entries<VECTORS, INT4>{of.fine_keys}.from(head * of.num_slots);
    blocks = of.sketch + head * of.num_slots * 4 * VECTORS, scales = of.scales + head * of.num_slots * 2;
  }

  int64_t age(int64_t slot) const { return (slot > last ? last + of->num_slots - slot : last - slot) + after; }
  bool is_lost(int64_t age) const { return age > of->near && age <= farthest; }
  float worth_of(int64_t age) const { return of->worths[of->num_ages - 1 - age]; }
  int64_t slot_of(int64_t entry) const { return entry - entry % PAGE + fine.slot(entry); }
  bool is_in_order(int64_t page) const { return page < of->num_pages && of->is_ordered[row * of->num_pages + page]; }

  // Whether it is in order and behind the window of the first token; what is forgotten of it is left out when ages are
  // asked for.
  bool is_behind(int64_t page) const {
    if (!is_in_order(page)) return false;
    const int64_t newest = age((page + 1) * PAGE - 1);
    return age(page * PAGE) - newest == PAGE - 1 && newest - lead > of->near;
  }
  bool is_lost_page(int64_t page) const { return is_behind(page) && age((page + 1) * PAGE - 1) <= farthest; }

  float worth_in(int64_t slot) const {
    const int64_t old = age(slot);
    return is_lost(old) ? worth_of(old) : -INFINITY;
  }

  Floats worth_of_page(int64_t page) const { return floats(worth_of(age(page * PAGE) - PAGE / 2)); }  // its middle's

  void prefetch(int64_t entry) const {  // of 2 bits, 16 of them
    for (int64_t line = 0; line < 64 * VECTORS; line += 64) __builtin_prefetch(blocks + entry * 4 * VECTORS + line);
    __builtin_prefetch(scales + entry * 2);
  }

  // Of entries of pages that are not behind, 16 together: `see` is told the first, as the sketch has them or by slots,
  // what is added to their scores, -inf where one is not lost, and how many such vectors follow one another.
  template <typename See>
  void others(bool by_slot, See see) const {
    for (int64_t entry = 0; entry < of->num_slots;) {
      const int64_t page = entry / PAGE, of_page = page < of->num_pages ? (page + 1) * PAGE : of->num_slots;
      if (is_behind(page)) {
        entry = of_page;
        continue;
      }
      float by_age[16];
      const bool are_slots = by_slot || !is_in_order(page);
      const int64_t first = age(entry), newest = age(entry + 15);
      const int64_t end = entry <= last ? std::min(last + 1, of_page) : of_page;
      const bool in_turn = first - newest == 15 && are_slots;  // but where the ring ends
      int64_t num = 1;
      if (in_turn && first <= farthest && newest > of->near) {  // all are lost, and of some blocks more
        num = std::min((end - entry) / 16, (newest - of->near + 15) / 16);
        see(entry, of->worths + of->num_ages - 1 - first, num);
      } else if (!in_turn || (first > of->near && newest <= farthest)) {
        for (int64_t j = 0; j < 16; j++) by_age[j] = worth_in(are_slots ? entry + j : slot_of(entry + j));
        see(entry, by_age, 1);
      }
      entry += 16 * num;
    }
  }
};

// Searches for tokens of all rows and heads, one after another.
template <int VECTORS>
struct Searcher {
  static constexpr int64_t dim = 16 * VECTORS;
  static constexpr int64_t MOST = 24, FEWEST = 4;  // tokens that ask together
  const Search& of;
  std::vector<Asked<VECTORS>> all;
  std::vector<Candidate> found;  // `num_found` of them
  int64_t num_found;
  std::vector<float> of_places, worth, counted;  // `counted`: 16 from each of `entries` on
  std::vector<int32_t> blocks, places, entries;
  std::vector<bool> is_unsaid;
  Best best;
  Apart<VECTORS> apart;
  // Of tokens that ask together: the first slots of 16, what number it is among these, and worths [tokens, those slots].
  Together<VECTORS> together;
  std::vector<int32_t> firsts, number;
  std::vector<float> worths;

  // What is added to the scores of a query, for what all keys are stored without.
  float added(int64_t head, const float* query) const {
    if (!of.key_bases) return 0;
    Floats products = floats(0);
    for (int i = 0; i < VECTORS; i++)
      products = fma(load(query + 16 * i), load(of.key_bases + head % of.num_heads * dim + 16 * i), products);
    return total(products);
  }

  explicit Searcher(const Search& of) : of(of), found(2 * of.num_compared) {}

  void tokens(int64_t begin, int64_t end) {
    std::vector<float> taken[2];
    for (auto& part : taken) part.resize(of.num_recalled * dim);
    std::vector<int64_t> old(of.num_recalled);
    for (int64_t num, first = begin; first < end; first += num) {
      const int64_t head = first / of.num_tokens, t = first % of.num_tokens;
      num = std::min({end - first, of.num_tokens - t, MOST});
      const bool are_together = num >= FEWEST;
      const Stored<VECTORS> k = Stored<VECTORS>{of.keys, of.kind, of.are_on_disk}.from(head * of.num_slots);
      const Stored<VECTORS> v = Stored<VECTORS>{of.values, of.kind, of.are_on_disk}.from(head * of.num_slots);
      if (are_together) see_others_together(k, head, t, num);
      for (int64_t lead = 0; lead < num; lead++) {
        const View<VECTORS> view(of, head, t + lead, are_together ? lead : 0);
        num_found = 0;
        if (are_together) add_best(view, &worths[lead * 16 * firsts.size()]);
        search_sketch(view, k, are_together);
        take(view, k, v, taken, old);
        give(view, taken, old);
      }
    }
  }

  // The worths of what tokens that ask together have lost outside of pages that are behind, by exact scores.
  void see_others_together(Stored<VECTORS> k, int64_t head, int64_t t, int64_t num) {
    firsts.clear(), number.assign(of.num_slots / 16, -1), together.begin();
    for (int64_t lead = 0; lead < num; lead++)  // a small memory has lost some for a few in the middle alone
      View<VECTORS>(of, head, t + lead, lead).others(true, [&](int64_t slot, const float*, int64_t num) {
        for (const int64_t end = slot + 16 * num; slot < end; slot += 16)
          if (number[slot / 16] < 0) number[slot / 16] = firsts.size(), firsts.push_back(slot);
      });
    for (int64_t lead = 0; lead < num; lead++)
      for (int64_t r = 0; r < of.num_queries; r++) {
        const int64_t row = (head * of.num_queries + r) * of.num_tokens + t + lead;
        together.add(of.queries + row * dim, added(head, of.queries + row * dim));
      }
    const int64_t length = 16 * firsts.size();
    worths.assign(num * length, -INFINITY);
    for (size_t i = 0; i < firsts.size(); i++) together.scores(k.from(firsts[i]), of.num_queries, &worths[16 * i], length);
    std::vector<bool> is_lost(firsts.size());
    for (int64_t lead = 0; lead < num; lead++) {
      float* own = &worths[lead * length];
      is_lost.assign(firsts.size(), false);
      View<VECTORS>(of, head, t + lead, lead).others(true, [&](int64_t slot, const float* add, int64_t num) {
        for (const int64_t end = slot + 16 * num; slot < end; slot += 16, add += 16) {
          const int64_t i = number[slot / 16];
          store(own + 16 * i, load(own + 16 * i) + load(add)), is_lost[i] = true;
        }
      });
      for (size_t i = 0; i < firsts.size(); i++)
        if (!is_lost[i]) store(own + 16 * i, floats(-INFINITY));
    }
  }

  void add_best(const View<VECTORS>& view, const float* own) {
    for (const int32_t j : best.of(own, 16 * firsts.size(), of.num_compared)) find(view, own[j], firsts[j / 16] + j % 16);
  }

  void find(const View<VECTORS>& view, float worth, int64_t slot) {
    found[num_found++] = {worth, slot, view.age(slot)};
  }

  // The best of what the sketch holds: of all lost entries, or of those in pages that are behind.
  void search_sketch(const View<VECTORS>& view, Stored<VECTORS> k, bool of_blocks) {
    std::vector<int64_t> lost;
    for (int64_t page = 0; page < of.num_pages; page++)
      if (view.is_lost_page(page)) lost.push_back(page);
    if (of_blocks && lost.empty()) return;
    // 1. What lost entries may count by 2 bits.
    ask(view);
    find_blocks(view, lost);
    const int64_t most = std::max(of.num_scored, std::min(of.num_estimated, (view.farthest - of.near) / 4));
    entries.clear(), counted.clear();
    count_blocks(view);
    if (!of_blocks) count_others(view);
    best.of(counted.data(), counted.size(), most, most > of.num_scored ? most / 8 : 0);
    for (int32_t& j : best.found) j = entries[j / 16] + j % 16;
    // 2. The best of them by 4 bits, if they are more than a few, and of those by their worth.
    std::swap(places, best.found);
    if (most > of.num_scored) {
      estimates(all, view.fine, places, of_places);
      for (size_t j = 0; j < places.size(); j++) of_places[j] += view.worth_in(view.slot_of(places[j]));
      for (int32_t& j : best.of(of_places.data(), of_places.size(), of.num_scored)) j = places[j];
      std::swap(places, best.found);
    }
    for (int32_t& place : places) place = view.slot_of(place);
    scores(all, k, places, of_places);
    for (size_t j = 0; j < places.size(); j++) of_places[j] += view.worth_in(places[j]);
    for (const int32_t j : best.of(of_places.data(), of_places.size(), of.num_compared)) find(view, of_places[j], places[j]);
  }

  void ask(const View<VECTORS>& view) {
    all.clear();
    for (int64_t r = 0; r < of.num_queries; r++) {
      const int64_t row = (view.head * of.num_queries + r) * of.num_tokens + view.t;
      const float* query = of.queries + row * dim;
      all.emplace_back(query, added(view.head, query), of.bases + view.head * dim, of.turn);
    }
  }

  // The blocks of these pages whose mean promises most.
  void find_blocks(const View<VECTORS>& view, const std::vector<int64_t>& pages) {
    const bool are_few = (int64_t)pages.size() * PAGE <= of.num_blocks * BLOCK;
    best.begin(of.num_blocks, of.num_blocks / 8);
    for (const int64_t page : pages) {
      const int64_t first = (view.head * of.num_pages + page) * (PAGE / BLOCK);
      const Floats worth = view.worth_of_page(page);
      for (int64_t j = 0; j < PAGE / BLOCK; j += 16) {
        const int64_t at = first + j;
        Floats promised = worth;
        if (!are_few)
          promised = promised + estimate<VECTORS>(all, of.means + at * 4 * VECTORS, of.mean_scales + at * 2, of.spreads + at * 2);
        best.see(promised, page * (PAGE / BLOCK) + j);
      }
    }
    blocks = best.all();
  }

  // What the entries of these blocks may count by 2 bits.
  void count_blocks(const View<VECTORS>& view) {
    constexpr int64_t BYTES = 64 * VECTORS;
    counted.resize(16 * blocks.size());
    for (size_t j = 0; j < blocks.size(); j++) {
      if (j + 8 < blocks.size()) view.prefetch(blocks[j + 8] * BLOCK);
      const int64_t block = blocks[j];
      const Floats scores = estimate<VECTORS>(all, view.blocks + block * BYTES, view.scales + block * 2 * BLOCK);
      store(&counted[16 * j], scores + view.worth_of_page(block * BLOCK / PAGE)), entries.push_back(block * BLOCK);
    }
  }

  // The same of the lost entries of other pages.
  void count_others(const View<VECTORS>& view) {
    view.others(false, [&](int64_t entry, const float* add, int64_t num) {
      const uint8_t *block = view.blocks + entry * 4 * VECTORS, *scale = view.scales + entry * 2;
      counted.resize(counted.size() + 16 * num);
      float* to = &counted[counted.size() - 16 * num];
      for (; num > 0; num--, entry += 16, block += 64 * VECTORS, scale += 32, add += 16, to += 16) {
        if (num > 8) view.prefetch(entry + 8 * BLOCK);
        store(to, estimate<VECTORS>(all, block, scale) + load(add)), entries.push_back(entry);
      }
    });
  }

  // Of what was found, the best that no newer one says again, in the order of time; what is missing comes first.
  void take(const View<VECTORS>& view, Stored<VECTORS> k, Stored<VECTORS> v, std::vector<float>* taken,
            std::vector<int64_t>& old) {
    const auto is_better = [](const Candidate& one, const Candidate& other) { return one.worth > other.worth; };
    const int64_t num = std::min(num_found, of.num_compared);
    if (num < num_found) std::nth_element(&found[0], &found[num], &found[0] + num_found, is_better);
    const auto is_older = [](const Candidate& one, const Candidate& other) { return one.age > other.age; };
    if (!std::is_sorted(&found[0], &found[0] + num, is_older)) std::sort(&found[0], &found[0] + num, is_older);
    apart.of(k, found.data(), num);
    worth.assign((num + 15) / 16 * 16, -INFINITY);
    for (int64_t j = 0; j < num; j++) worth[j] = found[j].worth;
    is_unsaid.assign(num, false);
    for (bool are_unsaid = false; !are_unsaid;) {
      are_unsaid = true;
      for (const int32_t j : best.of(worth.data(), worth.size(), of.num_recalled)) {
        if (is_unsaid[j]) continue;
        is_unsaid[j] = !apart.is_said_again(j, of.alike);
        if (!is_unsaid[j]) worth[j] = -INFINITY, are_unsaid = false;
      }
    }
    const auto& kept = best.found;
    const int64_t missing = of.num_recalled - kept.size();
    for (const int32_t j : kept) v.prefetch(found[j].slot);
    for (int64_t j = 0; j < of.num_recalled; j++) {
      const Candidate one = j < missing ? Candidate{0, 0, -1} : found[kept[j - missing]];
      old[j] = one.age;
      k.copy(one.slot, &taken[0][j * dim]);
      v.copy(one.slot, &taken[1][j * dim]);
    }
  }

  void give(const View<VECTORS>& view, std::vector<float>* taken, const std::vector<int64_t>& old) {
    if (of.out) return attend(view, taken, old);
    const int64_t num = of.num_recalled, to = (view.head * of.num_tokens + view.t) * num;
    for (int64_t j = 0; j < num; j++) of.ages[to + j] = std::max(old[j], int64_t{0}), of.visible[to + j] = old[j] >= 0;
    std::copy(taken[0].begin(), taken[0].end(), of.found_keys + to * dim);
    std::copy(taken[1].begin(), taken[1].end(), of.found_values + to * dim);
  }

  // What the queries of a token and head of keys see of what they took back.
  void attend(const View<VECTORS>& view, std::vector<float>* x, const std::vector<int64_t>& ages) const {
    const int64_t num = of.num_recalled, own = view.head % of.num_heads;
    const int64_t position = of.now ? of.now[(of.rows_are_alike ? 0 : view.row) * of.num_tokens + view.t] : 0;
    std::vector<float> queries, added(num), of_all(of.num_queries), seen(of.num_queries * dim);
    std::vector<int64_t> places(num, -1);
    double beyond = 0;
    for (int64_t j = num - 1; j >= 0; j--) {  // what is not there comes first
      const int64_t age = ages[j], newer = j == num - 1 ? -1 : ages[j + 1];
      if (age < 0) break;
      if (of.far)
        beyond += std::max<float>(of.far[age] - (newer < 0 ? 0 : of.far[newer]), newer < 0 ? 0 : std::min(age - newer, of.most_apart));
      const int64_t away = of.far ? std::min((int64_t)std::nearbyint((float)beyond), of.room) : num - 1 - j;
      const int64_t place = of.now ? std::max(position - of.near - 1 - away, int64_t{0}) : of.first_place + j;
      const int64_t at = of.tables.row(own, place);
      const float* means[] = {of.tables.key_means, of.tables.value_means};
      const float* scales[] = {of.tables.key_scales, of.tables.value_scales};
      for (int64_t d = 0; of.key_bases && d < dim; d++) x[0][j * dim + d] += of.key_bases[own * dim + d];
      for (int part = 0; of.tables.key_means && part < 2; part++)
        for (int64_t d = 0; d < dim; d++) {
          float& number = x[part][j * dim + d];
          number = means[part][at * dim + d] + number * scales[part][at];
        }
      rotate(&x[0][j * dim], of.cosines + away * of.num_pairs, of.sines + away * of.num_pairs, of.num_pairs);
      places[j] = 0, added[j] = of.bias + (of.age_bias ? of.age_bias[age] : 0);
    }
    for (int64_t r = 0; r < of.num_queries; r++) {
      const float* query = of.queries + ((view.head * of.num_queries + r) * of.num_tokens + view.t) * dim;
      queries.insert(queries.end(), query, query + dim);
    }
    Attention attention{queries.data(), (char*)x[0].data(), (char*)x[1].data(), places.data(), seen.data(), of_all.data(), added.data()};
    attention.num_heads = 1, attention.num_queries = of.num_queries, attention.num_slots = num, attention.scale = 1;
    attention.num_pairs = 0, attention.bases = nullptr;
    attention.template head<VECTORS, FLOAT32>(0);
    for (int64_t r = 0; r < of.num_queries; r++) {
      const int64_t to = (view.head * of.num_queries + r) * of.num_tokens + view.t;
      std::memcpy(of.out + to * dim, &seen[r * dim], dim * sizeof(float));
      of.log_sums[to] = of_all[r];
    }
  }
};

template <int VECTORS>
void Search::run(int64_t num_rows) {
  const auto tokens = [](int64_t begin, int64_t end, void* self) { Searcher<VECTORS>(*(Search*)self).tokens(begin, end); };
  torch_parallel_for(0, num_rows * num_heads * num_tokens, 1, tokens, this);
}

}  // namespace
