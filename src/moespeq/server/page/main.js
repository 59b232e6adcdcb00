// Wires the page: the connection brings a state, the state is shown. Text goes in as text, never as markup.

import { AskBox } from "./ask.js";
import { drawCharts } from "./charts.js";
import { HeatMap } from "./heat.js";
import { drawHeadline } from "./headline.js";
import { KeyWanted, Live } from "./live.js";
import { drawCauses, drawMemory } from "./memory.js";
import { Passes } from "./passes.js";
import { useTheme } from "./theme.js";
import { drawTimeline } from "./timeline.js";
import { bytes, percent, several } from "./words.js";

const byId = (id) => document.getElementById(id);
const STATUS = {
  loading: ["wait", "loading"], ready: ["good", "ready"], unhealthy: ["bad", "unhealthy: see the server's log"],
  failed: ["bad", "the load failed"], closed: ["bad", "shutting down"],
};

const passes = new Passes(), heat = new HeatMap();
let latest = null;

const live = new Live({
  has: () => ({ since: passes.last, experts_since: heat.number }),
  take: (state) => { if (isSame(state)) show(state); },
  fail: (error) => (error instanceof KeyWanted ? wantKey() : say("bad", "no answer", gone())),
});
const ask = new AskBox({ model: () => latest?.model ?? "", headers: () => live.headers(), status: () => byId("status").textContent });

// A server that was started again counts from 1: forget what the other one told, and ask for all of it.
function isSame(state) {
  const isSame = latest === null || latest.start === state.start;
  if (!isSame) {
    latest = null;
    passes.forget();
    heat.forget();
    live.soon(0);
  }
  return isSame;
}

function show(state) {
  const isNew = latest === null || state.passes.length > 0 || standing(state) !== standing(latest);
  latest = state;
  passes.add(state);
  byId("model").textContent = state.model;
  byId("version").textContent = `moespeq ${state.version}`;
  if (byId("key-form").contains(document.activeElement)) byId("prompt").focus();
  byId("key-form").hidden = true;
  document.title = `${state.running ? "● " : ""}moespeq ${state.model}`;
  byId("queue").textContent = `${several(state.waiting, "request")} waiting, ${state.running} running`;
  say(...STATUS[state.status], "", state.running && state.status === "ready" ? "generating" : "");
  if (state.loading) showLoading(state.loading);
  ask.offer(state.engine);
  if (state.experts) heat.take(state.experts, state.engine?.num_slots ?? 0);
  if (isNew) draw();
}

function noRound() {
  if (!byId("key-form").hidden) return "No key, no figures.";
  return latest?.engine ? "No round yet: send a prompt." : "No round yet.";
}

// What is drawn beside the passes.
const standing = (state) => [state.status, state.running, state.engine?.host_filled_bytes].join();

function draw() {
  drawHeadline(passes, Boolean(latest?.running), noRound());
  drawCharts(passes);
  drawTimeline(passes);
  drawCauses(passes);
  if (latest?.engine) drawMemory(latest.engine, heat.experts?.num_resident ?? 0);
}

function showLoading({ what, done_bytes: done, total_bytes: total }) {
  const share = total ? `, ${bytes(done)} of ${bytes(total)} (${percent(done / total)})` : "";
  say("wait", `${what}${share}`, "");
}

function say(kind, status, problem, instead = "") {
  const pill = byId("status");
  pill.dataset.kind = kind;
  if (pill.textContent !== (instead || status)) pill.textContent = instead || status;
  byId("problem").hidden = !problem;
  if (byId("problem").textContent !== problem) byId("problem").textContent = problem;
  document.querySelector("main").dataset.stale = `${Boolean(problem)}`;
}

const gone = () => (latest
  ? "The server does not answer. The figures below are its last; this page goes on by itself when it is back."
  : "The server does not answer. This page goes on by itself when it does.");

function wantKey() {
  const isNew = byId("key-form").hidden;
  byId("key-form").hidden = false;
  if (isNew && document.activeElement === document.body) byId("key").focus(); // never away from who writes
  byId("key-hint").textContent = live.key ? "That key is not the server's; try again." : "It stays in this tab, until the tab is closed.";
  say("wait", "wants its API key", "");
  ask.offer(null);
  draw();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  live.useKey(byId("key").value);
});

let resized = 0;
new ResizeObserver(() => {
  cancelAnimationFrame(resized);
  resized = requestAnimationFrame(() => { draw(); heat.draw(); });
}).observe(document.querySelector("main"));

useTheme(byId("theme"), () => { draw(); heat.draw(); });
live.soon(0);
