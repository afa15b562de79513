// The cache in words: what happens in a moment, and what the tags on its cells say.
"use strict";

const count = (n, word, words = `${word}s`) => (n === 1 ? `1 ${word}` : `${n} ${words}`);

function named(indices) {
  const [first, last] = [indices[0], indices[indices.length - 1]];
  if (first === last) return `entry ${first}`;
  return `entries ${first} ${last === first + 1 ? "and" : "to"} ${last}`;
}

const AFTER = {
  stale: "Nothing corrects their keys and values: they still tell of the positions they were born at. They are stale.",
  rotated: "Their keys are rotated from the position they had to the one they have now: exact.",
  "by-slot": "Nothing stored has to change: ALiBi counts the distance between slots anew at every step.",
  realigned: "The aligner changes their keys and values to fit the positions they have now.",
};

// What happens in a moment, in words.
function told({ kind, frame, entries }, settings) {
  const { method, cache_size, num_sinks, family } = settings;
  const { token, seen, going, stored, encoded } = frame;
  if (kind === "stops") return `Token ${token + 1} does not fit: the context length, ${seen.length} here, is reached. The stream stops.`;
  if (kind === "arrives") {
    const numStale = seen.filter((entry) => entry.state === "stale").length;
    const stale = numStale ? `, ${numStale} of them stale` : "";
    let text = `Token ${token} arrives at position ${seen.length - 1} and attends to ${count(seen.length, "entry", "entries")}${stale}. `;
    if (encoded > 1) text += `All ${encoded} tokens are encoded anew, at the positions they have now. `;
    if (going.length && method === "discard-half") return `${text}The cache is full: half of the window, ${named(going)}, has to go.`;
    if (going.length) return `${text}The cache keeps ${cache_size}: ${named(going)} ${going.length === 1 ? "has" : "have"} to go.`;
    return text + (token ? "There is room: nothing is evicted." : "The cache was empty.");
  }
  const who = entries.slice(num_sinks).map((entry) => entry.index);
  const text = `${named(going)} ${going.length === 1 ? "is" : "are"} evicted; ${named(who)} ${who.length === 1 ? "moves" : "move"} ` +
    `${going.length === 1 ? "one place" : `${going.length} places`} left. `;
  const rotated = method === "kvalign" && family === "rotary" ? "Their keys are rotated. " : "";
  const again = "No key or value is moved: the tokens that stay are encoded anew, together with the next one.";
  const state = stored[stored.length - 1].state;
  return text[0].toUpperCase() + text.slice(1) + rotated + (state === "reencoded" ? again : AFTER[state]);
}

// What a tag on a cell says: a sign, a word, and the legend's sentence.
const TAGS = {
  sink: ["⚓\uFE0E", "sink", "one of the first entries, never evicted: large models lean on them"],
  new: ["+", "new", "the token that comes in"],
  going: ["✕", "goes", "is evicted next"],
  stale: ["≠", "stale", "moved, but its key and value still hold the position it was born at"],
  rotated: ["↻", "rotated", "its key is rotated to the position it has now, exactly"],
  "by-slot": ["#", "by slot", "holds no position: ALiBi goes by the slot it is in"],
  realigned: ["✓", "realigned", "its key and value are changed by a trained aligner to fit the position it has now"],
  reencoded: ["=", "anew", "encoded again at the position it has now: exact, for the work of a whole step"],
  "in-place": ["", "", "stands where it was born"],
};

function tagOf(entry, moment, numSinks) {
  if (moment.kind === "arrives" && moment.frame.going.includes(entry.index)) return "going";
  if (moment.kind === "arrives" && entry.index === moment.frame.token) return "new";
  return entry.now < numSinks ? "sink" : entry.state;
}
