// A chat with the gateway that serves this page.

import { Answer, element } from "./answer.js";

const $ = (id) => document.getElementById(id);
let history = []; // messages, as the API takes them; a new chat has a new list
let asked = null; // the Results that the last answer asks for
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
    const { value, validity } = $(name);
    if (validity.badInput) throw new Error(`${name} is not a number`);
    if (value !== "") found[name] = Number(value);
  }
  if ($("thinking").value) found.enable_thinking = $("thinking").value === "on";
  const offered = tools();
  if (offered.length) found.tools = offered;
  return found;
}

function tools() {
  const text = $("tools").value.trim();
  if (!text) return [];
  let given;
  try {
    given = JSON.parse(text);
  } catch (error) {
    throw new Error(`the tools are not JSON: ${error.message}`);
  }
  // also a single one, and functions without the wrapping that the API has around them
  return [given].flat().map((tool) => (tool?.function ? tool : { type: "function", function: tool }));
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
    if (choice) answer.add(choice.delta);
    if (choice?.finish_reason) answer.reason = choice.finish_reason;
    if (event.usage) answer.usage = event.usage;
  }
}

// --- what is shown ------------------------------------------------------------------------------

function setStatus(text, kind) {
  $("status").textContent = text;
  $("status").className = `status ${kind}`;
}

// --- what people do -----------------------------------------------------------------------------

async function send() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("hello")?.remove();
  $("prompt").value = "";
  fit();
  $("log").append(element("article", "user", text));
  await proceed({ role: "user", content: text });
}

// Asks for the next answer, after the results of calls, if the last answer had any, and a message.
async function proceed(...added) {
  if (running) return;
  const turns = history;
  const numBefore = turns.length;
  const results = asked;
  turns.push(...(results?.take() ?? []), ...added);
  running = new AbortController();
  show(true);
  if (model === null) await connect();
  const answer = new Answer($("log"));
  try {
    await ask(turns, answer, running.signal);
    answer.end();
  } catch (error) {
    if (running.signal.aborted) answer.end("stopped");
    else answer.fail(error.message);
  }
  running = null;
  show(false);
  const { message } = answer;
  if (message) {
    turns.push(message);
    if (turns === history) asked = answer.results(() => proceed());
  } else {
    turns.length = numBefore;
    results?.reopen();
    if (added.length && turns === history) askAgain(added[0].content);
  }
  $("prompt").focus();
}

// Puts a question that has no answer back, unless another one has been begun.
function askAgain(question) {
  if ($("prompt").value) return;
  $("prompt").value = question;
  fit();
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
  asked = null;
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
