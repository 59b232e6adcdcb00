// The last rounds side by side, as long as they took: what drafted, verified, waited and was on the link, and when.

import { begin, colour, empty } from "./draw.js";
import { sum, wall } from "./passes.js";
import { NOTHING_YET, last, percent, seconds } from "./words.js";

const LANES = [["draft", "draft"], ["verify", "verify"], ["waiting", "stall"], ["link", "copy"]];
const LEFT = 58;
const TOP = 22;
const LANE = 31;
const BAR = 20;

export function drawTimeline(passes) {
  const canvas = document.getElementById("timeline"), caption = document.getElementById("timeline-says");
  const most = Math.max(3, Math.min(14, Math.floor((canvas.clientWidth - LEFT) / 84)));
  const rounds = passes.rounds(most);
  if (!rounds.length) {
    empty(canvas, NOTHING_YET);
    caption.textContent = "";
    return;
  }
  const { context, width } = begin(canvas), whole = wall(rounds), scale = (width - LEFT - 4) / whole;
  const bar = (lane, x, length) => {
    context.fillStyle = colour(LANES[lane][1]);
    context.fillRect(x, TOP + lane * LANE + (LANE - BAR) / 2, Math.max(0.75, length), BAR);
  };
  drawLanes(context, width);
  let x = LEFT;
  for (const round of rounds) {
    const length = (round.end_s - round.begin_s) * scale, spans = passes.spans.get(round.number);
    if (round.k > 0) bar(0, x, round.draft_s * scale);
    bar(1, x + round.draft_s * scale, round.verify_s * scale);
    for (const [lane, shares] of [[2, spans?.waits], [3, spans?.copies]]) {
      for (let at = 0; at < (shares?.length ?? 0); at += 2) {
        bar(lane, x + shares[at] * length, (shares[at + 1] - shares[at]) * length);
      }
    }
    drawBorder(context, x, length, round);
    x += length;
  }
  const part = (name) => percent(sum(rounds, name) / whole);
  caption.textContent = `${seconds(whole)} for ${last(rounds.length, "round")}: ${part("draft_s")} for drafting, ${part("verify_s")} for verifying. Inside of these two the model waited for experts, ${part("stall_s")} of the ${seconds(whole)}. Above each: tokens drafted → committed.`;
  canvas.setAttribute("aria-label", caption.textContent);
}

function drawLanes(context, width) {
  context.textAlign = "right";
  context.textBaseline = "middle";
  LANES.forEach(([name], lane) => {
    const middle = TOP + (lane + 0.5) * LANE;
    context.fillStyle = colour("grid");
    context.fillRect(LEFT, middle - BAR / 2, width - LEFT - 4, BAR);
    context.fillStyle = colour("dim");
    context.fillText(name, LEFT - 8, middle);
  });
}

function drawBorder(context, x, length, round) {
  context.fillStyle = colour("card");
  context.fillRect(x + length - 0.75, TOP, 1.5, LANES.length * LANE);
  if (length < 34) return;
  context.fillStyle = colour("dim");
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  context.fillText(`${round.k} → ${round.committed}`, x + length / 2, 14);
}
