// The box to try a prompt: one streamed answer at a time, by the same API as any client.

import { number, seconds, several } from "./words.js";

const LOST = "The server went away before the answer was complete; send the prompt again when it is back.";
const NUMBERS = {
  most: ["Tokens: give a whole number from 1 on.", (field) => field.valueAsNumber >= 1 && Number.isInteger(field.valueAsNumber)],
  temperature: ["Temperature: give a number from 0 to 2.", (field) => field.valueAsNumber >= 0 && field.valueAsNumber <= 2],
};

export class AskBox {
  // api: {model(), headers(), status()}, of the server that is connected now.
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
    for (const id of Object.keys(NUMBERS)) this.parts[id].addEventListener("change", () => this.isRight(id));
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

  // Whether a field's number can be sent. One that is emptied has its usual number again.
  isRight(id) {
    const field = this.parts[id];
    if (!field.value && !field.validity.badInput) field.value = field.defaultValue;
    const isRight = NUMBERS[id][1](field);
    field.setAttribute("aria-invalid", `${!isRight}`);
    return isRight;
  }

  // Why nothing can be sent now, if so, and the field to mend where one is: [sentence, id].
  hindrance() {
    if (this.running) return ["An answer is still coming: Stop or Escape ends it."];
    if (!this.isOffered) return [`The server takes no prompt now: ${this.api.status()}.`];
    if (!this.parts.prompt.value.trim()) return ["There is no prompt yet: write one.", "prompt"];
    const wrong = Object.keys(NUMBERS).find((id) => !this.isRight(id));
    return wrong ? [NUMBERS[wrong][0], wrong] : null;
  }

  async send() {
    const hindrance = this.hindrance();
    if (hindrance) {
      this.parts["answer-says"].textContent = hindrance[0];
      this.parts[hindrance[1]]?.focus();
      return;
    }
    const prompt = this.parts.prompt.value, text = document.createTextNode(""), began = performance.now();
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
    if (text.data.trim()) text.appendData(piece);
    else text.data = (text.data + piece).replace(/^ (?=\S)/, ""); // the one before a model's first word would indent it
    if (follows) answer.scrollTop = answer.scrollHeight;
  }

  async *stream(prompt, signal) {
    const isChat = this.parts.style.value === "chat";
    const body = {
      model: this.api.model(), stream: true, stream_options: { include_usage: true },
      max_tokens: this.parts.most.valueAsNumber, temperature: this.parts.temperature.valueAsNumber,
      ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    };
    const answer = await heard(fetch(isChat ? "v1/chat/completions" : "v1/completions", {
      method: "POST", headers: { "Content-Type": "application/json", ...this.api.headers() }, body: JSON.stringify(body), signal,
    }));
    if (!answer.ok) throw new Error(await sentence(answer));
    yield* events(answer.body.pipeThrough(new TextDecoderStream()).getReader());
  }
}

// What the network brings; a browser's own words for what it does not tell nobody what to do.
async function heard(promised) {
  try { return await promised; } catch (error) { throw error.name === "AbortError" ? error : new Error(LOST); }
}

async function sentence(answer) {
  try { return (await answer.json()).error.message; } catch { return `The server answered ${answer.status}.`; }
}

// Server-sent events, up to [DONE].
async function* events(reader) {
  for (let rest = ""; ;) {
    const { value, done } = await heard(reader.read());
    if (done) throw new Error(LOST);
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
