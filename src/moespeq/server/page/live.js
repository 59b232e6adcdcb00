// The connection: asks for the state again and again, goes on where it was after a loss, and says what is wrong.

const BUSY_MS = 500;
const IDLE_MS = 1000;
const RETRY_MS = [1000, 2000, 4000];
const PATIENCE_MS = 5000;

export class KeyWanted extends Error {}

export class Live {
  // has(): {since, experts_since}, what the page has already. take(state), fail(error): what came of asking.
  constructor({ has, take, fail }) {
    this.has = has;
    this.take = take;
    this.fail = fail;
    this.key = remembered();
    this.lost = 0;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.soon(0); });
  }

  useKey(key) {
    this.key = key;
    try { sessionStorage.setItem("moespeq-key", key); } catch { /* a browser that keeps nothing */ }
    this.soon(0);
  }

  headers() { return this.key ? { Authorization: `Bearer ${this.key}` } : {}; }

  soon(delay) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), delay);
  }

  async ask() {
    if (document.hidden) return; // asks when it is seen again
    try {
      const answer = await fetch(`live?${new URLSearchParams(this.has())}`, { headers: this.headers(), signal: AbortSignal.timeout(PATIENCE_MS) });
      if (answer.status === 401) throw new KeyWanted();
      if (!answer.ok) throw new Error(`The server answered ${answer.status}.`);
      const state = await answer.json();
      this.lost = 0;
      this.take(state);
      this.soon(state.running || state.status === "loading" ? BUSY_MS : IDLE_MS);
    } catch (error) {
      this.fail(error);
      this.soon(RETRY_MS[Math.min(this.lost, RETRY_MS.length - 1)]);
      this.lost += 1;
    }
  }
}

function remembered() {
  try { return sessionStorage.getItem("moespeq-key") ?? ""; } catch { return ""; }
}
