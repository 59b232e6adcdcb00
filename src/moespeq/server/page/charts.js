// The charts over rounds. Each draws one canvas from the passes, and says the same in words.

import { area, axes, bars, empty, line, roundedUp, steps } from "./draw.js";
import { grouped, sum, wall } from "./passes.js";
import { NOTHING_YET, bytes, count, last, number, percent, several } from "./words.js";

const SHOWN = 240;
const GROUPS = 80;

const byId = (id) => document.getElementById(id);
const ends = (rounds) => [`${several(rounds.length, "round")} ago`, "now"];

function chart(id, rounds, draw) {
  const canvas = byId(id), caption = byId(`${id}-says`);
  if (!rounds.length) {
    empty(canvas, NOTHING_YET);
    caption.textContent = "";
    return;
  }
  caption.textContent = draw(canvas);
  canvas.setAttribute("aria-label", caption.textContent);
}

function speed(rounds) {
  chart("speed-chart", rounds, (canvas) => {
    const values = grouped(rounds, GROUPS).map((group) => sum(group, "committed") / wall(group));
    const plot = axes(canvas, { most: roundedUp(Math.max(...values)), label: number, ends: ends(rounds) });
    area(plot, values, "verify");
    line(plot, values, "verify");
    return `Tokens a second: ${number(values.at(-1))} now, ${number(Math.min(...values))} to ${number(Math.max(...values))} in ${last(rounds.length, "round")}.`;
  });
}

function depth(rounds) {
  chart("depth-chart", rounds, (canvas) => {
    const groups = grouped(rounds, GROUPS);
    const mean = (name) => groups.map((group) => sum(group, name) / group.length);
    const k = mean("k"), committed = mean("committed");
    const most = Math.max(2, Math.ceil(Math.max(...k, ...committed) / 2) * 2);
    const plot = axes(canvas, { most, label: (value) => `${value}`, ends: ends(rounds) });
    plot.context.globalAlpha = 0.3;
    steps(plot, committed, "verify", { filled: true });
    plot.context.globalAlpha = 1;
    steps(plot, committed, "verify");
    steps(plot, k, "draft");
    const newest = rounds.at(-1);
    return `The newest round drafted ${newest.k} and committed ${newest.committed}; ${last(rounds.length, "round")}, on average, ${number(sum(rounds, "k") / rounds.length)} and ${number(sum(rounds, "committed") / rounds.length)}.`;
  });
}

function acceptance(rounds) {
  const drafting = rounds.filter((round) => round.k > 0);
  if (rounds.length && !drafting.length) {
    empty(byId("acceptance-chart"), "Nothing is drafted: k is 0.");
    byId("acceptance-chart-says").textContent = "Every token is the target's own.";
    return;
  }
  chart("acceptance-chart", drafting, (canvas) => {
    const deepest = Math.max(...drafting.map((round) => round.k));
    const shares = Array.from({ length: deepest }, (_, place) => {
      const reached = drafting.filter((round) => round.k > place);
      return reached.filter((round) => round.accepted > place).length / reached.length;
    });
    const plot = axes(canvas, { most: 1, label: percent, ends: ["first drafted token", deepest > 1 ? `place ${deepest}` : ""] });
    bars(plot, shares.map((share) => [[share, "verify"]]), { gap: 5 });
    return `Of the first drafted tokens of ${several(drafting.length, "round")} the target kept ${percent(shares[0])}` +
      (deepest > 1 ? `, and ${percent(shares.at(-1))} of those at place ${deepest}.` : ".");
  });
}

function link(rounds) {
  chart("link-chart", rounds, (canvas) => {
    const groups = grouped(rounds, GROUPS);
    const share = (name) => groups.map((group) => Math.min(1, sum(group, name) / wall(group)));
    const plot = axes(canvas, { most: 1, label: percent, ends: ends(rounds) });
    const busy = share("link_busy_s"), time = wall(rounds), part = (name) => percent(Math.min(1, sum(rounds, name) / time));
    area(plot, busy, "copy");
    line(plot, busy, "copy");
    line(plot, share("stall_s"), "stall");
    return `In ${last(rounds.length, "round")} the link moved bytes ${part("link_busy_s")} of the time, and the model waited for it ${part("stall_s")} of the time.`;
  });
}

function experts(rounds, totals) {
  chart("experts-chart", rounds, (canvas) => {
    const parts = grouped(rounds, GROUPS).map((group) =>
      [["hits", "hit"], ["late", "late"], ["misses", "miss"]].map(([name, shade]) => [sum(group, name) / group.length, shade]));
    const most = roundedUp(Math.max(1, ...parts.map((stack) => stack.reduce((all, [value]) => all + value, 0))));
    const plot = axes(canvas, { most, label: (value) => value.toFixed(most < 4 ? 1 : 0), ends: ends(rounds) });
    bars(plot, parts);
    const asked = (of) => ["hits", "late", "misses"].map((name) => `${count(totals[of + name] ?? 0)} ${name}`).join(", ");
    return `Since the start, in rounds: ${asked("")}; in prefills, which this chart leaves out: ${asked("prefill_")}. Of both, ${bytes(totals.wasted_bytes ?? 0)} arrived and left unused.`;
  });
}

export function drawCharts(passes) {
  const rounds = passes.rounds(SHOWN);
  speed(rounds);
  depth(rounds);
  acceptance(rounds);
  link(rounds);
  experts(rounds, passes.totals);
}
