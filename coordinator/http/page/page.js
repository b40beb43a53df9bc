// The page asks for what it shows, and asks again when the log says that something happened.

const ROWS = 60; // handoffs shown, the oldest first
const LINES = 200; // lines of the log kept
const CALM_MS = 1000; // between two looks while little happens
const HURRY_MS = 250; // between two looks at the least

const at = (id) => document.getElementById(id);
const make = (tag, text = "", kind = "") => {
  const element = document.createElement(tag);
  if (text !== "") element.textContent = text;
  if (kind) element.className = kind;
  return element;
};
const duration = (s) => (s === null ? "-" : s < 60 ? `${s.toFixed(1)} s` : s < 3600 ? `${(s / 60).toFixed(1)} min`
  : `${(s / 3600).toFixed(1)} h`);
const size = (bytes) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${bytes.toFixed(unit ? 1 : 0)} ${units[unit]}`;
};
const sum = (numbers) => Object.values(numbers).reduce((a, b) => a + b, 0);

async function ask(path, options) {
  const answer = await fetch(path, options);
  const content = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(content.error), { status: answer.status });
  return content;
}

// --- what is shown

function showStatus(status) {
  at("name").textContent = status.name;
  const verdict = at("verdict");
  verdict.textContent = status.ready ? "ready" : "not ready";
  verdict.className = `pill ${status.ready ? "ready" : "not-ready"}`;
  at("facts").textContent = `version ${status.version}, backend ${status.backend}, up ${duration(status.uptime_s)}`;
  at("reasons").replaceChildren(...status.reasons.map((reason) => make("li", reason)));
  const tiles = [
    ["in flight", sum(status.in_flight)],
    ["open", status.in_flight.open],
    ["waiting", status.in_flight.waiting],
    ["moving", status.in_flight.moving],
    ["oldest after prefill", duration(status.oldest_after_prefill_s)],
    ["succeeded", status.succeeded],
    ["failed", sum(status.failed)],
    ["moved", size(status.moved_bytes)],
  ];
  at("tiles").replaceChildren(...tiles.map(([what, value]) => {
    const tile = make("div", "", "tile");
    tile.append(make("b", String(value)), make("span", what));
    return tile;
  }));
  showFailures(status.failed);
  showQuarantine(status.quarantine, status.unreleased);
}

function showFailures(failed) {
  const most = Math.max(1, ...Object.values(failed));
  const rows = Object.entries(failed).sort((a, b) => b[1] - a[1]).map(([reason, count]) => {
    const row = make("div", "", "reason");
    const meter = make("div", "", "meter");
    const filled = make("span");
    filled.style.width = `${(100 * count) / most}%`;
    meter.append(filled);
    row.append(make("span", reason), meter, make("b", String(count)));
    return row;
  });
  at("failures").replaceChildren(...(rows.length ? rows : [make("p", "none", "quiet")]));
}

function showQuarantine(held, unreleased) {
  const meter = make("div", "", "meter");
  const filled = make("span");
  const part = held.budget_bytes ? held.held_bytes / held.budget_bytes : Number(held.held_bytes > 0);
  filled.style.width = `${Math.min(100, 100 * part)}%`;
  if (held.held_bytes) meter.append(filled);
  const words = `${held.handoffs} failed handoffs hold ${size(held.held_bytes)} of ${size(held.budget_bytes)}; `
    + `${unreleased} handoffs have pages that are not released`;
  at("quarantine").replaceChildren(meter, make("p", words), ...(held.trouble ? [make("p", held.trouble)] : []));
}

// What a handoff waits for, as its colour says it.
function kind(handoff) {
  if (handoff.failure) return "held";
  if (handoff.state === "moving") return "moving";
  if (handoff.state === "open") return "open";
  return handoff.decode === null || handoff.missing.includes("the offer of") ? "decode" : "prefill";
}

function bar(handoff, span) {
  const line = make("div", "", "bar");
  const piece = (from, to, kind) => {
    const part = make("span", "", kind);
    part.style.left = `${(100 * from) / span}%`;
    part.style.width = `${(100 * (to - from)) / span}%`;
    line.append(part);
  };
  const complete = handoff.after_prefill_s === null ? handoff.age_s : handoff.age_s - handoff.after_prefill_s;
  if (complete > 0 && handoff.after_prefill_s !== null) piece(0, complete, "open");
  piece(handoff.after_prefill_s === null ? 0 : complete, handoff.age_s, kind(handoff));
  if (handoff.remaining_s !== null && handoff.age_s + handoff.remaining_s <= span) {
    const tick = make("em");
    tick.style.left = `${(100 * (handoff.age_s + handoff.remaining_s)) / span}%`;
    line.append(tick);
  }
  return line;
}

function axis(span) {
  const row = make("div", "", "row axis");
  const line = make("div", "", "bar");
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    const mark = make("span", span < 5 ? `${(part * span).toFixed(2)} s` : duration(part * span));
    mark.style.left = `${100 * part}%`;
    line.append(mark);
  }
  row.append(make("div", "room, from -> to"), line, make("div", "waits for"));
  return row;
}

function showHandoffs(page) {
  const rows = page.handoffs;
  // The axis ends at the oldest, with room for its deadline when that is near.
  const ends = rows.map((h) => h.age_s + Math.min(h.remaining_s ?? 0, h.age_s / 2));
  const span = Math.max(1, ...ends);
  at("shown").textContent = page.next ? `the ${rows.length} oldest` : "";
  at("timeline").replaceChildren(axis(span), ...rows.map((handoff) => {
    const row = make("button", "", "row");
    row.dataset.room = handoff.room;
    row.dataset.kind = kind(handoff);
    const who = make("div", "", "who");
    who.append(make("b", handoff.room), make("span", ` ${handoff.prefill ?? "?"} -> ${handoff.decode ?? "?"}`, "quiet"));
    const held = handoff.held.length ? `; not quiet: ${handoff.held.join(", ")}` : "";
    const failure = handoff.failure;
    const words = failure ? `${failure.reason}: ${failure.message}${held}` : handoff.missing;
    const waits = make("div", words);
    waits.title = words;
    row.append(who, bar(handoff, span), waits);
    row.addEventListener("click", () => openStory(handoff.room));
    return row;
  }), ...(rows.length ? [] : [make("p", "nothing is in flight", "quiet")]));
}

function showGroups(groups) {
  const table = make("table");
  for (const group of groups) {
    const row = make("tr");
    const ranks = make("td");
    for (let number = 0; number < group.world_size; number += 1) {
      const name = `${group.name}/${number}`;
      const rank = group.ranks.find((known) => known.name === name);
      const missing = group.missing.includes(name);
      const mark = make("span", String(number), `rank ${missing ? "missing" : rank.lag > 1000 ? "lags" : ""}`);
      mark.title = rank ? `${name}: pid ${rank.pid}, ${rank.lag} events behind, heard ${duration(rank.silent_s)} ago`
        : `${name} has not joined`;
      ranks.append(mark);
    }
    row.append(make("td", group.name), make("td", group.role, "quiet"), ranks,
      make("td", `${group.in_flight} in flight`, "quiet"));
    table.append(row);
  }
  at("groups").replaceChildren(groups.length ? table : make("p", "none has joined", "quiet"));
}

// --- one handoff

let opened = null;

async function openStory(room) {
  opened = room;
  at("story").hidden = false;
  at("cancel-answer").textContent = "";
  await refreshStory();
  at("story").scrollIntoView({ block: "nearest" });
}

async function refreshStory() {
  if (opened === null) return;
  const story = await ask(`v1/handoffs/${opened}`);
  const handoff = story.handoff;
  if (!handoff) {
    at("story-title").textContent = `Room ${story.room}`;
    at("story-summary").textContent = story.failure ? `${story.failure.reason}: ${story.failure.message}` : "succeeded";
    return;
  }
  at("story-title").textContent = `Room ${handoff.room}, attempt ${handoff.attempt}: ${handoff.state}`;
  const failure = handoff.failure;
  at("story-summary").textContent = failure
    ? `${failure.reason}: ${failure.message}. Whose fault: ${failure.fault}`
      + `${failure.origin ? `, from ${failure.origin}` : ""}.`
    : handoff.missing ? `Waits for ${handoff.missing}.` : "";
  at("story-steps").replaceChildren(...story.story.map((step) => {
    const row = make("tr");
    row.append(make("td", `${step.at_s.toFixed(3)} s`), make("td", step.state), make("td", step.cause));
    return row;
  }));
  at("story-ranks").replaceChildren(...story.ranks.map((rank) => {
    const row = make("tr");
    row.append(make("td", rank.rank), make("td", rank.said), make("td", `${rank.pages} pages`),
      make("td", rank.alive ? `heard ${duration(rank.silent_s)} ago` : "is not there"));
    return row;
  }));
  at("cancel").querySelector("button").disabled = Boolean(failure) || story.ended_s !== null;
}

let token = "";

async function cancel() {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const body = JSON.stringify({ why: at("why").value });
  try {
    await ask(`v1/handoffs/${opened}/cancel`, { method: "POST", headers, body });
    at("cancel-answer").textContent = "cancelled";
  } catch (error) {
    if (error.status === 401) {
      token = window.prompt("This needs the coordinator's token (http.token).") ?? "";
      if (token) return cancel();
    }
    at("cancel-answer").textContent = error.message;
  }
  look();
}

at("cancel").addEventListener("submit", (event) => { event.preventDefault(); cancel(); });
at("close").addEventListener("click", () => { opened = null; at("story").hidden = true; });

// --- when to look

let looking = false;
let due = null;

async function look() {
  if (looking || document.hidden) return;
  looking = true;
  try {
    const [status, handoffs, groups] = await Promise.all(
      [ask("v1/status"), ask(`v1/handoffs?limit=${ROWS}`), ask("v1/groups")]);
    showStatus(status);
    showHandoffs(handoffs);
    showGroups(groups.groups);
    await refreshStory();
    document.body.dataset.looked = String(Number(document.body.dataset.looked ?? 0) + 1);
  } catch (error) {
    at("verdict").textContent = error.status ? error.message : "no answer";
    at("verdict").className = "pill not-ready";
  } finally {
    looking = false;
  }
}

function lookSoon() {
  due ??= setTimeout(() => { due = null; look(); }, HURRY_MS);
}

setInterval(look, CALM_MS);
document.addEventListener("visibilitychange", look);
look();

// --- the log

let lost = 0;
const log = new EventSource("v1/events?backlog=50");

log.addEventListener("message", (event) => {
  // A room is a 64-bit number, which JSON.parse would round.
  const entry = JSON.parse(event.data.replace(/"room":(\d+)/g, '"room":"$1"'));
  const { timestamp, level, event: name, ...rest } = entry;
  const line = make("li", "", level);
  const words = Object.entries(rest).map(([key, value]) => `${key}=${typeof value === "object" ? JSON.stringify(value) : value}`);
  line.append(`${timestamp.slice(11, 23)} `, make("b", name), ` ${words.join(" ")}`);
  const list = at("log");
  list.prepend(line);
  while (list.childElementCount > LINES) list.lastElementChild.remove();
  lookSoon();
});

log.addEventListener("dropped", (event) => {
  lost += JSON.parse(event.data).lines;
  at("lost").textContent = `${lost} lines were lost, for this page was too slow`;
});
