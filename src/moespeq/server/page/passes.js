// The passes this tab knows: at most MOST of them, however long it is open. Knows nothing of the page.

const MOST = 480;
const MOST_SPANS = 16;

export class Passes {
  constructor() { this.forget(); }

  forget() {
    this.all = [];
    this.spans = new Map(); // number -> {copies, waits}
    this.totals = {};
    this.last = 0;
  }

  add(state) {
    for (const row of state.passes) {
      const pass = Object.fromEntries(state.columns.map((name, place) => [name, row[place]]));
      if (pass.number > this.last) { this.all.push(pass); this.last = pass.number; }
    }
    this.all.splice(0, this.all.length - MOST);
    for (const { number, copies, waits } of state.spans) this.spans.set(number, { copies, waits });
    for (const number of this.spans.keys()) {
      if (this.spans.size <= MOST_SPANS) break;
      this.spans.delete(number);
    }
    this.totals = state.totals;
  }

  // The last rounds, oldest first; prefills are no rounds.
  rounds(most) { return this.all.filter((pass) => !pass.is_prefill).slice(-most); }
}

export const sum = (passes, name) => passes.reduce((total, pass) => total + pass[name], 0);

export const wall = (passes) => passes.reduce((total, pass) => total + pass.end_s - pass.begin_s, 0);

// `passes` in at most `most` groups of equal size, the newest in the last one.
export function grouped(passes, most) {
  const size = Math.max(1, Math.ceil(passes.length / most));
  const groups = [];
  for (let end = passes.length; end > 0; end -= size) groups.unshift(passes.slice(Math.max(0, end - size), end));
  return groups;
}
