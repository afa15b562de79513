// The cache in words: what happens in a moment, and what the tags on its cells say.
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
  stale: "Nothing corrects their keys and values: they still tell of the positions they were born at. They are stale.",
  rotated: "Their keys stay as they were written: scores depend on differences of positions alone, and those have not changed.",
  "by-slot": "Nothing stored has to change: ALiBi counts the distance between places anew at every step.",
  realigned: "The aligner makes their keys and values fit the positions they have now: a table when attention reads them, a network in the buffer.",
};

// What happens in a moment, in words.
function told({ kind, frame, entries }, settings) {
  const { method, evicts, cache_size, num_sinks } = settings;
  const { token, seen, going, stored, encoded } = frame;
  if (settings.memory && going.length) return toldOfMemory({ kind, frame, entries }, settings);
  if (kind === "stops") return `Token ${token + 1} does not fit: the context length, ${seen.length} here, is reached. The stream stops.`;
  if (kind === "arrives") {
    const numStale = seen.filter((entry) => entry.state === "stale").length;
    const stale = numStale ? `, ${numStale} of them stale` : "";
    let text = `Token ${token} arrives at position ${seen.length - 1} and attends to ${count(seen.length, "entry", "entries")}${stale}. `;
    if (encoded > 1) text += `All ${encoded} tokens are encoded anew, at the positions they have now. `;
    if (going.length) {
      const full = evicts === "before" ? `All ${cache_size} places are taken` : method === "discard-half" ? "The cache is full" : `The cache keeps ${cache_size}`;
      const what = method === "discard-half" ? `half of the window, ${named(going)}, has` : `${named(going)} ${going.length === 1 ? "has" : "have"}`;
      return `${text}${full}: ${what} to go${evicts === "before" ? ` before token ${token + 1} comes` : ""}.`;
    }
    return text + (token ? "There is room: nothing is evicted." : "The cache was empty.");
  }
  const who = entries.slice(num_sinks).map((entry) => entry.index);
  const text = `${named(going)} ${going.length === 1 ? "is" : "are"} evicted; ${named(who)} ${who.length === 1 ? "moves" : "move"} ` +
    `${going.length === 1 ? "one place" : `${going.length} places`} left. `;
  const again = "No key or value is moved: the tokens that stay are encoded anew, together with the next one.";
  const state = stored[stored.length - 1].state;
  const first = evicts === "before" ? `To make room for token ${token + 1}, ${text}` : text;
  return first[0].toUpperCase() + first.slice(1) + (state === "reencoded" ? again : AFTER[state]);
}

// The same once a memory takes what the window loses.
function toldOfMemory({ kind, frame, entries }, { num_sinks, num_recalled, evicts, cache_size, num_kept }) {
  const { token, seen, going, lost, stored } = frame;
  const goes = `${named(going)} ${going.length === 1 ? "goes" : "go"} to the memory`;
  if (kind === "leave") {
    const back = lost.length ? "What was taken back stays in the memory: the next token asks for itself. " : "";
    const who = named(entries.slice(num_sinks).map((entry) => entry.index));
    const moves = `${who} ${stored.length - num_sinks === 1 ? "moves" : "move"} one place left. `;
    return `${goes[0].toUpperCase()}${goes.slice(1)}. ${back}${who[0].toUpperCase()}${moves.slice(1)}${AFTER[stored[stored.length - 1].state]}`;
  }
  const back = seen.filter((entry) => entry.away).map((entry) => entry.index);
  const asked = back.length ? `, ${back.length} of them taken back from the memory: ${listed(back)}` : "";
  const text = `Token ${token} arrives at position ${seen.length - 1} and attends to ${count(seen.length, "entry", "entries")}${asked}. `;
  if (back.length) return `${text}Next, ${goes}.`;
  const full = evicts === "before" ? `All ${cache_size} places are taken` : `The cache keeps ${num_kept}`;
  return `${text}${full}: ${goes}, and from now on each token takes ${num_recalled} back.`;
}

// What a memory holds in a moment, in words.
function kept({ lost }, { num_sinks }) {
  const isFull = lost[0] > num_sinks;
  return lost.length ? `${count(lost.length, "token")}${isFull ? ", as many as it has room for: older ones are forgotten" : ""}.` : "nothing is lost yet.";
}

// What the buffer does in a moment, in words.
function written({ kind, frame, entries, buffer }, { method, num_sinks, family }) {
  if (buffer.copied) return "The room at the end, a quarter of the cache's size, is used up: what is kept is copied to the front.";
  if (kind !== "leave") return `Entry ${frame.token} is written at the end, once. Attention reads one slice, in the box.`;
  const who = named(entries.slice(num_sinks).map((entry) => entry.index));
  const stay = `${who[0].toUpperCase()}${who.slice(1)} ${entries.length - num_sinks === 1 ? "stays" : "stay"} where written`;
  const aligned = method === "kvalign" ? " (a network writes them anew there)" : "";
  if (!num_sinks) return `${stay}${aligned}: the slice begins later.`;
  const turned = family === "rotary" ? ", turned to follow" : "";
  return `${stay}${aligned}; ${num_sinks === 1 ? "the sink is" : "the sinks are"} written in front of them again${turned}.`;
}

// What a tag on a cell says: a sign, a word, and the legend's sentence.
const TAGS = {
  sink: ["⚓\uFE0E", "sink", "one of the first entries, never evicted: large models lean on them"],
  new: ["+", "new", "the token that comes in"],
  going: ["✕", "goes", "is evicted next"],
  aside: ["↓", "aside", "goes to the memory next"],
  recalled: ["↑", "recalled", "taken back from the memory for this token alone, in place of the window's oldest entries"],
  stale: ["≠", "stale", "its place has changed, but its key and value still hold the position it was born at"],
  rotated: ["↻", "exact", "its key stays as written: only differences of positions count, and the sinks are turned to follow"],
  "by-slot": ["#", "by place", "holds no position: ALiBi goes by the place it is in"],
  realigned: ["✓", "realigned", "a trained aligner makes its key and value fit the position it has now"],
  reencoded: ["=", "anew", "encoded again at the position it has now: exact, for the work of a whole step"],
  "in-place": ["", "", "stands where it was born"],
};

function tagOf(entry, moment, { num_sinks: numSinks, memory }) {
  if (entry.away) return "recalled";
  if (moment.kind === "arrives" && moment.frame.going.includes(entry.index)) return memory ? "aside" : "going";
  if (moment.kind === "arrives" && entry.index === moment.frame.token) return "new";
  return entry.now < numSinks ? "sink" : entry.state;
}
