// What a method does to the cache, token by token (laneFrames), cut into moments that can be shown.
"use strict";

// Sizes that a method sets itself.
const FIXED = {
  dense: { num_sinks: () => 0, num_evicted: () => 1 },
  window: { num_sinks: () => 0 },
  "discard-half": { num_evicted: (cacheSize, numSinks) => Math.max(1, Math.floor((cacheSize - numSinks) / 2)) },
};

// What is evicted can be placed again where a memory can give it back: kvalign/memory/cache.py.
const canRecall = (method, family) => (family === "rotary" && ["window", "streaming-llm"].includes(method)) ||
  (family !== "alibi" && method === "kvalign");

// The settings with sizes that fit together, as CacheSizes of kvalign/cache/sizes.py asks for, which has `num_kept` for a cache size:
// entries that a token finds. A cache that evicts `after` a step keeps all of its own and sees one more; `before` a step it makes room first.
// `memory` is 0 where there is none, and evicts one entry at a time; `num_recalled` null is a quarter of the cache.
function fitted({ method, family, evicts = "after", cache_size, num_sinks, num_evicted, memory = 0, num_recalled = null }) {
  const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
  const fixed = FIXED[method] || {};
  const size = evicts === "before" ? Math.max(cache_size, 2) : cache_size;
  const kept = evicts === "before" ? size - 1 : size;
  const sinks = fixed.num_sinks ? fixed.num_sinks() : clamp(num_sinks, 0, kept - 1);
  const most = Math.min(kept - sinks - 1, memory); // of the window one entry stays in sight at least
  const recalled = canRecall(method, family) && most > 0 ? clamp(num_recalled ?? Math.floor(kept / 4), 1, most) : 0;
  const evicted = fixed.num_evicted ? fixed.num_evicted(kept, sinks) : clamp(num_evicted, 1, recalled ? 1 : kept - sinks);
  return {
    method, family, evicts, cache_size: size, num_kept: kept, num_sinks: sinks, num_evicted: evicted,
    memory: recalled ? memory : 0, num_recalled: recalled,
  };
}

const stateOfMoved = (method, family) =>
  method === "kvalign" ? "realigned" : { learned: "stale", rotary: "rotated", alibi: "by-slot" }[family];

/* One frame a token: `seen`, the entries it attends to, itself the last of them; `going`, those that are dropped before the
   next token; `stored`, those that stay, at their new positions; `encoded`, tokens that the model ran on; `lost`, the tokens that
   a memory holds. An entry has the place of its token in the stream (`index`), the positions it was `born` at and has `now`, and a `state`.
   A pure function: kvalign/cache/sizes.py and kvalign/methods/reencoding.py (Reencoding.keep) in a few lines. */
function laneFrames(settings, numTokens) {
  const fit = fitted(settings);
  if (fit.memory) return Array.from({ length: numTokens }, (_, token) => memoryFrame(fit, token));
  const { method, family, num_kept, num_sinks, num_evicted } = fit;
  const reencodes = method === "recompute" || method === "discard-half";
  const moved = stateOfMoved(method, family);
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
      lost: [],
    });
    refill = numGoing > 0;
  }
  return frames;
}
window.laneFrames = laneFrames;

const range = (first, end) => Array.from({ length: Math.max(0, end - first) }, (_, i) => first + i);

/* The frame of a token with a memory: kvalign/memory/layer.py, by the sums of kvalign/memory/recall.py. Once something is lost, what
   is taken back stands between sinks and window, in the order of time, and the window is as much shorter. It is so many tokens `away`. */
function memoryFrame({ method, family, num_kept, num_sinks, memory, num_recalled }, token) {
  const numInSight = num_kept - num_sinks - num_recalled;
  const moved = stateOfMoved(method, family);
  const entry = (index, now) => {
    const born = Math.min(index, num_kept);
    return { index, born, now, state: born === now ? "in-place" : moved };
  };
  const end = token - numInSight; // of what the window has lost
  const lost = token > num_kept ? range(Math.max(num_sinks, end - memory), end) : [];
  const back = recalled(lost, num_recalled, token);
  const window = token > num_kept ? range(end, token) : range(num_sinks, token);
  const seen = [...range(0, Math.min(num_sinks, token)), ...back, ...window, token].map(entry);
  for (const one of seen) if (back.includes(one.index)) one.away = token - one.index;
  const isFull = token >= num_kept;
  const going = isFull ? window.filter((index) => index <= end) : [];
  const stored = isFull
    ? [...seen.slice(0, num_sinks), ...range(end + 1, token + 1).map((index, i) => entry(index, num_kept - numInSight + i))]
    : seen;
  return { token, seen, going, stored, encoded: 1, lost };
}

// Which tokens come back, the oldest first. A model's queries say; here chance does, the same each time, and newer ones are likelier.
function recalled(lost, num, token) {
  const drawn = lost.map((index) => [Math.log(chance(token, index)) * (token - index), index]);
  return drawn.sort(([a], [b]) => b - a).slice(0, num).map(([, index]) => index).sort((a, b) => a - b);
}

// Above 0 and below 1, of two whole numbers.
function chance(a, b) {
  let x = Math.imul(a + 1, 0x9e3779b1) ^ Math.imul(b + 1, 0x85ebca6b);
  for (const factor of [0x2c1b3c6d, 0x297a2d39]) x = Math.imul(x ^ (x >>> 15), factor);
  return ((x >>> 0) + 0.5) / 2 ** 32;
}

/* Where entries lie: kvalign/cache/ring.py. One frame a token: the token that each slot `held`, the `slot` of the new one, and the token that it was
   written `over`. */
function ringFrames(settings, frames) {
  const { num_kept, num_sinks } = fitted(settings);
  const size = num_kept + 1;
  let held = [];
  return frames.map(({ token }) => {
    const slot = token < num_sinks ? token : num_sinks + ((token - num_sinks) % (size - num_sinks));
    const over = held[slot];
    held = [...held];
    held[slot] = token;
    return { held, slot, over, size };
  });
}
window.ringFrames = ringFrames;

// Two moments a token that makes others go: it arrives, then they leave. The end of `dense` is a moment, too. Each has what a memory holds,
// or else the ring.
function momentsOf(settings, numTokens) {
  const frames = laneFrames(settings, numTokens);
  const rings = settings.memory ? [] : ringFrames(settings, frames);
  let numGone = 0;
  const moments = frames.flatMap((frame, i) => {
    const { lost, going } = frame;
    const arrives = { kind: "arrives", frame, entries: frame.seen, numGone, lost, ring: rings[i] };
    if (!going.length) return [arrives];
    numGone += going.length;
    const after = [...lost, ...going].slice(-settings.memory);
    return [arrives, { kind: "leave", frame, entries: frame.stored, numGone, lost: after, ring: rings[i] }];
  });
  if (frames.length < numTokens) moments.push({ ...moments[moments.length - 1], kind: "stops" });
  return moments;
}
