// The lane: draws moments, animates what is between them, and listens to the controls.
"use strict";

const MOMENT_MS = 1500;
const IN_RING = ["window", "streaming-llm", "kvalign"];
const CELL_PX = { least: 36, most: 104, wordy: 82 };
const ARRIVALS = ["coming", "rising", "hidden"]; // how a cell looks before it is there

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
let settings, moments, at, timer = null;
const cells = new Map(); // by place in the stream

function make(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

const stateOfMoved = (method, family) =>
  method === "kvalign" ? "realigned" : { learned: "stale", rotary: "rotated", alibi: "by-slot" }[family];

/* The moments of a recording, two for a token that makes others go: it arrives, then they leave. The end of `dense` is a moment, too.
   An entry has the place of its token in the stream (`index`), the positions it was `born` at and has `now`, a `state`, and, taken back
   from a memory, the tokens that it is `away`. Each moment has what a memory holds, or else the ring. */
function momentsOf({ frames, method, family, memory }) {
  const moved = stateOfMoved(method, family);
  let numGone = 0;
  const moments = frames.flatMap(({ seen, stored, encoded, held, lost = [], back = [] }, token) => {
    const entries = (list) => list.map(([index, born, now, isAgain]) => ({
      index, born, now, state: isAgain ? "reencoded" : born === now ? "in-place" : moved,
      ...(back.includes(index) ? { away: token - index } : {}),
    }));
    const stay = new Set([...back, ...stored.map(([index]) => index)]);
    const going = seen.map(([index]) => index).filter((index) => !stay.has(index));
    const frame = { token, seen: entries(seen), going, stored: entries(stored), encoded, lost };
    const slot = held?.indexOf(token);
    const ring = held && { held, slot, over: frames[token - 1]?.held[slot] };
    const arrives = { kind: "arrives", frame, entries: frame.seen, numGone, lost, ring };
    if (!going.length) return [arrives];
    numGone += going.length;
    const after = [...lost, ...going].slice(-memory);
    return [arrives, { kind: "leave", frame, entries: frame.stored, numGone, lost: after, ring }];
  });
  if (frames.length < data.num_tokens) moments.push({ ...moments[moments.length - 1], kind: "stops" });
  return moments;
}

// The first moment that has everything to see: something has moved, something has to go, a memory has something to choose from.
function tellingMoment() {
  const some = Math.min(settings.memory, 4 * settings.num_recalled);
  const telling = (moment) => moment.kind === "arrives" && moment.frame.going.length && moment.lost.length >= some &&
    moment.entries.some((entry) => entry.index !== entry.now);
  const found = moments.findIndex(telling);
  return found < 0 ? moments.length - 1 : found;
}

const arrivalOf = (token) => moments.findIndex((moment) => moment.kind === "arrives" && moment.frame.token === token);

// Take another recording; show the arrival of `token`, or else the telling moment.
function choose(recording, token = null) {
  pause();
  settings = recording;
  moments = momentsOf(settings);
  const arrival = arrivalOf(token);
  showSettings();
  for (const cell of cells.values()) cell.remove();
  cells.clear();
  show(arrival < 0 ? tellingMoment() : arrival, false);
}

function showSettings() {
  const { method, family, evicts, cache_size, num_kept, num_sinks, num_evicted, memory, num_recalled } = settings;
  $("method").value = method;
  $("family").value = family;
  $("family").disabled = memory > 0; // with others it may not work
  const sinks = count(num_sinks, "sink");
  $("about").textContent = `${method} ${data.methods[method]}.` +
    ` Here: ${family} positions, a cache of ${cache_size} entries, ${sinks}, ${memory ? `a memory of ${memory} tokens` : `${num_evicted} evicted at once`}.` +
    (memory ? ` It has a memory: each token takes back ${count(num_recalled, "entry", "entries")}.` : "") + (evicts === "after" ? "" :
    ` It evicts before a step, which sees ${count(cache_size, "entry", "entries")}, the new token's with them. KV-Align evicts after a step, and does these steps` +
    ` with --cache-size ${num_kept}.`);
  $("of-away").hidden = !memory || family !== "rotary";
  drawSlots();
  const seen = moments.flatMap((moment) => moment.entries.map((entry) => tagOf(entry, moment, settings)));
  const found = new Set([...seen, ...moments.flatMap((moment) => moment.entries.map((entry) => entry.state))]);
  $("legend").replaceChildren(...Object.keys(TAGS).filter((tag) => found.has(tag)).map((tag) => {
    const [sign, word, about] = TAGS[tag];
    const item = document.createElement("li");
    const sample = make("span", `sample ${tag}`, sign);
    sample.setAttribute("aria-hidden", "true");
    item.append(sample, make("span", "", `${word ? `${word}: ` : ""}${about}`));
    return item;
  }));
}

// What lies behind the entries: a place for each position, and what the places are for.
function drawSlots() {
  const { method, num_kept, num_sinks, num_recalled } = settings;
  $("lane").style.setProperty("--slots", num_kept + 1);
  $("slots").replaceChildren(...Array.from({ length: num_kept + 1 }, (_, position) => {
    const slot = make("span", "slot");
    slot.style.setProperty("--slot", position);
    slot.append(make("span", "word", "position "), make("b", "", position));
    return slot;
  }));
  const zone = (name, first, length) => {
    const element = make("span", `zone ${name}`, name);
    element.style.setProperty("--slot", first);
    element.style.setProperty("--length", length);
    return element;
  };
  const zones = method === "dense" ? [zone("everything", 0, num_kept + 1)] : [
    ...(num_sinks ? [zone("sinks", 0, num_sinks)] : []),
    ...(num_recalled ? [zone("taken back", num_sinks, num_recalled)] : []),
    zone("window", num_sinks + num_recalled, num_kept - num_sinks - num_recalled),
    zone("new", num_kept, 1),
  ];
  $("zones").replaceChildren(...zones);
  fit();
}

// Cells as wide as the page has room for; below a width the lane scrolls, and words shrink to signs.
function fit() {
  const room = $("scroll").clientWidth / (settings.num_kept + 1);
  const width = Math.min(Math.max(Math.floor(room), CELL_PX.least), CELL_PX.most);
  $("lane").style.setProperty("--cell", `${width}px`);
  $("lane").classList.toggle("narrow", width < CELL_PX.wordy);
}

// Keep the newest entry in sight where the lane is wider than the page.
function scroll() {
  const end = (moments[at].entries.length / (settings.num_kept + 1)) * $("lane").offsetWidth;
  $("scroll").scrollLeft = end - $("scroll").clientWidth;
}

function show(moment, animate = true) {
  at = Math.min(Math.max(moment, 0), moments.length - 1);
  const { frame, entries, numGone } = moments[at];
  const here = new Set(entries.map((entry) => entry.index));
  for (const [index, cell] of cells) if (!here.has(index)) leave(index, cell, animate);
  let next = null;
  for (const entry of [...entries].reverse()) {
    let cell = cells.get(entry.index);
    if (!cell) {
      cell = make("li", "cell");
      cells.set(entry.index, cell);
      cell.style.setProperty("--slot", entry.now);
      $("entries").insertBefore(cell, next);
      if (animate) cell.classList.add(entry.index === frame.token ? "coming" : entry.away ? "rising" : "hidden");
    }
    write(cell, entry, moments[at]);
    next = cell;
  }
  if (animate) $("lane").getBoundingClientRect(); // so that what is added now moves from where it is
  for (const entry of entries) {
    const cell = cells.get(entry.index);
    cell.classList.remove(...ARRIVALS);
    cell.style.setProperty("--slot", entry.now);
  }
  showText(frame.token, entries);
  showRing(moments[at]);
  showMemory(moments[at]);
  $("says").textContent = told(moments[at], settings);
  $("num-seen").textContent = frame.seen.length;
  $("num-stale").textContent = frame.seen.filter((entry) => entry.state === "stale").length;
  $("num-encoded").textContent = frame.encoded;
  $("num-evicted-so-far").textContent = numGone;
  $("back").disabled = $("restart").disabled = at === 0;
  $("forward").disabled = at === moments.length - 1;
  scroll();
}

// The text so far: what is in the cache, and what is gone between.
function showText(token, entries) {
  const parts = [];
  const gaps = [];
  entries.forEach(({ index, away }, i) => {
    const first = i ? entries[i - 1].index + 1 : 0;
    if (index > first) {
      gaps.push([make("s", "", index - 1 > first ? `${first}–${index - 1}` : first), index - first]);
      parts.push(gaps[gaps.length - 1][0]);
    }
    parts.push(make("b", index === token ? "last" : index < settings.num_sinks ? "first" : away ? "back" : "", index));
  });
  for (const [gap, length] of gaps) gap.style.setProperty("--length", Math.min(length, 12 / gaps.length));
  $("stream").classList.toggle("tiny", entries.length * 28 + gaps.length * 52 > $("scroll").clientWidth);
  $("stream").replaceChildren(...parts, make("span", "", "…"));
}

// What a memory holds: those that were taken back with their numbers, the others as far as there is room.
function showMemory(moment) {
  $("recalls").hidden = !settings.memory;
  const back = new Set(moment.entries.filter((entry) => entry.away).map((entry) => entry.index));
  $("lost").classList.toggle("tiny", moment.lost.length * 28 > $("scroll").clientWidth);
  $("lost").replaceChildren(...moment.lost.map((index) => make("b", back.has(index) ? "back" : "", index)));
  $("kept").textContent = kept(moment, settings);
}

// The ring of a method that has one: what each slot holds.
function showRing(moment) {
  $("lies").hidden = settings.memory || !IN_RING.includes(settings.method);
  if ($("lies").hidden) return;
  const { held, slot } = moment.ring;
  const size = settings.num_kept + 1;
  const there = new Set(moment.entries.map((entry) => entry.index));
  const kindOf = (i) => {
    if (held[i] === undefined) return "free";
    if (moment.kind === "arrives" && i === slot) return "last";
    return i < settings.num_sinks ? "first" : there.has(held[i]) ? "kept" : "old";
  };
  $("ring").classList.toggle("tiny", size * 26 > $("scroll").clientWidth);
  $("ring").replaceChildren(...Array.from({ length: size }, (_, i) => make("b", kindOf(i), held[i] ?? "")));
  $("written").textContent = written(moment, settings);
}

function write(cell, entry, moment) {
  const tag = tagOf(entry, moment, settings);
  const arriving = ARRIVALS.filter((name) => cell.classList.contains(name));
  cell.className = ["cell", entry.state, ...arriving, tag, entry.now < settings.num_sinks ? "sink" : ""].join(" ").trim();
  const line = make("span", "tag");
  const sign = make("i", "", TAGS[tag][0]);
  sign.setAttribute("aria-hidden", "true");
  line.append(sign, make("em", "", TAGS[tag][1]));
  const token = make("span", "token");
  token.append(make("span", "heard", "token "), String(entry.index));
  const position = (name) => {
    const part = make("span", name);
    part.append(make("span", "word", `${name} `), make("b", "", entry[name]));
    return part;
  };
  cell.replaceChildren(line, token, position("born"), position(entry.away && settings.family === "rotary" ? "away" : "now"));
}

function leave(index, cell, animate) {
  cells.delete(index);
  const gone = animate && index < moments[at].frame.token && !matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (!gone) return cell.remove(); // it steps back, or nothing moves
  cell.classList.add(settings.memory ? "sinking" : "gone");
  cell.setAttribute("aria-hidden", "true");
  setTimeout(() => cell.remove(), MOMENT_MS);
}

const isPlaying = () => timer !== null;

function pause() {
  clearTimeout(timer);
  timer = null;
  showPlaying();
}

function play() {
  if (at === moments.length - 1) show(0, false);
  timer = setTimeout(tick, 200);
  showPlaying();
}

function tick() {
  show(at + 1);
  if (at === moments.length - 1) return pause();
  timer = setTimeout(tick, MOMENT_MS / $("speed").value);
}

function showPlaying() {
  $("play").textContent = isPlaying() ? "Pause" : "Play";
  $("says").setAttribute("aria-live", isPlaying() ? "off" : "polite"); // read out what is stepped to, not what runs by
}

function step(by) {
  pause();
  show(at + by);
}

function setUp() {
  const methods = data.recordings.filter((one) => !one.title);
  for (const [id, names] of [["method", methods.map((one) => one.method)], ["family", data.families]]) {
    $(id).replaceChildren(...names.map((name) => new Option(name)));
  }
  const here = () => moments[at].frame.token;
  const follow = () => choose({ ...methods.find((one) => one.method === $("method").value), family: $("family").value }, here());
  $("method").addEventListener("change", follow);
  $("family").addEventListener("change", () => choose({ ...settings, family: $("family").value }, here()));
  for (const button of document.querySelectorAll("[data-example]")) {
    const example = data.recordings.find((one) => one.title === button.dataset.example);
    button.addEventListener("click", () => choose(example, example.shown));
  }
  $("restart").addEventListener("click", () => { pause(); show(0, false); });
  $("back").addEventListener("click", () => step(-1));
  $("forward").addEventListener("click", () => step(1));
  $("play").addEventListener("click", () => (isPlaying() ? pause() : play()));
  const setSpeed = () => {
    $("speed-shown").textContent = `${$("speed").value}×`;
    $("lane").style.setProperty("--move", `${450 / Math.max(1, $("speed").value)}ms`);
  };
  $("speed").addEventListener("input", setSpeed);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.target.closest("select, input")) return;
    const scrolls = event.target === $("scroll") && $("scroll").scrollWidth > $("scroll").clientWidth;
    const act = {
      " ": event.target.closest("button") ? null : () => (isPlaying() ? pause() : play()),
      ArrowLeft: scrolls ? null : () => step(-1),
      ArrowRight: scrolls ? null : () => step(1),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  new ResizeObserver(() => { fit(); scroll(); }).observe($("scroll"));
  setSpeed();
  choose(data.recordings[0]);
}

setUp();
