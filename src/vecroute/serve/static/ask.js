// Shared by the pages for texts and for images: requests, choices and downloads.

import { element } from "/view.js";

export const NEXT = "\u0000next"; // no class has such a name

/** Return the answer to a request. If too many requests wait, ask again, and call wait each time. */
export async function send(path, type, body, { signal, wait }) {
  for (;;) {
    const response = await fetch(path, { method: "POST", headers: { "Content-Type": type }, body, signal });
    if (response.ok) return response;
    const seconds = response.headers.get("Retry-After");
    if (response.status !== 503 || seconds === null) {
      const problem = await response.json().catch(() => ({}));
      throw new Error(problem.detail || `the server answered ${response.status}`);
    }
    wait();
    await new Promise((done) => setTimeout(done, 1000 * Number(seconds)));
    signal?.throwIfAborted();
  }
}

/** Put the name of the model, its classes, depths and units into the page. */
export function fill(about, units, first) {
  const at = (id) => document.getElementById(id);
  at("model").textContent = about.name;
  document.title = `vecroute ${about.name}`;
  at("against").append(new Option("the next likely class", NEXT, true, true), new Option("(its score alone)", ""));
  for (const id of ["output", "against"]) at(id).append(...about.classes.map((name) => new Option(name, name)));
  at("depth").append(...about.depths.map((name, k) => new Option(name, about.depth_numbers[k])));
  for (const unit of units) {
    const radio = element("input", { type: "radio", name: "unit", value: unit });
    radio.checked = unit === first;
    at("units").append(element("label", {}, radio, ` ${unit}`));
  }
}

/** Whether words or inner states are chosen; only inner states have a depth to choose. */
export function chosenOf() {
  const of = document.getElementById("form").elements.of.value;
  const label = document.getElementById("label-depth");
  label.hidden = of !== "states";
  if (label.hidden) document.getElementById("depth").value = "";
  return of;
}

/** Download a page as a file. */
export function download(file) {
  const link = element("a", { href: URL.createObjectURL(file), download: "explanation.html" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
