// The four figures that matter, each with what it means, over the last rounds.

import { sum, wall } from "./passes.js";
import { last, number, percent, several } from "./words.js";

const OVER = 100;

function say(id, figure, means) {
  document.getElementById(id).textContent = figure;
  document.getElementById(`${id}-means`).textContent = means;
}

function gainMeans(rounds, committed) {
  const drafting = rounds.filter((round) => round.k > 0).length;
  if (!drafting) return "Nothing is drafted: one token a round.";
  const gain = committed - 1;
  if (gain < 0.05 && 2 * drafting < rounds.length) return `Only ${several(drafting, "round")} of ${rounds.length} drafted: the rest had k 0.`;
  if (gain < 0.05) return "Drafting does not pay now: hardly a drafted token is kept.";
  return `Speculation gains ${number(gain)} tokens a round.`;
}

function waitMeans(share) {
  if (share < 0.02) return "Bytes arrive before they are needed.";
  if (share < 0.25) return "The link is hidden for the most part.";
  return share < 0.6 ? "The link is what limits speed." : "Nearly all time goes to moving experts.";
}

function hitsMeans(asked, late, misses) {
  if (!late && !misses) return "Every expert was there when its layer asked.";
  return `Of ${several(asked, "expert")}, ${late} came late and ${misses} were not foretold.`;
}

// instead: what is said while there is no round.
export function drawHeadline(passes, isBusy, instead) {
  const rounds = passes.rounds(OVER);
  document.getElementById("over").textContent = rounds.length ? `Over ${last(rounds.length, "round")}` : "Over the last rounds";
  if (!rounds.length) {
    for (const id of ["speed", "gain", "wait", "hits"]) say(id, "–", instead);
    return;
  }
  const time = wall(rounds), committed = sum(rounds, "committed") / rounds.length, waiting = sum(rounds, "stall_s") / time;
  const hits = sum(rounds, "hits"), late = sum(rounds, "late"), misses = sum(rounds, "misses"), asked = hits + late + misses;
  say("speed", number(sum(rounds, "committed") / time), isBusy ? "Decoding now." : "Idle now.");
  say("gain", number(committed), gainMeans(rounds, committed));
  say("wait", percent(waiting), waitMeans(waiting));
  say("hits", asked ? percent(hits / asked) : "–", hitsMeans(asked, late, misses));
}
