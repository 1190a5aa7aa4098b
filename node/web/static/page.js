// Draws the document of `tutti web`. It comes whole once and then as changes (JSON merge patches,
// RFC 7386) over server-sent events; a frozen page has it in data.js. Texts of peers and of the
// model are set as text only, never as markup.
"use strict";

const MOST_TABLE_ROWS = 60;
const MOST_CHIPS = 48; // peers that the map names; more of them are dots
const GLYPHS = { works: "●", coming: "◐", going: "◌", gone: "✗" };
const TIME_WORDS = {
  compute: "computing", wire: "sending and receiving", wait: "waiting", round: "averaging",
};
const doc = {};
const drawn = {}; // charts
const byId = (id) => document.getElementById(id);

// ------------------------------------------------------------------ the document

function merge(target, patch) {
  for (const [key, value] of Object.entries(patch)) {
    if (key === "__proto__") continue;
    if (value === null) delete target[key];
    else if (typeof value === "object" && !Array.isArray(value)) {
      const before = target[key];
      const inner = before && typeof before === "object" && !Array.isArray(before);
      if (!inner) target[key] = {};
      merge(target[key], value);
    } else target[key] = value;
  }
}

const SECTIONS = {
  run: drawRun, health: drawHealth, tiles: drawTiles, map: drawMap, peers: drawMap,
  curve: drawCurves, reference: drawCurves, time: drawTime, work: drawWork, me: drawMe,
  help: drawHelp, samples: drawSamples, sampling: drawSamples, prompt: drawSamples,
  news: drawNews, chat: drawViews,
};

function take(patch, whole) {
  if (whole) for (const key of Object.keys(doc)) delete doc[key];
  merge(doc, patch);
  const keys = whole ? Object.keys(doc) : Object.keys(patch);
  for (const draw of new Set(keys.map((key) => SECTIONS[key]).filter(Boolean))) draw();
}

// ------------------------------------------------------------------ small helpers

function make(tag, words, name) {
  const made = document.createElement(tag);
  if (words !== undefined) made.textContent = words;
  if (name) made.className = name;
  return made;
}

function fill(parent, children) {
  parent.replaceChildren(...children);
}

function setText(id, words) {
  const place = byId(id);
  if (place.textContent !== words) place.textContent = words;
}

function short(number) {
  for (const [unit, step] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]])
    if (Math.abs(number) >= step) return (number / step).toPrecision(3) + " " + unit;
  return String(Math.round(number * 1000) / 1000);
}

function table(id, head, rows) {
  const line = make("tr");
  for (const [words, number] of head) {
    const cell = make("th", words, number ? "number" : "");
    cell.scope = "col";
    line.append(cell);
  }
  const top = make("thead");
  top.append(line);
  const body = make("tbody");
  body.append(...rows);
  fill(byId(id), [top, body]);
}

function row(cells, name) {
  const line = make("tr", undefined, name);
  cells.forEach(([value, number], i) => {
    const cell = make(i === 0 ? "th" : "td", undefined, number ? "number" : "");
    if (i === 0) cell.scope = "row";
    if (value instanceof Node) cell.append(value);
    else cell.textContent = value;
    line.append(cell);
  });
  return line;
}

function pairs(id, entries) {
  const parts = [];
  for (const [label, value] of entries) parts.push(make("dt", label), make("dd", value));
  fill(byId(id), parts);
}

// ------------------------------------------------------------------ head and figures

function drawRun() {
  const run = doc.run;
  document.title = run.name + (run.epochs ? ` ${Math.floor(100 * run.done)} %` : "") + " – tutti";
  setText("run-name", run.name);
  setText("run-id", [run.id && "run " + run.id, run.warmup].filter(Boolean).join(", "));
  const bar = byId("done");
  bar.setAttribute("aria-valuenow", String(Math.floor(100 * run.done)));
  byId("done-part").style.width = 100 * run.done + "%";
}

function drawHealth() {
  const health = doc.health;
  const pill = byId("health");
  setText("health", health.word);
  pill.className = "pill " + (health.ok ? "good" : "bad");
  const words = [health.reason, health.step && "→ " + health.step].filter(Boolean).join("  ");
  tell(words);
}

function tell(words) {
  const place = byId("status");
  place.hidden = !words;
  setText("status", words || "");
}

function drawTiles() {
  const parts = Object.values(doc.tiles).map(([label, value, note]) => {
    const tile = make("div");
    tile.append(make("dt", label), make("dd", value, "value"), make("dd", note || "\u00a0", "note"));
    return tile;
  });
  fill(byId("tiles"), parts);
}

// ------------------------------------------------------------------ charts

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function points() {
  return Object.entries(doc.curve || {})
    .map(([epoch, point]) => [Number(epoch), ...point])
    .sort((one, other) => one[0] - other[0]);
}

function axis(values, size) {
  const made = {
    stroke: color("quiet"), grid: { stroke: color("line"), width: 1 }, values,
    ticks: { stroke: color("line"), width: 1 }, font: "12px system-ui, sans-serif",
  };
  return size ? { ...made, size } : made;
}

function chart(id, options, data, draw) {
  const place = byId(id);
  if (drawn[id]) drawn[id].destroy();
  place.replaceChildren();
  const width = Math.max(200, place.clientWidth);
  const height = place.classList.contains("low") ? 170 : Math.min(320, Math.max(230, width * 0.5));
  drawn[id] = new uPlot({ width, height, legend: { show: false }, ...options }, data, place);
  drawn[id].redo = draw;
}

function blank(id, words) {
  if (drawn[id]) drawn[id].destroy();
  delete drawn[id];
  fill(byId(id), [make("p", words, "quiet")]);
}

function setOrChart(id, options, data, draw) {
  const there = drawn[id];
  if (there && there.series.length === data.length) there.setData(data);
  else chart(id, options(), data, draw);
}

function drawCurves() {
  const all = points();
  drawLoss(all);
  drawEpochs(all);
}

function drawLoss(all) {
  const rows = all.filter((p) => p[2] > 0 || p[3] > 0);
  const reference = doc.reference || {};
  const ends = (value) =>
    rows.map((_, i) => (value && (i === 0 || i === rows.length - 1) ? value : null));
  const data = [
    rows.map((p) => p[1]),
    rows.map((p) => p[2] || null),
    rows.map((p) => p[3] || null),
    ends(reference.loss),
    ends(reference.held),
  ];
  const key = [["train", "training"], ["held", "held out"]];
  if (reference.loss || reference.held) key.push(["before", "before training"]);
  fill(byId("loss-key"), key.map(([name, words]) => {
    const entry = make("span");
    entry.append(make("i", "", name), words);
    return entry;
  }));
  if (rows.length < 2) {
    blank("loss-chart", "The curve begins with the second epoch.");
    return;
  }
  const line = (name, more) =>
    ({ stroke: color(name), width: 2, spanGaps: true, points: { show: false }, ...more });
  setOrChart("loss-chart", () => ({
    scales: { x: { time: false } },
    cursor: { y: false },
    axes: [axis((_, ticks) => ticks.map(short)), axis((_, ticks) => ticks.map(short), 52)],
    series: [
      {}, line("train"), line("held", { points: { show: true, size: 6, fill: color("held") } }),
      line("train", { dash: [6, 5], width: 1.5 }), line("held", { dash: [6, 5], width: 1.5 }),
    ],
  }), data, () => drawLoss(points()));
  const last = rows[rows.length - 1];
  const held = rows.filter((p) => p[3] > 0).pop();
  byId("loss-chart").setAttribute("aria-label",
    `Training loss from ${rows[0][2].toFixed(3)} to ${last[2].toFixed(3)} over ` +
    `${short(last[1])} tokens` + (held ? `; held-out loss ${held[3].toFixed(3)}` : "") +
    (reference.held ? `, ${reference.held.toFixed(3)} before training` : ""));
  if (byId("loss-more").open) tabulateLoss(rows);
}

function thinned(rows) {
  const step = Math.ceil(rows.length / MOST_TABLE_ROWS);
  return rows.filter((_, i) => (rows.length - 1 - i) % step === 0).reverse();
}

function tabulateLoss(rows) {
  table("loss-table", [["Epoch", 1], ["Tokens", 1], ["Training", 1], ["Held out", 1]],
    thinned(rows).map((p) => row([
      [String(p[0]), 1], [p[1].toLocaleString("en"), 1], [p[2] ? p[2].toFixed(4) : "-", 1],
      [p[3] ? p[3].toFixed(4) : "-", 1],
    ])));
}

function drawEpochs(all) {
  const rows = all.filter((p) => p[4] > 0);
  if (rows.length < 2) {
    blank("epoch-chart", "No epoch has been timed yet.");
    return;
  }
  const each = rows.map((p) => p[4] / p[6]);
  const data = [rows.map((p) => p[0]), each, rows.map((p, i) => (p[5] ? each[i] : null))];
  setOrChart("epoch-chart", () => ({
    scales: { x: { time: false }, y: { range: (_, low, high) => [0, (high || 1) * 1.1] } },
    cursor: { y: false },
    axes: [axis((_, ticks) => ticks.map((t) => (Number.isInteger(t) ? String(t) : ""))),
      axis((_, ticks) => ticks.map((t) => short(t) + " s"), 52)],
    series: [
      {},
      { stroke: color("train"), width: 1.5, fill: color("soft"), points: { show: false } },
      { stroke: color("held"), width: 0, paths: () => null,
        points: { show: true, size: 9, fill: color("held") } },
    ],
  }), data, () => drawEpochs(points()));
  const repaired = rows.reduce((sum, p) => sum + p[5], 0);
  byId("epoch-chart").setAttribute("aria-label",
    `${rows.length} epochs or groups of epochs, the last one ${each[each.length - 1].toFixed(1)} ` +
    `seconds; repaired rounds: ${repaired}`);
  if (byId("epochs-more").open) tabulateEpochs(rows);
}

function tabulateEpochs(rows) {
  const some = thinned(rows);
  const mended = rows.filter((p) => p[5] && !some.includes(p));
  const chosen = [...some, ...mended].sort((one, other) => other[0] - one[0]).slice(0, 200);
  table("epochs-table", [["Epoch", 1], ["Epochs", 1], ["Seconds each", 1], ["Repaired rounds", 1]],
    chosen.map((p) => row([
      [String(p[0]), 1], [String(p[6]), 1], [(p[4] / p[6]).toFixed(2), 1],
      [p[5] ? String(p[5]) : "-", 1],
    ], p[5] ? "repaired" : "")));
}

// ------------------------------------------------------------------ map and peers

function drawMap() {
  if (!doc.map || !doc.peers) return;
  const { order, cells, stages, needs } = doc.map;
  const peers = doc.peers.order.map((id) => doc.peers.rows[id]).filter(Boolean);
  const places = new Map();
  for (const peer of peers) {
    if (peer.place === "-") continue;
    const key = peer.cell + " " + peer.stage;
    if (!places.has(key)) places.set(key, []);
    places.get(key).push(peer);
  }
  const named = peers.length <= MOST_CHIPS;
  const several = order.length > 1 || order[0] !== "all";
  const head = make("tr");
  const corner = make("th", several ? "Cell" : "Stage");
  corner.scope = "col";
  head.append(corner);
  stages.forEach((words, i) => {
    const cell = make("th", words);
    cell.scope = "col";
    if (needs[i]) cell.append(make("span", "needs " + needs[i], "needs"));
    head.append(cell);
  });
  const top = make("thead");
  top.append(head);
  const body = make("tbody");
  for (const key of order) body.append(cellRow(key, cells[key], places, named, several));
  fill(byId("map"), [top, body]);
  drawKey(peers, named);
  const more = doc.peers.more ? `, and ${doc.peers.more} more` : "";
  setText("peers-title", `All ${peers.length}${more} peers as a table`);
  const self = peers.find((peer) => peer.self);
  setText("node", self ? `${self.name} (${self.id}), ${self.place}` : "");
  if (byId("peers-more").open) tabulatePeers(peers, several);
}

function cellRow(key, cell, places, named, several) {
  const line = make("tr", undefined, cell.own && several ? "self" : "");
  const head = make("th", several ? cell.label + (cell.own ? " (this node's)" : "") : "Peers");
  head.scope = "row";
  line.append(head);
  cell.cover.forEach((count, stage) => {
    const box = make("td", undefined, count === 0 ? "none" : count === 1 ? "thin" : "");
    const words = count === 0 ? "nobody works" : count === 1 ? "only 1" : `${count} work`;
    box.append(make("span", words, "count"));
    const chips = make("ul", undefined, "chips");
    for (const peer of places.get(key + " " + stage) || []) chips.append(chip(peer, named));
    if (chips.firstChild) box.append(chips);
    line.append(box);
  });
  return line;
}

function chip(peer, named) {
  const made = make("li", undefined, "chip " + peer.kind + (peer.self ? " self" : ""));
  const glyph = make("i", GLYPHS[peer.kind] + (peer.path === "relayed" ? "⤳" : ""), "dot");
  glyph.setAttribute("aria-hidden", "true");
  const via = peer.via ? " by " + peer.via : "";
  const words = `${peer.name} (${peer.id}), ${peer.said}, ${peer.path}${via}` +
    (peer.leads ? ", leads" : "");
  made.title = words;
  made.append(glyph);
  if (named) {
    const more = peer.kind === "works" ? "" : ` (${peer.said})`;
    made.append(peer.name + (peer.leads ? " +" : "") + more);
    if (peer.path === "relayed") made.append(make("span", ", relayed", "hidden"));
  } else made.append(make("span", words, "hidden"));
  return made;
}

function drawKey(peers, named) {
  const words = [
    ["works", "● works"], ["coming", "◐ comes back or begins"], ["going", "◌ silent or leaving"],
    ["gone", "✗ gone"],
  ];
  const parts = words.filter(([kind]) => peers.some((peer) => peer.kind === kind))
    .map(([kind, text]) => make("span", text, kind));
  if (peers.some((peer) => peer.path === "relayed")) parts.push(make("span", "⤳ through a relay"));
  if (named && peers.some((peer) => peer.leads)) parts.push(make("span", "+ leads"));
  fill(byId("map-key"), parts);
}

function tabulatePeers(peers, several) {
  const head = [["Peer"], ["Id"], ["State"], ["Stage"], ["Reached"], ["Round trip", 1],
    ["Tokens/s", 1], ["Epoch", 1], ["Version"]];
  if (several) head.splice(2, 0, ["Cell"]);
  table("peers", head, peers.map((peer) => {
    const reached = peer.path + (peer.via ? " by " + peer.via : "");
    const cells = [[peer.name], [peer.id], [peer.said], [peer.place],
      [reached + (peer.sent ? ", " + peer.sent : "")], [peer.rtt, 1], [peer.speed, 1],
      [peer.epoch ? String(peer.epoch) : "-", 1], [peer.version]];
    if (several) cells.splice(2, 0, [peer.cell === "all" ? "-" : peer.cell.slice(0, 6)]);
    return row(cells, peer.self ? "self" : "");
  }));
}

// ------------------------------------------------------------------ lists

function drawHelp() {
  fill(byId("help"), doc.help.map((wish) => make("li", wish.text, wish.kind)));
  if (!doc.help.length) fill(byId("help"), [make("li", "nothing is known yet", "more")]);
}

function drawTime() {
  const entries = Object.entries(doc.time || {});
  fill(byId("time-bar"), entries.map(([kind, share]) => {
    const part = make("div", "", kind);
    part.style.width = 100 * share + "%";
    return part;
  }));
  const parts = [];
  for (const [kind, share] of entries) {
    const label = make("dt");
    const square = make("i", "", kind);
    square.setAttribute("aria-hidden", "true");
    label.append(square, TIME_WORDS[kind] || kind);
    parts.push(label, make("dd", (100 * share).toFixed(1) + " %"));
  }
  if (!parts.length) parts.push(make("dt", "nothing yet"), make("dd", ""));
  fill(byId("time"), parts);
}

function drawMe() {
  pairs("me", Object.entries(doc.me));
}

function drawWork() {
  const rows = Object.values(doc.work).sort((one, other) => other.count - one.count);
  table("work", [["Peer"], ["Stage"], ["Share of its stage"], ["Micro-batches", 1], ["Epochs", 1]],
    rows.map((work) => {
      const share = make("span");
      const bar = make("span", undefined, "share");
      const part = make("b");
      part.style.width = 100 * work.share + "%";
      bar.setAttribute("aria-hidden", "true");
      bar.append(part);
      share.append(bar, (100 * work.share).toFixed(0) + " %");
      return row([[`${work.name} (${work.id})`], [work.place], [share],
        [work.count.toLocaleString("en"), 1], [work.epochs.toLocaleString("en"), 1],
      ], work.self ? "self" : "");
    }));
}

function drawSamples() {
  setText("prompt", doc.prompt || "");
  const why = byId("sampling");
  why.hidden = !doc.sampling;
  setText("sampling", doc.sampling || "");
  const samples = Object.entries(doc.samples || {}).sort((one, other) => other[0] - one[0]);
  fill(byId("samples"), samples.map(([epoch, [tokens, words]]) => {
    const made = make("li");
    made.append(make("span", `epoch ${epoch}, ${short(tokens)} tokens`, "quiet"),
      make("p", doc.prompt + words));
    return made;
  }));
  if (!samples.length && !doc.sampling)
    fill(byId("samples"), [make("li", "the first sample is on its way", "quiet")]);
}

function drawNews() {
  fill(byId("news"), doc.news.map(([at, level, words]) => {
    const made = make("li", undefined, level);
    const when = new Date(1000 * at);
    const time = make("time", when.toLocaleTimeString("en-GB"));
    time.dateTime = when.toISOString();
    made.append(time, (level === "warning" ? "! " : level === "error" ? "!! " : "") + words);
    return made;
  }));
  const none = frozen() ? "not in a frozen page" : "nothing yet";
  if (!doc.news.length) fill(byId("news"), [make("li", none, "quiet")]);
}

// ------------------------------------------------------------------ views

function drawViews() {
  const chat = Boolean(doc.chat) && !frozen();
  byId("views").hidden = !chat;
  const talk = chat && location.hash === "#chat";
  byId("chat-view").hidden = !talk;
  byId("run-view").hidden = talk;
  for (const [id, here] of [["to-run", !talk], ["to-chat", talk]])
    if (here) byId(id).setAttribute("aria-current", "page");
    else byId(id).removeAttribute("aria-current");
  if (!talk) redraw();
}

function redraw() {
  for (const [id, there] of Object.entries(drawn)) {
    there.destroy();
    delete drawn[id];
    there.redo();
  }
}

// ------------------------------------------------------------------ chat

const talk = [];
let conversation = 0; // counts up with each new one
let running = null;

function say(words, name, who) {
  const made = make("p", undefined, name);
  made.append(make("span", who + ": ", "quiet"));
  const text = document.createTextNode(words);
  made.append(text);
  byId("talk").append(made);
  byId("talk").scrollTop = byId("talk").scrollHeight;
  return text;
}

async function ask(event) {
  event.preventDefault();
  const words = byId("words").value;
  if (!words.trim() || running) return;
  const chat = document.querySelector("input[name=mode]:checked").value === "chat";
  const mine = conversation;
  running = new AbortController();
  byId("send").disabled = true;
  byId("halt").disabled = false;
  byId("words").value = "";
  byId("talk").setAttribute("aria-busy", "true"); // an answer is read out when it is whole
  say(words, "own", "you");
  const body = { model: "tutti", stream: true, max_tokens: 256, temperature: 0.7 };
  if (chat) body.messages = [...talk, { role: "user", content: words }];
  else body.prompt = words;
  const answer = say("", "", "model");
  let whole = false;
  try {
    await answered(chat ? "v1/chat/completions" : "v1/completions", body, answer);
    whole = true;
  } catch (error) {
    if (error.name !== "AbortError" && mine === conversation) say(error.message, "fault", "fault");
  }
  // The beginning of an answer that was broken off was said too, as it is in  tutti chat .
  if (chat && mine === conversation && (whole || answer.data))
    talk.push({ role: "user", content: words }, { role: "assistant", content: answer.data });
  running = null;
  byId("talk").removeAttribute("aria-busy");
  byId("send").disabled = false;
  byId("halt").disabled = true;
  byId("words").focus();
}

async function answered(path, body, place) {
  const got = await fetch(path, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
    signal: running.signal,
  });
  if (!got.ok) throw new Error(await reason(got));
  const reader = got.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let missing = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data === "[DONE]") continue;
      const piece = JSON.parse(data);
      if (piece.error) throw new Error(piece.error.message);
      const without = piece.tutti ? withoutWords(piece.tutti) : "";
      if (without && without !== missing) say(without, "fault", "note");
      missing = without || missing;
      for (const choice of piece.choices) place.data += choice.text ?? choice.delta.content ?? "";
    }
    byId("talk").scrollTop = byId("talk").scrollHeight;
  }
}

function withoutWords(found) {
  const stages = found.missing_stages;
  const noun = stages.length === 1 ? "stage" : "stages";
  return `without block ${noun} ${stages.join(", ")}, of ${found.block_stages}`;
}

async function reason(got) {
  const text = await got.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 300);
  }
}

// ------------------------------------------------------------------ from where

function frozen() {
  return globalThis.tuttiFrozen !== undefined;
}

function listen() {
  const source = new EventSource("stream");
  source.addEventListener("whole", (event) => take(JSON.parse(event.data), true));
  source.addEventListener("change", (event) => take(JSON.parse(event.data), false));
  source.addEventListener("error", () => {
    byId("health").className = "pill";
    setText("health", "not connected");
    tell("No connection to the server of this page; trying again. It runs as  tutti web");
    if (source.readyState === EventSource.CLOSED) refused();
  });
}

// The browser does not tell a script which answer closed its stream.
async function refused() {
  setTimeout(listen, 15000);
  const got = await fetch("stream").catch(() => null);
  if (!got) return;
  if (got.status === 401) location.reload(); // a server that began anew knows no earlier visitor
  if (got.ok) await got.body.cancel();
  else tell(await reason(got));
}

function begin() {
  for (const [id, draw] of [["loss-more", drawCurves], ["epochs-more", drawCurves],
    ["peers-more", drawMap]])
    byId(id).addEventListener("toggle", () => doc.run && draw());
  addEventListener("hashchange", () => doc.run && drawViews());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    redraw();
  });
  byId("ask").addEventListener("submit", ask);
  byId("halt").addEventListener("click", () => running && running.abort());
  byId("fresh").addEventListener("click", () => {
    conversation += 1;
    if (running) running.abort();
    talk.length = 0;
    byId("talk").replaceChildren();
  });
  byId("words").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
  });
  if (!frozen()) {
    listen();
    return;
  }
  take(globalThis.tuttiFrozen, true);
  byId("frozen").hidden = false;
  const when = new Date(1000 * doc.at);
  byId("frozen-at").dateTime = when.toISOString();
  byId("frozen-at").textContent = when.toLocaleString("en-GB");
}

begin();
