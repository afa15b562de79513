// Chat over the server's own API, and the strip of its cache. Texts of models and users are only ever text nodes.
"use strict";

const $ = (id) => document.getElementById(id);
const SAMPLING = [...document.querySelectorAll(".fields input")].map((field) => field.id);
const PREFIX = "kvalign session ", SETTINGS = "kvalign settings";
const KINDS = ["sink", "window", "evicted", "in the memory", "taken back", "new"];
const count = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
let key = sessionStorage.getItem("kvalign key") || "";
let model = null; // of /v1/models
let chat = null; // {name, system, turns: [{text, answers: [{text, finish, note}]}], changed}
let running = 0;
const strips = []; // by column

function make(tag, className = "", text = "", more = {}) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.textContent = text;
  return Object.assign(element, more);
}

function button(text, about, act) {
  const element = make("button", "", text, { type: "button", onclick: act });
  element.setAttribute("aria-label", about);
  return element;
}

function tell(text, isError = false) {
  $("status").textContent = text;
  $("status").classList.toggle("error", isError);
}

// The columns that answer: of each the beginning of its addresses, and what the server says of it.
const columns = () => [{ base: "", about: model.kvalign }, ...($("beside").checked && model.kvalign.beside ? [{ base: "/beside", about: model.kvalign.beside }] : [])];

async function api(path, body, method = body ? "POST" : "GET") {
  const headers = { ...(body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
  const reply = await fetch(path, { method, headers, body: body && JSON.stringify(body) });
  if (reply.ok) return reply;
  $("key-form").hidden = reply.status !== 401;
  if (reply.status === 401) $("key").focus();
  const { error } = await reply.json().catch(() => ({ error: { message: `the server answered ${reply.status}` } }));
  throw Object.assign(new Error(error.message), { code: error.code, status: reply.status });
}

// Events of a stream, one after another.
async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
  }
}

// What a column has said: where it has no answer of its own, that of the first one.
const answerOf = (turn, column) => turn.answers[column] || turn.answers[0];

function messagesOf(column, isWhole) {
  const messages = chat.system ? [{ role: "system", content: chat.system }] : [];
  chat.turns.forEach((turn, i) => {
    messages.push({ role: "user", content: turn.text });
    const answer = answerOf(turn, column);
    if (answer && (isWhole || i < chat.turns.length - 1)) messages.push({ role: "assistant", content: answer.text });
  });
  return messages;
}

function sampling() {
  const values = SAMPLING.filter((id) => $(id).value !== "").map((id) => [id, Number($(id).value)]);
  return { seed: Math.floor(Math.random() * 2 ** 31), ...Object.fromEntries(values) };
}

// One answer of one column; it goes on with the last one, or is another.
async function answer(column, how, goesOn) {
  const turn = chat.turns.at(-1), { base } = columns()[column], strip = strips[column];
  const kept = goesOn ? answerOf(turn, column).text : "";
  const said = (turn.answers[column] = { text: kept, finish: "", note: "" });
  const shown = document.querySelector(`#turns > :last-child .answers > :nth-child(${column + 1}) .said`);
  if (chat.changed && !columns()[column].about.edit) await api(`${base}/v1/sessions/${chat.name}`, null, "DELETE").catch(() => {});
  const asked = { model: model.id, session: chat.name, messages: messagesOf(column, goesOn), stream: true, ...how };
  if (goesOn) {
    asked.messages.at(-1).content = kept;
    asked.continue_final_message = true;
  }
  asked.stream_options = { include_usage: true, include_cache: $("live").checked };
  let first = 0, usage = null;
  strip.recalled = new Map();
  for await (const event of events(await api(`${base}/v1/chat/completions`, asked))) {
    if (event.error) throw new Error(event.error.message);
    usage = event.usage || usage;
    for (const choice of event.choices) {
      const piece = (choice.delta.reasoning_content || "") + (choice.delta.content || "");
      if (piece) {
        first = first || performance.now();
        said.text += choice.delta.content || "";
        shown.append(shown.textContent ? piece : piece.trimStart());
        $("turns").scrollTop = $("turns").scrollHeight;
      }
      if (choice.kvalign) strip.take(choice.kvalign);
      said.finish = choice.finish_reason || said.finish;
    }
  }
  const num = usage.completion_tokens, { cached_tokens: cached } = usage.prompt_tokens_details;
  const seconds = (performance.now() - first) / 1000;
  strip.speed = num > 1 ? (num - 1) / seconds : 0;
  const { evicted_tokens: evicted, forgotten_prompt_tokens: forgotten } = usage.kvalign;
  said.note = `${count(usage.prompt_tokens - cached, "token")} encoded, ${count(cached, "token")} kept; ${count(num, "token")} written` +
    (evicted ? `; ${count(evicted, "token")} out of the cache${forgotten ? `, ${forgotten.toLocaleString("en")} of them forgotten` : ""}` : "") +
    (said.finish === "length" ? "; cut" : "");
}

// All columns answer, with the same words and the same seed.
async function run(goesOn = false, before = null) {
  const how = sampling(), turn = chat.turns.at(-1), former = turn.answers;
  if (!goesOn) turn.answers = [];
  running = columns().length;
  show();
  tell("Answering …");
  const ends = await Promise.allSettled(columns().map((_, column) => answer(column, how, goesOn)));
  running = 0;
  const failed = ends.filter((end) => end.status === "rejected").map((end) => end.reason.message);
  ends.forEach((end, column) => {
    if (end.status === "rejected" && !turn.answers[column]?.text) delete turn.answers[column];
    else if (end.status === "rejected") turn.answers[column].note = "it was not completed";
  });
  if (!turn.answers.some(Boolean)) { // nothing has changed
    turn.answers = former;
    if (before !== null) {
      chat.turns.pop();
      $("text").value = before;
    }
  } else if (!failed.length) chat.changed = false;
  keep();
  show();
  await look();
  if (failed.length) tell([...new Set(failed)].join("; "), true);
  else tell(`Answered: ${turn.answers[0].note}.`);
  $("heard").textContent = failed.length ? "" : turn.answers.map((one) => one.text).join(" — ");
  $("text").focus();
}

function show() {
  document.body.classList.toggle("two", columns().length > 1);
  $("turns").replaceChildren(...chat.turns.map(showTurn));
  $("turns").scrollTop = $("turns").scrollHeight;
  const last = chat.turns.at(-1), isIdle = !running;
  $("send").disabled = $("again").disabled = $("more").disabled = !isIdle;
  $("stop").hidden = isIdle;
  $("again").disabled ||= !last;
  $("more").disabled ||= !last || chat.changed || !columns().every((_, column) => last.answers[column]?.finish === "length");
  for (const id of ["open", "how"]) for (const field of $(id).querySelectorAll("button, input, textarea")) field.disabled = !isIdle;
}

function showTurn(turn, number) {
  const element = make("div", `turn${turn.changed ? " changed" : ""}`);
  const user = make("div", "user");
  const of = `message ${number + 1}`;
  const under = make("div", "under");
  user.append(make("div", "name", "you"), make("div", "said", turn.text), under);
  under.append(
    button("Edit", `Edit ${of}`, () => edit(user, turn, "text", turn, of)),
    button("Forget", `Forget ${of} and its answers`, () => forget(number)),
  );
  if (turn.changed) under.append(make("span", "", "changed: the next answer reads it so"));
  const answers = make("div", "answers");
  columns().forEach(({ about }, column) => {
    const said = turn.answers[column], one = make("div", said?.changed ? "answer changed" : "answer");
    one.append(make("div", "name", columns().length > 1 ? about.method : model.id), make("div", "said", said?.text.trimStart() || ""));
    if (said && !running) {
      const line = make("div", "under", said.note);
      line.append(button("Edit", `Edit the answer to ${of}`, () => edit(one, said, "text", said, `the answer to ${of}`)));
      one.append(line);
    }
    answers.append(one);
    if (said && !running && $("readable").checked) mark(one.querySelector(".said"));
  });
  element.append(user, answers);
  return element;
}

// Underline the chunks of an answer: by the rule of `kvalign eval readability`.
async function mark(element) {
  const text = element.textContent, letters = [...text];
  try {
    const { chunks } = await (await api("/v1/readability", { text })).json();
    let done = 0;
    const parts = chunks.flatMap(([start, end, isReadable]) => {
      const between = letters.slice(done, start).join("");
      done = end;
      return [between, make("span", isReadable ? "good" : "bad", letters.slice(start, end).join(""), { title: isReadable ? "readable" : "not readable" })];
    });
    element.replaceChildren(...parts, letters.slice(done).join(""));
  } catch (error) {
    tell(error.message, true);
  }
}

function edit(element, holder, field, marked, about) {
  if (running) return;
  const area = make("textarea", "", "", { value: holder[field], rows: 4 });
  area.setAttribute("aria-label", `New text of ${about}`);
  const end = (isSaved) => {
    if (isSaved && area.value.trim() && area.value !== holder[field]) {
      holder[field] = area.value;
      marked.changed = chat.changed = true;
      keep();
      tell("Changed. The next answer reads it so: Send, or Answer again.");
    }
    show();
    [...document.querySelectorAll(".under button")].find((one) => one.getAttribute("aria-label")?.toLowerCase() === `edit ${about}`)?.focus();
  };
  area.onkeydown = (event) => {
    if (event.key === "Escape" || (event.key === "Enter" && event.ctrlKey)) end(event.key === "Enter");
  };
  const row = make("div", "row");
  row.append(button("Change", `Change ${about}`, () => end(true)), button("Leave it", `Leave ${about} as it was`, () => end(false)));
  element.querySelector(".said").replaceWith(area);
  element.querySelector(".under").replaceWith(row);
  area.focus();
}

function forget(number) {
  if (running) return;
  chat.turns.splice(number, 1);
  chat.changed = true;
  keep();
  show();
  tell(`Message ${number + 1} and its answers are out of the conversation. The next answer does not read them.`);
  $("text").focus();
}

// Sessions by name: their texts are kept by the browser, their caches by the server.
function keep() {
  try {
    if (!chat.changed) for (const turn of chat.turns) for (const one of [turn, ...turn.answers]) if (one) delete one.changed;
    if (chat.turns.length) localStorage.setItem(PREFIX + chat.name, JSON.stringify(chat));
    localStorage.setItem(SETTINGS, JSON.stringify({ last: chat.name, ...Object.fromEntries(SAMPLING.map((id) => [id, $(id).value])) }));
  } catch (error) {
    tell(`This browser keeps no more: ${error.message}`, true);
  }
  const names = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  $("names").replaceChildren(...names.map((name) => make("option", "", "", { value: name.slice(PREFIX.length) })));
}

// A conversation as it was saved; an Error for anything else.
function checked(value) {
  const isText = (x) => typeof x === "string";
  const isAnswer = (x) => x === null || (isText(x.text) && isText(x.finish) && isText(x.note));
  const isTurn = (x) => isText(x.text) && Array.isArray(x.answers) && x.answers.every(isAnswer);
  if (!value || !Array.isArray(value.turns) || !value.turns.every(isTurn) || !isText(value.system) || !isText(value.name)) throw new Error("this is no saved conversation");
  return value;
}

async function open(name) {
  const stored = localStorage.getItem(PREFIX + name);
  chat = stored ? checked(JSON.parse(stored)) : { name, system: "", turns: [], changed: false };
  $("name").value = name;
  $("system").value = chat.system;
  keep();
  show();
  tell(stored ? `Session ${name}: ${count(chat.turns.length, "turn")}.` : `Session ${name} is new.`);
  await look();
  const known = strips[0].view;
  if (!stored && known) tell(`The server knows session ${name} (${count(known.num_tokens, "token")}), but its texts are not here. It goes on.`);
}

async function look() {
  await Promise.all(columns().map(async ({ base, about }, column) => {
    if (!strips[column]) strips[column] = new Strip(column);
    const strip = strips[column];
    strip.about = about;
    strip.view = await api(`${base}/v1/sessions/${chat.name}/cache`).then((reply) => reply.json()).catch((error) => {
      if (error.code !== "session_not_found") tell(error.message, true);
      return null;
    });
    strip.show();
  }));
  strips.forEach((strip, column) => (strip.box.hidden = column >= columns().length));
}

// The strip of one column: a cell a token.
class Strip {
  constructor(column) {
    this.recalled = new Map();
    this.speed = this.cursor = 0;
    this.box = make("section");
    this.title = make("h2", "", "", { id: `of-cache-${column}` });
    this.facts = make("p", "facts");
    this.frame = make("div", "strip", "", { tabIndex: 0 });
    this.frame.setAttribute("role", "group");
    this.frame.setAttribute("aria-label", "Tokens: the arrow keys go through them");
    this.canvas = make("canvas");
    this.canvas.setAttribute("role", "img");
    this.at = make("p", "at");
    this.at.setAttribute("aria-live", "polite");
    this.frame.append(this.canvas);
    this.box.append(this.title, this.facts, this.frame, this.at);
    this.box.setAttribute("aria-labelledby", this.title.id);
    $("caches").append(this.box);
    this.canvas.onpointermove = ({ offsetX, offsetY }) => this.point(Math.floor(offsetY / this.size) * this.width + Math.floor(offsetX / this.size));
    this.frame.onkeydown = (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.width, ArrowUp: -this.width, Home: -Infinity, End: Infinity }[event.key];
      if (!by) return;
      event.preventDefault();
      this.point(Math.min(Math.max(this.cursor + by, 0), this.tokens.length - 1));
    };
    new ResizeObserver(() => this.show()).observe(this.frame);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.show());
  }

  // What a stream tells after a token.
  take({ recalled, ...told }) {
    this.view = { num_sinks: this.about.num_sinks, since: 0, texts: [], ...this.view, ...told };
    this.recalled = new Map(recalled);
    this.last = told.num_tokens - 2;
    if (!this.isWaiting) requestAnimationFrame(() => this.show());
    this.isWaiting = true;
  }

  kind(token) {
    const { held, in_memory: aside, num_sinks: sinks, num_tokens: num } = this.view;
    const isIn = (spans) => spans.some(([start, stop]) => start <= token && token < stop);
    if (token === num - 1) return "new";
    if (isIn(held)) return token < sinks ? "sink" : "window";
    return this.recalled.has(token) ? "taken back" : isIn(aside) ? "in the memory" : "evicted";
  }

  show() {
    this.isWaiting = false;
    const { about, view } = this;
    if (!about) return;
    this.title.textContent = `Cache: ${about.method}`;
    this.frame.hidden = !view;
    this.facts.textContent = "Empty: nothing has been said in this session.";
    if (!view) return;
    const megabytes = view.num_bytes === undefined ? "" : `; ${(view.num_bytes / 1e6).toLocaleString("en", { maximumFractionDigits: 1 })} MB`;
    const text = `${count(view.num_tokens, "token")}: ${view.num_held.toLocaleString("en")} held of at most ${about.cache_size.toLocaleString("en")}, ${view.num_evicted.toLocaleString("en")} evicted` +
      (about.memory ? `, ${view.num_in_memory.toLocaleString("en")} of them in the memory; ${this.recalled.size ? `${this.recalled.size} taken back for token ${this.last}` : "none taken back"}` : "") +
      megabytes + (this.speed ? `; ${this.speed.toFixed(0)} tokens a second` : "");
    this.facts.textContent = text;
    this.canvas.setAttribute("aria-label", text);
    this.draw();
  }

  draw() {
    const { num_sinks: sinks, num_tokens: num } = this.view, since = Math.max(this.view.since, num - 4096);
    this.tokens = [...Array(Math.min(sinks, since)).keys()];
    for (let token = since; token < num; token++) this.tokens.push(token);
    this.size = this.tokens.length > 800 ? 7 : 12;
    const across = this.canvas.clientWidth, scale = devicePixelRatio;
    this.width = Math.max(1, Math.floor(across / this.size));
    const tall = Math.ceil(this.tokens.length / this.width) * this.size;
    this.canvas.width = across * scale;
    this.canvas.height = tall * scale;
    this.canvas.style.height = `${tall}px`;
    const pen = this.canvas.getContext("2d"), css = getComputedStyle(document.documentElement), most = Math.max(1, ...this.recalled.values());
    const colour = (name) => css.getPropertyValue(`--${name}`);
    const fills = { sink: ["sink", "sink-line"], window: ["in-place", "in-place-line"], new: ["new", "new"], "taken back": ["recalled-line", "recalled-line"] };
    const lines = Object.fromEntries(KINDS.map((kind) => [kind, (fills[kind] || []).map(colour)]));
    const soft = colour("line"), aside = colour("recalled-line"), s = this.size - 2;
    pen.scale(scale, scale);
    this.tokens.forEach((token, i) => {
      const x = (i % this.width) * this.size + .5, y = Math.floor(i / this.width) * this.size + .5, kind = this.kind(token), [fill, line] = lines[kind];
      pen.globalAlpha = kind === "taken back" ? .35 + .65 * this.recalled.get(token) / most : 1;
      pen.fillStyle = fill || aside;
      pen.strokeStyle = line || (kind === "evicted" ? soft : aside);
      if (fill) pen.fillRect(x, y, s, s);
      if (kind === "in the memory") pen.fillRect(x, y + s / 2, s, s / 2);
      pen.strokeRect(x, y, s, s);
    });
  }

  // The token of a cell, in words.
  point(cell) {
    const token = this.view && this.tokens[cell];
    if (token === undefined) return;
    this.cursor = cell;
    const kind = this.kind(token), heads = this.recalled.get(token), said = this.view.texts[token - this.view.since];
    this.at.textContent = `token ${token}: ${said === undefined ? "" : `${JSON.stringify(said)}, `}${kind}${kind === "taken back" ? ` by ${count(heads, "head")}` : ""}`;
  }
}

function listen() {
  $("ask").onsubmit = (event) => {
    event.preventDefault();
    const text = $("text").value;
    if (running || !text.trim()) return;
    chat.turns.push({ text, answers: [] });
    $("text").value = "";
    run(false, text);
  };
  $("text").onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("ask").requestSubmit();
  };
  $("stop").onclick = () => columns().forEach(({ base }) => api(`${base}/v1/sessions/${chat.name}/stop`, null, "POST").catch(() => {}));
  $("again").onclick = () => run();
  $("more").onclick = () => run(true);
  $("open").onsubmit = (event) => {
    event.preventDefault();
    open($("name").value).catch((error) => tell(error.message, true));
  };
  $("system").onchange = () => {
    chat.system = $("system").value.trim();
    chat.changed ||= chat.turns.length > 0;
    keep();
    show();
  };
  for (const id of SAMPLING) $(id).onchange = () => ($(id).reportValidity() ? keep() : ($(id).value = ""));
  $("readable").onchange = show;
  $("beside").onchange = () => look().then(show);
  $("save").onclick = () => {
    const link = make("a", "", "", { href: URL.createObjectURL(new Blob([JSON.stringify(chat, null, 1)])), download: `${chat.name}.json` });
    link.click();
    URL.revokeObjectURL(link.href);
  };
  $("load").onclick = () => $("file").click();
  $("file").onchange = async () => {
    try {
      const loaded = checked(JSON.parse(await $("file").files[0].text()));
      if (!new RegExp(`^(?:${$("name").pattern})$`, "v").test(loaded.name)) throw new Error("this name is not one of a session");
      localStorage.setItem(PREFIX + loaded.name, JSON.stringify({ ...loaded, changed: true })); // the server may hold another one
      await open(loaded.name);
    } catch (error) {
      tell(`Not loaded: ${error.message}`, true);
    }
    $("file").value = "";
  };
  $("remove").onclick = async () => {
    if (!confirm(`Delete session ${chat.name}, here and on the server?`)) return;
    await Promise.allSettled(columns().map(({ base }) => api(`${base}/v1/sessions/${chat.name}`, null, "DELETE")));
    localStorage.removeItem(PREFIX + chat.name);
    open(chat.name);
  };
  $("key-form").onsubmit = (event) => {
    event.preventDefault();
    key = $("key").value;
    sessionStorage.setItem("kvalign key", key);
    begin();
  };
}

async function begin() {
  try {
    model = (await (await api("/v1/models")).json()).data[0];
  } catch (error) {
    return tell(error.status === 401 ? "This server asks for its API key." : error.message, true);
  }
  $("key-form").hidden = true;
  document.title = `${model.id} — KV-Align`;
  $("of-beside").hidden = !model.kvalign.beside;
  if (model.kvalign.beside) $("of-beside").querySelector("span").textContent = `beside it: ${model.kvalign.beside.method}`;
  const settings = JSON.parse(localStorage.getItem(SETTINGS) || "{}");
  for (const id of SAMPLING) $(id).value = settings[id] || "";
  $("ask").hidden = false;
  await open(settings.last || "talk");
  $("text").focus();
}

listen();
begin();
