// What a method does to the cache, token by token (laneFrames), cut into moments that can be shown.
"use strict";

// Sizes that a method sets itself.
const FIXED = {
  dense: { num_sinks: () => 0, num_evicted: () => 1 },
  window: { num_sinks: () => 0 },
  "discard-half": { num_evicted: (cacheSize, numSinks) => Math.max(1, Math.floor((cacheSize - numSinks) / 2)) },
};

// The settings with sizes that fit together, as CacheSizes of kvalign/sizes.py asks for, which has `num_kept` for a cache size: entries
// that a token finds. A cache that evicts `after` a step keeps all of its own and sees one more; `before` a step it makes room first.
function fitted({ method, family, evicts = "after", cache_size, num_sinks, num_evicted }) {
  const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
  const fixed = FIXED[method] || {};
  const size = evicts === "before" ? Math.max(cache_size, 2) : cache_size;
  const kept = evicts === "before" ? size - 1 : size;
  const sinks = fixed.num_sinks ? fixed.num_sinks() : clamp(num_sinks, 0, kept - 1);
  const evicted = fixed.num_evicted ? fixed.num_evicted(kept, sinks) : clamp(num_evicted, 1, kept - sinks);
  return { method, family, evicts, cache_size: size, num_kept: kept, num_sinks: sinks, num_evicted: evicted };
}

/* One frame a token: `seen`, the entries it attends to, itself the last of them; `going`, those that are dropped before the
   next token; `stored`, those that stay, at their new positions; `encoded`, tokens that the model ran on. An entry has the
   place of its token in the stream (`index`), the positions it was `born` at and has `now`, and a `state`.
   A pure function: kvalign/sizes.py and kvalign/methods/base.py (Reencoding.keep) in a few lines. */
function laneFrames(settings, numTokens) {
  const { method, family, num_kept, num_sinks, num_evicted } = fitted(settings);
  const reencodes = method === "recompute" || method === "discard-half";
  const moved = method === "kvalign" ? "realigned" : { learned: "stale", rotary: "rotated", alibi: "by-slot" }[family];
  const frames = [];
  let stored = [];
  let refill = false;
  for (let token = 0; token < numTokens; token++) {
    const isFull = method === "dense" && stored.length > num_kept;
    if (isFull) break; // the context length, here that of the lane
    const seen = [...stored, { index: token, born: stored.length, now: stored.length, state: "in-place" }];
    if (method === "recompute") for (const entry of seen) entry.state = "reencoded";
    const excess = method === "dense" ? 0 : Math.max(0, seen.length - num_kept);
    const numGoing = Math.ceil(excess / num_evicted) * num_evicted;
    const rest = [...seen.slice(0, num_sinks), ...seen.slice(num_sinks + numGoing)];
    stored = rest.map(({ index, born, state }, now) => {
      if (reencodes && numGoing) return { index, born: now, now, state: "reencoded" };
      return { index, born, now, state: reencodes || born === now ? state : moved };
    });
    frames.push({
      token,
      seen,
      going: seen.slice(num_sinks, num_sinks + numGoing).map((entry) => entry.index),
      stored,
      encoded: method === "recompute" || (reencodes && refill) ? seen.length : 1,
    });
    refill = numGoing > 0;
  }
  return frames;
}
window.laneFrames = laneFrames;

/* Where entries lie: kvalign/buffer.py, and how kvalign/cache.py writes the sinks. One frame a token: what the buffer `held`, up to its
   end, with the token and `before` it, and whether what is kept was `copied` to the front for it. What is read are the last of them. */
function bufferFrames(settings, frames) {
  const { num_kept, num_sinks } = fitted(settings);
  const size = num_kept + 1 + Math.max(1, Math.floor((num_kept + 1) / 4));
  let held = [];
  let numGone = 0;
  return frames.map(({ token, seen, going }) => {
    const numStored = seen.length - 1;
    const copied = held.length === size;
    const before = copied ? held.slice(size - numStored) : [...held];
    const sinks = numGone ? seen.slice(0, num_sinks).map((entry) => entry.index) : [];
    before.splice(before.length - numStored, sinks.length, ...sinks);
    held = [...before, token];
    numGone += going.length;
    return { before, held, copied, size };
  });
}
window.bufferFrames = bufferFrames;

// Two moments a token that makes others go: it arrives, then they leave. The end of `dense` is a moment, too.
function momentsOf(settings, numTokens) {
  const frames = laneFrames(settings, numTokens);
  const buffers = bufferFrames(settings, laneFrames(settings, numTokens + 1));
  let numGone = 0;
  let left = false; // whether the moment before was one of leaving: then the copy was its
  const moments = frames.flatMap((frame, i) => {
    const { held, copied, size } = buffers[i];
    const arrives = { kind: "arrives", frame, entries: frame.seen, numGone, buffer: { held, size, copied: copied && !left } };
    left = frame.going.length > 0;
    if (!left) return [arrives];
    numGone += frame.going.length;
    const next = buffers[i + 1];
    return [arrives, { kind: "leave", frame, entries: frame.stored, numGone, buffer: { held: next.before, size, copied: next.copied } }];
  });
  if (frames.length < numTokens) moments.push({ ...moments[moments.length - 1], kind: "stops" });
  return moments;
}
