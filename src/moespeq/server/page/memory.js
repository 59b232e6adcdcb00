// Where the bytes lie, and why they cross the link: bars of elements, with their figures beside them.

import { bytes, count, percent } from "./words.js";
import { sum } from "./passes.js";

const PARTS = [
  ["dense", "dense weights", "attention, routers, embeddings"],
  ["base", "INT4 base", "what the draft computes with"],
  ["kv", "KV cache", ""],
  ["workspace", "workspace", "activations, logits, graphs"],
  ["slots", "expert slots", ""],
];
const CAUSES = [
  ["demand", "demand", "asked for now"],
  ["stage", "stage", "a later layer's, while verifying"],
  ["saturate", "saturate", "at the draft's end"],
  ["prefetch", "prefetch", "while drafting"],
  ["prime", "prime", "at the draft's begin"],
  ["base", "base", "an expert gets a row"],
];
const OVER = 240;

function element(kind, text = "", colour = null) {
  const made = document.createElement(kind);
  made.textContent = text;
  if (colour) made.dataset.colour = colour;
  return made;
}

function named(colour, name, more) {
  const cell = element("span");
  if (colour) cell.append(element("i", "", colour));
  cell.append(name);
  if (more) cell.append(" ", element("small", more));
  return cell;
}

export function drawMemory(engine, numResident) {
  const box = document.getElementById("memory");
  const device = element("div"), used = numResident * engine.slot_bytes;
  const total = Object.values(engine.device_bytes).reduce((all, part) => all + part, 0);
  device.append(heading(engine.device === "cuda" ? "GPU" : "Device (this machine's RAM)", bytes(total)));
  device.append(bar(PARTS.map(([name]) => [name, engine.device_bytes[name]]), { slots: 1 - used / engine.device_bytes.slots }));
  const slots = `${count(numResident)} of ${count(engine.num_slots)} hold an expert`;
  device.append(list(PARTS.map(([name, title, more]) => [name, title, name === "slots" ? slots : name === "kv" ? `${count(engine.context_tok)} tokens` : more, engine.device_bytes[name]])));
  box.replaceChildren(device, host(engine));
}

function host(engine) {
  const made = element("div"), filled = engine.host_filled_bytes;
  made.append(heading("Host memory for records", bytes(engine.host_bytes)));
  if (!engine.host_bytes) {
    made.append(element("p", "None: records come from the disk each time."));
  } else {
    made.append(bar([["host", engine.host_bytes]], { host: filled === null ? 0 : 1 - filled / engine.host_bytes }));
    made.append(element("p", filled === null ? "A cache in front of the disk." : `${bytes(filled)} are filled from the disk.`));
  }
  return made;
}

function heading(title, size) {
  const made = element("h3");
  made.append(element("span", title), element("span", size));
  return made;
}

// unfilled: the share of a part that holds nothing yet.
function bar(parts, unfilled) {
  const made = element("div");
  made.className = "memory-bar";
  made.setAttribute("aria-hidden", "true");
  for (const [name, size] of parts) {
    const part = element("i", "", name);
    part.style.flexGrow = `${size}`;
    part.style.flexBasis = "0";
    if (unfilled[name] > 0) {
      const rest = element("b");
      rest.style.width = `${100 * unfilled[name]}%`;
      part.append(rest);
    }
    made.append(part);
  }
  return made;
}

function list(rows) {
  const made = element("ul");
  made.className = "parts";
  for (const [name, title, more, size] of rows) {
    const row = element("li");
    row.append(named(name, title, more), element("span", bytes(size)));
    made.append(row);
  }
  return made;
}

export function drawCauses(passes) {
  const recent = passes.all.slice(-OVER);
  const rows = CAUSES.map(([name, title, more]) => [name, title, more, sum(recent, `${name}_bytes`)]);
  const total = rows.reduce((all, row) => all + row[3], 0), tokens = sum(recent, "committed");
  rows.push(["wasted", "wasted", "of these, left unused", sum(recent, "wasted_bytes")]);
  const most = Math.max(1, ...rows.map((row) => row[3]));
  document.getElementById("causes").replaceChildren(...rows.map(([name, title, more, size]) => {
    const row = element("li"), track = element("span"), fill = element("i", "", name);
    track.className = "track";
    fill.style.width = `${(100 * size) / most}%`;
    track.append(fill);
    row.append(named(null, title, more), track, element("span", bytes(size)));
    return row;
  }));
  document.getElementById("causes-says").textContent = recent.length
    ? `${bytes(total)} in the last ${recent.length} passes, ${bytes(total / Math.max(1, tokens))} a token; ${percent(total ? rows[0][3] / total : 0)} only when a layer asked for it.`
    : "";
}
