// A chat with the gateway that serves this page. Everything shown is made of text nodes: what a
// model or a server writes is never taken for HTML.

import { markdown } from "./markdown.js";

const $ = (id) => document.getElementById(id);
let history = []; // {role, content}, as the API takes them; a new chat has a new list
let model = null;
let running = null; // the AbortController of the answer under way

// --- settings -----------------------------------------------------------------------------------

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

function parameters() {
  const found = {};
  for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed"]) {
    const { value } = $(name);
    if (value !== "") found[name] = Number(value);
  }
  return found;
}

function messages(turns) {
  const system = $("system").value.trim();
  return system ? [{ role: "system", content: system }, ...turns] : turns;
}

// --- the API ------------------------------------------------------------------------------------

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `HTTP status ${response.status}`;
  }
}

async function connect() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw new Error(await failure(response));
    model = (await response.json()).data[0].id;
    setStatus(model, "ready");
  } catch (error) {
    setStatus(error.message, "down");
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.slice("data: ".length);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function ask(turns, answer, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers(),
    signal,
    body: JSON.stringify({
      model,
      messages: messages(turns),
      stream: true,
      stream_options: { include_usage: true },
      ...parameters(),
    }),
  });
  if (!response.ok) throw new Error(await failure(response));
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    if (choice?.delta.content) answer.add(choice.delta.content);
    if (choice?.finish_reason) answer.reason = choice.finish_reason;
    if (event.usage) answer.usage = event.usage;
  }
}

// --- what is shown ------------------------------------------------------------------------------

function setStatus(text, kind) {
  $("status").textContent = text;
  $("status").className = `status ${kind}`;
}

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

function scrolled() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 40;
}

class Answer {
  text = "";
  usage = null;
  reason = null;
  #begun = performance.now();
  #first = null;
  #drawing = false;
  #article = element("article", "assistant running");
  #shown = element("div", "text");

  constructor() {
    this.#article.append(this.#shown);
    $("log").append(this.#article);
    $("log").scrollTop = $("log").scrollHeight;
  }

  add(text) {
    this.#first ??= performance.now();
    this.text += text;
    if (this.#drawing) return;
    this.#drawing = true;
    requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.#drawing = false;
    const follow = scrolled();
    this.#shown.replaceChildren(...markdown(this.text));
    if (follow) $("log").scrollTop = $("log").scrollHeight;
  }

  end(note) {
    this.#draw();
    this.#article.classList.remove("running");
    const figures = [note];
    if (this.reason === "length") figures.push("cut at the most tokens");
    if (this.usage) {
      const { completion_tokens: made, prompt_tokens: read } = this.usage;
      const cached = this.usage.prompt_tokens_details.cached_tokens;
      figures.push(made === 1 ? "1 token" : `${made} tokens`);
      if (this.#first !== null) {
        const seconds = (performance.now() - this.#first) / 1000; // in which all but the first were made
        if (made > 1 && seconds > 0) figures.push(`${((made - 1) / seconds).toFixed(0)} tokens/s`);
        figures.push(`first after ${(this.#first - this.#begun).toFixed(0)} ms`);
      }
      figures.push(`prompt ${read}, ${cached} of them cached`);
    }
    const line = element("p", "figures", figures.filter(Boolean).join(" · "));
    this.#article.append(line);
    if (scrolled()) line.scrollIntoView({ block: "end" });
  }

  fail(message) {
    this.#article.classList.remove("running");
    const line = element("p", "error", message);
    line.setAttribute("role", "alert");
    this.#article.append(line);
    line.scrollIntoView({ block: "end" });
  }
}

// --- what people do -----------------------------------------------------------------------------

async function send() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("hello")?.remove();
  $("prompt").value = "";
  fit();
  const turns = history;
  turns.push({ role: "user", content: text });
  $("log").append(element("article", "user", text));
  running = new AbortController();
  show(true);
  if (model === null) await connect();
  const answer = new Answer();
  try {
    await ask(turns, answer, running.signal);
    answer.end();
  } catch (error) {
    if (running.signal.aborted) answer.end("stopped");
    else answer.fail(error.message);
  }
  running = null;
  show(false);
  if (answer.text) turns.push({ role: "assistant", content: answer.text });
  else turns.pop();
  $("prompt").focus();
}

function show(isRunning) {
  $("send").hidden = isRunning;
  $("stop").hidden = !isRunning;
}

function stop() {
  running?.abort();
}

function fit() {
  const prompt = $("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("prompt").addEventListener("input", fit);
$("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
$("new").addEventListener("click", () => {
  stop();
  history = [];
  $("log").replaceChildren();
  $("prompt").focus();
});
$("toggle").addEventListener("click", () => {
  const { hidden } = $("settings");
  $("settings").hidden = !hidden;
  $("toggle").setAttribute("aria-expanded", String(hidden));
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  connect();
});

$("key").value = sessionStorage.getItem("key") ?? "";
connect();
$("prompt").focus();
