// The page: asks /explain as you type, and shows what it answers.

import { NEXT, chosenOf, download, fill, send } from "/ask.js";
import { details, element, largest, show } from "/view.js";

const PAUSE = 250; // milliseconds from the last key to the request
const UNITS = ["token", "word", "sentence"];

const at = (id) => document.getElementById(id);
const texts = { a: at("text-a"), b: at("text-b") };
const sections = { a: at("result-a"), b: at("result-b") };
let about = { classes: [] };
let answers = {};
let asked = new AbortController();
let timer = 0;

const comparing = () => at("compare").getAttribute("aria-pressed") === "true";
const chosen = (id) => at(id).value || null;
// A field may hold half of a surrogate pair, which is not a character.
const textOf = (key) => texts[key].value.toWellFormed?.() ?? texts[key].value;

const post = (path, body, signal) =>
  send(path, "application/json", JSON.stringify(body), { signal, wait: () => say("Many requests wait; trying again …") });

function say(message, wrong = false) {
  at("status").textContent = message;
  at("status").classList.toggle("wrong", wrong);
}

/** Explain one text with the chosen options, and with the classes of another answer if one is given. */
async function explain(text, like, signal) {
  const of = chosenOf();
  const depth = chosen("depth");
  const unit = at("form").elements.unit.value;
  const less = chosen("against");
  const classes = like ?? {
    output: chosen("output"),
    against: about.classes.includes(less) ? less : null,
    margin: less === NEXT,
  };
  const { output, against, margin = false } = classes;
  const body = { text, output, against, margin, of, unit, depth: depth && Number(depth) };
  const answer = await (await post("/explain", body, signal)).json();
  answer.depthName = at("depth").selectedOptions[0].textContent;
  return answer;
}

async function update() {
  asked.abort();
  asked = new AbortController();
  const { signal } = asked;
  const given = Object.keys(texts).filter((key) => textOf(key).trim() && (key === "a" || comparing()));
  document.body.classList.toggle("busy", given.length > 0);
  at("save").disabled = at("link").disabled = true;
  keepInAddress();
  hideTip();
  try {
    const found = {};
    // The second text is explained by the classes of the first, so that the two can be compared.
    for (const key of given) found[key] = await explain(textOf(key), found.a, signal);
    answers = found;
    const scale = Math.max(0, ...given.map((key) => largest(found[key])));
    for (const key of Object.keys(sections)) {
      if (key in found) show(sections[key], found[key], scale);
      else sections[key].hidden = true;
    }
    at("save").disabled = at("link").disabled = given.length === 0;
    say(given.length ? "" : "Type or paste a text above, or choose an example.");
  } catch (error) {
    if (signal.aborted) return;
    answers = {};
    for (const section of Object.values(sections)) section.hidden = true;
    say(`No explanation: ${error.message}`, true);
  }
  document.body.classList.remove("busy");
}

/** Store the texts in the address after #, so that a link shows the same. Browsers do not send that part. */
function keepInAddress() {
  const kept = new URLSearchParams();
  if (textOf("a").trim()) kept.set("text", textOf("a"));
  if (comparing() && textOf("b").trim()) kept.set("second", textOf("b"));
  const carried = kept.toString();
  history.replaceState(null, "", carried ? `#${carried}` : location.pathname);
}

function readAddress() {
  const kept = new URLSearchParams(location.hash.slice(1));
  texts.a.value = kept.get("text") ?? texts.a.value;
  if (kept.has("second") && !comparing()) {
    texts.b.value = kept.get("second");
    toggleCompare();
  }
}

async function copyLink() {
  try {
    await navigator.clipboard.writeText(location.href);
    say("The link is copied. It opens the same text on this server.");
  } catch {
    say("The link is in the address bar of the browser.");
  }
}

function addExamples() {
  const buttons = about.examples.map((text) => {
    const button = element("button", { type: "button" }, text);
    button.addEventListener("click", () => {
      texts.a.value = text;
      update();
    });
    return button;
  });
  at("examples").append("Try: ", ...buttons);
}

function updateSoon() {
  clearTimeout(timer);
  timer = setTimeout(update, PAUSE);
}

function toggleCompare() {
  const on = !comparing();
  at("compare").setAttribute("aria-pressed", on);
  at("label-b").hidden = !on;
  document.body.classList.toggle("comparing", on);
  if (on) texts.b.focus();
  update();
}

async function save() {
  const unit = at("form").elements.unit.value;
  const given = Object.keys(answers).map(textOf);
  try {
    download(await (await post("/page", { texts: given, unit })).blob());
    say("Saved.");
  } catch (error) {
    say(`Not saved: ${error.message}`, true);
  }
}

function hideTip() {
  at("tip").hidden = true;
}

/** Show the numbers of the word that is pointed at. */
function showTip(event) {
  const span = event.target.closest?.("span[data-k]");
  if (!span) return hideTip();
  const key = sections.b.contains(span) ? "b" : "a";
  const tip = at("tip");
  tip.replaceChildren(...details(answers[key], Number(span.dataset.k)));
  tip.hidden = false;
  const box = span.getClientRects()[0];
  const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const below = box.bottom + 6 + tip.offsetHeight < window.innerHeight;
  tip.style.left = `${Math.max(8, left) + window.scrollX}px`;
  tip.style.top = `${(below ? box.bottom + 6 : box.top - tip.offsetHeight - 6) + window.scrollY}px`;
}

async function start() {
  about = await (await fetch("/model")).json();
  fill(about, UNITS, "word");
  addExamples();
  readAddress();
  window.addEventListener("hashchange", () => {
    readAddress();
    update();
  });
  for (const area of Object.values(texts)) {
    area.maxLength = about.max_characters;
    area.addEventListener("input", updateSoon);
  }
  at("form").addEventListener("change", (event) => event.target.matches("select, input") && update());
  at("compare").addEventListener("click", toggleCompare);
  at("save").addEventListener("click", save);
  at("link").addEventListener("click", copyLink);
  at("results").addEventListener("mouseover", showTip);
  at("results").addEventListener("mouseleave", hideTip);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
  update();
}

start();
