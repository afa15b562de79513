// The cache in words: the events of a moment, and the tags on its cells.
"use strict";

const count = (n, word, words = `${word}s`) => (n === 1 ? `1 ${word}` : `${n} ${words}`);

function named(indices) {
  const [first, last] = [indices[0], indices[indices.length - 1]];
  if (first === last) return `entry ${first}`;
  return `entries ${first} ${last === first + 1 ? "and" : "to"} ${last}`;
}

// `tokens 3, 5 and 9`.
function listed(indices) {
  const last = indices[indices.length - 1];
  return indices.length === 1 ? `token ${last}` : `tokens ${indices.slice(0, -1).join(", ")} and ${last}`;
}

const AFTER = {
  stale: "Nothing corrects their keys and values, which still belong to their original positions: they are stale.",
  rotated: "Their keys stay unchanged: scores depend only on differences of positions, and those have not changed.",
  "by-slot": "Nothing stored has to change: ALiBi computes the distances between slots at every step.",
  realigned: "The aligner corrects their keys and values for their new positions: a table when attention reads them, a network where they lie.",
};

// The events of a moment, in words.
function told({ kind, frame, entries }, settings) {
  const { method, evicts, cache_size, num_sinks } = settings;
  const { token, seen, going, stored, encoded } = frame;
  if (settings.memory && going.length) return toldOfMemory({ kind, frame, entries }, settings);
  if (kind === "stops") return `Token ${token + 1} does not fit: the context length, here ${seen.length}, is reached. The stream stops.`;
  if (kind === "arrives") {
    const numStale = seen.filter((entry) => entry.state === "stale").length;
    const stale = numStale ? `, ${numStale} of them stale` : "";
    let text = `Token ${token} arrives at position ${seen.length - 1} and attends to ${count(seen.length, "entry", "entries")}${stale}. `;
    if (encoded > 1) text += `All ${encoded} tokens are encoded again, at their new positions. `;
    if (going.length) {
      const full = evicts === "before" ? `All ${cache_size} slots are full` : method === "discard-half" ? "The cache is full" : `The cache keeps ${cache_size}`;
      const what = method === "discard-half" ? `half of the window, ${named(going)}, must` : `${named(going)} must`;
      return `${text}${full}: ${what} be evicted${evicts === "before" ? ` before token ${token + 1} comes` : ""}.`;
    }
    return text + (token ? "There is room: nothing is evicted." : "The cache was empty.");
  }
  const who = entries.slice(num_sinks).map((entry) => entry.index);
  const text = `${named(going)} ${going.length === 1 ? "is" : "are"} evicted; ${named(who)} ${who.length === 1 ? "moves" : "move"} ` +
    `${going.length === 1 ? "one place" : `${going.length} places`} left. `;
  const again = "No key or value is moved: the remaining tokens are encoded again, together with the next one.";
  const state = stored[stored.length - 1].state;
  const first = evicts === "before" ? `To make room for token ${token + 1}, ${text}` : text;
  return first[0].toUpperCase() + first.slice(1) + (state === "reencoded" ? again : AFTER[state]);
}

// The same with a memory, which takes the entries that leave the window.
function toldOfMemory({ kind, frame, entries }, { num_sinks, num_recalled, evicts, cache_size, num_kept }) {
  const { token, seen, going, lost, stored } = frame;
  const goes = `${named(going)} ${going.length === 1 ? "goes" : "go"} to the memory`;
  if (kind === "leave") {
    const back = lost.length ? "Entries that were taken back stay in the memory: the next token makes its own choice. " : "";
    const who = named(entries.slice(num_sinks).map((entry) => entry.index));
    const moves = `${who} ${stored.length - num_sinks === 1 ? "moves" : "move"} one place left. `;
    return `${goes[0].toUpperCase()}${goes.slice(1)}. ${back}${who[0].toUpperCase()}${moves.slice(1)}${AFTER[stored[stored.length - 1].state]}`;
  }
  const back = seen.filter((entry) => entry.away).map((entry) => entry.index);
  const asked = back.length ? `, ${back.length} of them taken back from the memory: ${listed(back)}` : "";
  const text = `Token ${token} arrives at position ${seen.length - 1} and attends to ${count(seen.length, "entry", "entries")}${asked}. `;
  if (back.length) return `${text}Next, ${goes}.`;
  const full = evicts === "before" ? `All ${cache_size} slots are full` : `The cache keeps ${num_kept}`;
  return `${text}${full}: ${goes}, and from now on each token takes ${num_recalled} back.`;
}

// The contents of a memory in a moment, in words.
function kept({ lost }, { num_sinks }) {
  const isFull = lost[0] > num_sinks;
  return lost.length ? `${count(lost.length, "token")}${isFull ? ", which is all that fits: older ones are forgotten" : ""}.` : "nothing has left the window yet.";
}

// The work of the ring in a moment, in words.
function written({ kind, frame, entries, ring }, { method, num_sinks, family }) {
  if (kind !== "leave") {
    const where = ring.over === undefined ? "into a free slot" : `over entry ${ring.over}, which has gone`;
    return `Entry ${frame.token} is written ${where}. Attention reads all slots as they lie.`;
  }
  const who = named(entries.slice(num_sinks).map((entry) => entry.index));
  const stay = `${who[0].toUpperCase()}${who.slice(1)} ${entries.length - num_sinks === 1 ? "stays" : "stay"} in place`;
  const aligned = method === "kvalign" ? " (a network rewrites them there)" : "";
  const turned = num_sinks && family === "rotary" ? `; the keys of ${num_sinks === 1 ? "the sink" : "the sinks"} are rotated to follow` : "";
  return `${stay}${aligned}${turned}. The slot of what goes is written next.`;
}

// The tags on cells: a sign, a word, and the legend's sentence.
const TAGS = {
  sink: ["⚓\uFE0E", "sink", "one of the first entries, never evicted: many models need them"],
  new: ["+", "new", "the new token"],
  going: ["✕", "goes", "is evicted next"],
  aside: ["↓", "aside", "goes to the memory next"],
  recalled: ["↑", "recalled", "taken back from the memory, only for this token, instead of the window's oldest entries"],
  stale: ["≠", "stale", "its position has changed, but its key and value still belong to the original one"],
  rotated: ["↻", "exact", "its key stays unchanged: only differences of positions count, and the sinks are rotated to follow"],
  "by-slot": ["#", "by slot", "has no position: ALiBi uses its slot"],
  realigned: ["✓", "realigned", "a trained aligner corrects its key and value for its new position"],
  reencoded: ["=", "again", "encoded again at its new position: exact, but as much work as a whole step"],
  "in-place": ["", "", "is at its original position"],
};

function tagOf(entry, moment, { num_sinks: numSinks, memory }) {
  if (entry.away) return "recalled";
  if (moment.kind === "arrives" && moment.frame.going.includes(entry.index)) return memory ? "aside" : "going";
  if (moment.kind === "arrives" && entry.index === moment.frame.token) return "new";
  return entry.now < numSinks ? "sink" : entry.state;
}
