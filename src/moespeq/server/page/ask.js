// The box to try a prompt: one streamed answer at a time, by the same API as any client.

import { number, seconds, several } from "./words.js";

export class AskBox {
  // api: {model(), headers()}, of the server that is connected now.
  constructor(api) {
    this.api = api;
    this.parts = Object.fromEntries(["ask-form", "prompt", "style", "most", "temperature", "send", "stop", "answer", "answer-says"]
      .map((id) => [id, document.getElementById(id)]));
    this.running = null;
    this.hasStyle = this.isOffered = false;
    this.parts["ask-form"].addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    this.parts.stop.addEventListener("click", () => this.running?.abort());
    this.parts.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.send(); }
      if (event.key === "Escape") this.running?.abort();
    });
  }

  // engine: as the state tells it, null where nobody would answer. One without a chat template cannot chat.
  offer(engine) {
    this.isOffered = Boolean(engine);
    this.allow();
    if (!engine || this.hasStyle) return;
    this.hasStyle = true;
    this.parts.style.value = engine.has_chat ? "chat" : "text";
    this.parts.style.options[0].disabled = !engine.has_chat;
  }

  allow() { this.parts.send.ariaDisabled = `${this.running !== null || !this.isOffered}`; } // not `disabled`: the keyboard's focus would be lost

  async send() {
    const prompt = this.parts.prompt.value;
    if (this.running || !this.isOffered || !prompt.trim()) return;
    const text = document.createTextNode(""), began = performance.now();
    this.parts.answer.replaceChildren(text);
    this.show(new AbortController(), "Waiting for the first token…");
    const seen = { tokens: 0, first: 0, reason: "" };
    try {
      for await (const chunk of this.stream(prompt, this.running.signal)) {
        if (chunk.error) throw new Error(chunk.error.message);
        if (chunk.usage) seen.tokens = chunk.usage.completion_tokens;
        const [choice] = chunk.choices;
        if (!choice) continue;
        seen.reason = choice.finish_reason ?? seen.reason;
        const piece = choice.text ?? choice.delta?.content ?? "";
        if (piece) this.write(text, piece);
        if (piece && !seen.first) {
          seen.first = performance.now();
          this.parts["answer-says"].textContent = "Answering…";
        }
      }
      this.show(null, ended(seen, began));
    } catch (error) {
      this.show(null, error.name === "AbortError" ? "Stopped." : `${error.message}`);
    }
  }

  show(running, says) {
    this.running = running;
    this.allow();
    this.parts.stop.ariaDisabled = `${running === null}`;
    this.parts.answer.setAttribute("aria-busy", `${running !== null}`);
    this.parts["answer-says"].textContent = says;
  }

  write(text, piece) {
    const { answer } = this.parts, follows = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 30;
    text.appendData(piece);
    if (follows) answer.scrollTop = answer.scrollHeight;
  }

  async *stream(prompt, signal) {
    const isChat = this.parts.style.value === "chat", temperature = parseFloat(this.parts.temperature.value);
    const body = {
      model: this.api.model(), stream: true, stream_options: { include_usage: true },
      max_tokens: parseInt(this.parts.most.value, 10) || 1,
      temperature: Number.isFinite(temperature) ? temperature : 0,
      ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    };
    const answer = await fetch(isChat ? "v1/chat/completions" : "v1/completions", {
      method: "POST", headers: { "Content-Type": "application/json", ...this.api.headers() }, body: JSON.stringify(body), signal,
    });
    if (!answer.ok) throw new Error(await sentence(answer));
    yield* events(answer.body.pipeThrough(new TextDecoderStream()).getReader());
  }
}

async function sentence(answer) {
  try { return (await answer.json()).error.message; } catch { return `The server answered ${answer.status}.`; }
}

// Server-sent events, up to [DONE].
async function* events(reader) {
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection ended before the answer was complete.");
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function ended(seen, began) {
  const now = performance.now(), why = { stop: "the model ended it", length: "the limit ended it" }[seen.reason] ?? seen.reason;
  const pace = seen.tokens > 1 ? `, then ${number((1e3 * (seen.tokens - 1)) / (now - seen.first))} tokens/s` : "";
  const first = seen.first ? `; the first after ${seconds((seen.first - began) / 1e3)}${pace}` : "";
  return `${several(seen.tokens, "token")}${first}; ${why}.`;
}
