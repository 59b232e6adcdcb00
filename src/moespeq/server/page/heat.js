// Which experts have a slot and how often each was used lately: a cell an expert, a line a layer.

import { begin, colour, empty } from "./draw.js";
import { NOTHING_YET, count, percent } from "./words.js";

const LEFT = 54;
const BOTTOM = 18;
const TALLEST = 430;
const SHADES = 16;
const RESIDENT = 0x80;

export class HeatMap {
  constructor() {
    this.canvas = document.getElementById("heat");
    this.says = document.getElementById("heat-says");
    this.cellSays = document.getElementById("heat-cell");
    this.experts = null;
    this.cell = null; // [layer, expert]
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("keydown", (event) => this.step(event));
  }

  forget() { this.experts = this.cell = null; this.draw(); }

  take(experts, numSlots) {
    const levels = Uint8Array.from(atob(experts.levels), (character) => character.charCodeAt(0));
    this.experts = { ...experts, levels };
    this.says.textContent = `${count(experts.num_resident)} of ${count(levels.length)} experts are on the device, in ${count(numSlots)} slots: ${percent(experts.num_resident / levels.length)}.`;
    this.canvas.setAttribute("aria-label", `A map of ${experts.num_layers} layers and ${experts.num_experts} experts. ${this.says.textContent}`);
    this.draw();
    this.tell();
  }

  get number() { return this.experts?.number ?? 0; }

  draw() {
    const { experts, canvas } = this;
    if (experts) canvas.style.height = `${Math.min(TALLEST, Math.max(120, experts.num_layers * 26)) + BOTTOM}px`;
    if (!experts) return empty(canvas, NOTHING_YET);
    const { context, width, height } = begin(canvas);
    const wide = (width - LEFT) / experts.num_experts, high = (height - BOTTOM) / experts.num_layers;
    const gap = Math.min(wide, high) >= 6 ? 1.5 : Math.min(wide, high) >= 3.5 ? 0.5 : 0;
    const shades = { resident: ramp("resident"), absent: ramp("absent") };
    experts.levels.forEach((coded, index) => {
      const place = Math.round(((coded & ~RESIDENT) / 127) * (SHADES - 1));
      context.fillStyle = (coded & RESIDENT ? shades.resident : shades.absent)[place];
      const x = LEFT + (index % experts.num_experts) * wide, y = Math.floor(index / experts.num_experts) * high;
      context.fillRect(x, y, wide - gap, high - gap);
    });
    this.geometry = { wide, high };
    this.drawLabels(context, width, height, high);
    if (this.cell) {
      context.strokeStyle = colour("ink");
      context.lineWidth = 2;
      context.strokeRect(LEFT + this.cell[1] * wide - 1, this.cell[0] * high - 1, wide + 2 - gap, high + 2 - gap);
    }
  }

  drawLabels(context, width, height, high) {
    const { num_layers: layers, num_experts: experts } = this.experts;
    context.fillStyle = colour("dim");
    context.textAlign = "right";
    context.textBaseline = "middle";
    const every = Math.ceil(18 / high);
    for (let layer = 0; layer < layers; layer += every) context.fillText(layer === 0 ? "layer 0" : `${layer}`, LEFT - 7, (layer + 0.5) * high);
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    context.fillText("expert 0", LEFT, height - 4);
    context.textAlign = "right";
    context.fillText(`${experts - 1}`, width - 2, height - 4);
  }

  point(event) {
    if (!this.experts) return;
    const place = this.canvas.getBoundingClientRect();
    this.choose(Math.floor((event.clientY - place.top) / this.geometry.high), Math.floor((event.clientX - place.left - LEFT) / this.geometry.wide));
  }

  step(event) {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move || !this.experts) return;
    event.preventDefault();
    const [layer, expert] = this.cell ?? [-move[0], -move[1]];
    this.choose(layer + move[0], expert + move[1]);
  }

  choose(layer, expert) {
    const inside = (value, many) => value >= 0 && value < many;
    if (!inside(layer, this.experts.num_layers) || !inside(expert, this.experts.num_experts)) return;
    if (this.cell?.[0] === layer && this.cell[1] === expert) return;
    this.cell = [layer, expert];
    this.draw();
    this.tell();
  }

  tell() {
    if (!this.cell) return;
    const [layer, expert] = this.cell, coded = this.experts.levels[layer * this.experts.num_experts + expert];
    const use = coded & ~RESIDENT;
    const often = use === 0 ? "not used yet" : `recent use ${percent((use / 127) ** 2)} of the busiest expert's`;
    this.cellSays.textContent = `Layer ${layer}, expert ${expert}: ${coded & RESIDENT ? "on the device" : "not on the device"}, ${often}.`;
  }
}

// SHADES colours between the two ends that the style sheet gives.
function ramp(kind) {
  const [from, to] = [0, 1].map((end) => channels(colour(`heat-${kind}-${end}`)));
  return Array.from({ length: SHADES }, (_, place) => {
    const share = place / (SHADES - 1);
    return `rgb(${from.map((value, channel) => Math.round(value + (to[channel] - value) * share)).join(",")})`;
  });
}

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
