// Figures as people read them. Pure functions.

export const NOTHING_YET = "Nothing yet.";

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(value) {
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) { value /= 1024; unit += 1; }
  return `${unit === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(value >= 10 ? 1 : 2)} ${UNITS[unit]}`;
}

export function number(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export const percent = (share) => `${(100 * share).toFixed(share > 0.0005 && share < 0.095 ? 1 : 0)}\u00a0%`;

export const count = (value) => value.toLocaleString("en-GB");

export const several = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

export const last = (value, noun) => (value === 1 ? `the last ${noun}` : `the last ${several(value, noun)}`);

export function seconds(value) {
  return value >= 1 ? `${value.toFixed(1)} s` : value >= 1e-3 ? `${(1e3 * value).toFixed(value >= 0.1 ? 0 : 1)} ms`
    : `${(1e6 * value).toFixed(0)} µs`;
}
