// Drawing on canvases: sharp at any density, in the page's colours. A chart is drawn when there is something new to say.

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
const LEFT = 44;
const BOTTOM = 18;
const TOP = 8;

// A cleared context whose units are CSS pixels: {context, width, height}.
export function begin(canvas) {
  const density = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * density) || canvas.height !== Math.round(height * density)) {
    canvas.width = Math.round(width * density);
    canvas.height = Math.round(height * density);
  }
  const context = canvas.getContext("2d");
  context.setTransform(density, 0, 0, density, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = FONT;
  return { context, width, height };
}

// Axes from 0 to `most`, and where things go between them: {context, x(share), y(value), left, right, bottom}.
export function axes(canvas, { most, label, ends }) {
  const { context, width, height } = begin(canvas);
  const left = LEFT, right = width - 6, bottom = height - BOTTOM;
  const y = (value) => bottom - (Math.min(value, most) / most) * (bottom - TOP);
  context.strokeStyle = colour("grid");
  context.fillStyle = colour("dim");
  context.textBaseline = "middle";
  context.textAlign = "right";
  context.lineWidth = 1;
  for (const share of [0, 0.5, 1]) {
    const at = Math.round(y(share * most)) + 0.5;
    context.beginPath();
    context.moveTo(left, at);
    context.lineTo(right, at);
    context.stroke();
    context.fillText(label(share * most), left - 6, at);
  }
  context.textBaseline = "alphabetic";
  context.textAlign = "left";
  context.fillText(ends[0], left, height - 4);
  context.textAlign = "right";
  context.fillText(ends[1], right, height - 4);
  return { context, y, left, right, bottom, x: (share) => left + share * (right - left) };
}

// A whole number of small steps above `value`, so that an axis does not jump at every change.
export function roundedUp(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.999) ?? value;
}

const places = (plot, values) =>
  values.map((value, index) => [plot.x((index + 0.5) / values.length), plot.y(value)]);

export function line(plot, values, name, width = 2) {
  const { context } = plot;
  context.strokeStyle = colour(name);
  context.lineWidth = width;
  context.lineJoin = "round";
  context.beginPath();
  for (const [x, y] of places(plot, values)) context.lineTo(x, y);
  context.stroke();
}

export function area(plot, values, name) {
  const { context } = plot, points = places(plot, values);
  if (!points.length) return;
  context.fillStyle = colour(name);
  context.globalAlpha = 0.16;
  context.beginPath();
  context.moveTo(points[0][0], plot.bottom);
  for (const [x, y] of points) context.lineTo(x, y);
  context.lineTo(points.at(-1)[0], plot.bottom);
  context.fill();
  context.globalAlpha = 1;
}

// A level a value, joined upright.
export function steps(plot, values, name, { filled = false } = {}) {
  const { context } = plot;
  context.beginPath();
  if (filled) context.moveTo(plot.left, plot.bottom);
  values.forEach((value, index) => {
    context.lineTo(plot.x(index / values.length), plot.y(value));
    context.lineTo(plot.x((index + 1) / values.length), plot.y(value));
  });
  if (filled) {
    context.lineTo(plot.right, plot.bottom);
    context.fillStyle = colour(name);
    context.fill();
  } else {
    context.strokeStyle = colour(name);
    context.lineWidth = 1.75;
    context.stroke();
  }
}

// Bars side by side, of parts on top of each other: parts[index] = [[value, colour], ...].
export function bars(plot, parts, { gap = 1 } = {}) {
  const { context } = plot, pitch = (plot.right - plot.left) / parts.length;
  parts.forEach((stack, index) => {
    let below = 0;
    for (const [value, name] of stack) {
      context.fillStyle = colour(name);
      const top = plot.y(below + value), height = plot.y(below) - top;
      context.fillRect(plot.left + index * pitch, top, Math.max(1, pitch - gap), height);
      below += value;
    }
  });
}

export function empty(canvas, says) {
  const { context, width, height } = begin(canvas);
  context.fillStyle = colour("dim");
  context.textAlign = "center";
  context.fillText(says, width / 2, height / 2);
}
