// The page for images: sends an image to /explain, and draws what each patch adds over it.

import { NEXT, chosenOf, download, fill, send } from "/ask.js";
import { colour, element, number, show } from "/view.js";

const UNITS = ["patch", "region"];
const LONGEST = 18; // longest side of a picture, in rem: two fit side by side on a page of 1100 px
const SMALL = 200; // narrower images, in pixels, are enlarged without smoothing
const CELL = 8; // side of a patch in the map of a depth, in pixels

const at = (id) => document.getElementById(id);
const sections = { a: at("result-a"), b: at("result-b") };
let about = { classes: [] };
let file = null;
let bitmap = null; // the server's copy of the image, upright
let asked = new AbortController();

const comparing = () => at("compare").getAttribute("aria-pressed") === "true";
const chosen = (id) => at(id).value || null;
const patchValue = (answer, { part }) => (part === null ? 0 : answer.parts[part].value);

function say(message, wrong = false) {
  at("status").textContent = message;
  at("status").classList.toggle("wrong", wrong);
}

async function post(path, query, signal) {
  if (file.size > about.max_image_bytes) throw new Error(`an image may have ${about.max_image_bytes} bytes, this has ${file.size}`);
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== false);
  const type = file.type.startsWith("image/") ? file.type : "application/octet-stream";
  const wait = () => say("Many requests wait; trying again …");
  return send(`${path}?${new URLSearchParams(given)}`, type, file, { signal, wait });
}

async function explain(classes, signal) {
  const query = { ...classes, of: chosenOf(), unit: at("form").elements.unit.value, depth: chosen("depth"), thumbnail: bitmap === null };
  const answer = await (await post("/explain", query, signal)).json();
  if (answer.image) {
    const made = await decoded(answer.image);
    signal.throwIfAborted(); // another image was chosen meanwhile
    bitmap = made;
  }
  answer.depthName = at("depth").selectedOptions[0].textContent;
  return answer;
}

/** Decode a data: address without fetch, because the content security policy of the page forbids it. */
async function decoded(address) {
  const [head, data] = address.split(",");
  const bytes = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
  return createImageBitmap(new Blob([bytes], { type: head.slice(5).split(";")[0] }));
}

/** Return the explanation of one score or margin, or of the scores of two classes to show side by side. */
async function answersNow(signal) {
  const against = chosen("against");
  const named = about.classes.includes(against) ? against : null;
  const output = chosen("output");
  if (!comparing()) return { a: await explain({ output, against: named, margin: against === NEXT }, signal) };
  const a = await explain({ output }, signal);
  const likely = Object.entries(a.probabilities).sort((x, y) => y[1] - x[1]).map(([name]) => name);
  const other = named ?? likely.find((name) => name !== a.output);
  return { a, b: await explain({ output: other }, signal) };
}

async function update() {
  asked.abort();
  asked = new AbortController();
  const { signal } = asked;
  at("save").disabled = true;
  if (!file) return;
  document.body.classList.add("busy");
  try {
    const found = await answersNow(signal);
    const scale = Math.max(...Object.values(found).flatMap((answer) => answer.patches.map((patch) => Math.abs(patchValue(answer, patch)))));
    for (const [key, section] of Object.entries(sections)) {
      section.hidden = !(key in found);
      if (key in found) show(section, found[key], scale, drawn(found[key], scale));
    }
    at("save").disabled = false;
    say("");
  } catch (error) {
    if (signal.aborted) return;
    for (const section of Object.values(sections)) section.hidden = true;
    say(`No explanation: ${error.message}`, true);
  }
  document.body.classList.remove("busy");
}

/** The image with its patches coloured, the image itself, and the map of each depth. */
function drawn(answer, scale) {
  const plain = stack(answer.unit === "region" ? regions(answer) : null, "The image");
  const coloured = stack(overlay(answer, scale), "What each patch adds", "grey");
  const pictures = element("div", { class: "pictures" }, coloured, plain);
  return element("div", {}, pictures, depthMaps(answer));
}

/** The image with something drawn over it. */
function stack(over, label, look = "") {
  const { width, height } = bitmap;
  const canvas = element("canvas", { width, height, role: "img", "aria-label": label });
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  const found = element("div", { class: `stack ${look} ${width < SMALL ? "small" : ""}` }, canvas, ...(over ? [over] : []));
  found.style.width = `${LONGEST * Math.min(1, width / height)}rem`;
  return found;
}

function layer([width, height], kind) {
  return element("svg", { class: kind, viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none" });
}

/** The edges of regions, each with its number on the patch that is nearest to its middle. */
function regions({ size, grid, parts, patches }) {
  const made = layer(size, "regions");
  const part = (y, x) => patches[y * grid[1] + x].part;
  let edges = "";
  patches.forEach(({ box: [left, top, right, bottom] }, k) => {
    const [y, x] = [Math.floor(k / grid[1]), k % grid[1]];
    if (x + 1 < grid[1] && part(y, x + 1) !== part(y, x)) edges += `M${right} ${top}V${bottom}`;
    if (y + 1 < grid[0] && part(y + 1, x) !== part(y, x)) edges += `M${left} ${bottom}H${right}`;
  });
  made.append(element("path", { class: "under", d: edges }), element("path", { d: edges }));
  const middle = ([left, top, right, bottom]) => [(left + right) / 2, (top + bottom) / 2];
  parts.forEach(({ piece, special }, row) => {
    if (special) return;
    const places = patches.filter((patch) => patch.part === row).map(({ box }) => middle(box));
    const mean = [0, 1].map((axis) => places.reduce((sum, place) => sum + place[axis], 0) / places.length);
    const far = (place) => Math.hypot(place[0] - mean[0], place[1] - mean[1]);
    const [x, y] = places.reduce((best, place) => (far(place) < far(best) ? place : best));
    made.append(element("text", { x, y, "font-size": Math.max(...size) / 26 }, piece.replace("region ", "")));
  });
  return made;
}

function overlay(answer, scale) {
  const { shown, parts, patches } = answer;
  const made = layer(answer.size, "overlay");
  for (const patch of patches) {
    const [left, top, right, bottom] = patch.box;
    if (patch.part === null) continue;
    const label = `${parts[patch.part].piece}: ${number(shown.values[patch.part], shown.decimals)}`;
    const box = { x: left, y: top, width: right - left, height: bottom - top };
    made.append(element("rect", { class: colour(patchValue(answer, patch), scale), ...box }, element("title", {}, label)));
  }
  return made;
}

/** Small maps of the patches, one for each depth, on one scale. A click on a map chooses its depth. */
function depthMaps({ maps, grid, depth }) {
  if (maps.length < 2) return "";
  const largest = Math.max(...maps.flat(2).map(Math.abs));
  const buttons = maps.map((map, k) => {
    const size = { width: CELL * grid[1], height: CELL * grid[0] };
    const drawing = element("svg", { class: "map", viewBox: `0 0 ${size.width} ${size.height}`, ...size, "aria-hidden": true });
    drawing.append(element("rect", { class: "ground", ...size }));
    map.forEach((row, y) =>
      row.forEach((value, x) => {
        const kind = colour(value, largest);
        if (kind) drawing.append(element("path", { class: kind, d: `M${CELL * x} ${CELL * y}h${CELL - 1}v${CELL - 1}h-${CELL - 1}z` }));
        // A dash marks patches that lower the score, so that the map can be read without colours.
        if (value < -largest / 4) drawing.append(element("path", { class: "dash", d: `M${CELL * x + 2} ${CELL * (y + 0.5) - 0.5}h3` }));
      }),
    );
    const pressed = depth === about.depth_numbers[k];
    const button = element("button", { type: "button", "aria-pressed": pressed, "data-depth": about.depth_numbers[k] }, drawing, about.depths[k]);
    button.addEventListener("click", () => {
      at("form").elements.of.value = "states";
      at("depth").value = pressed ? "" : about.depth_numbers[k];
      update();
    });
    return button;
  });
  const note = element("p", { class: "note" }, "Patches at each depth; choose one to see it alone.");
  return element("div", {}, note, element("div", { class: "depths" }, ...buttons));
}

function take(given) {
  if (!given) return;
  file = given;
  bitmap = null;
  update();
}

function toggleCompare() {
  const on = !comparing();
  at("compare").setAttribute("aria-pressed", on);
  at("less").textContent = on ? "beside" : "rather than";
  document.body.classList.toggle("comparing", on);
  update();
}

async function save() {
  try {
    download(await (await post("/page", { unit: at("form").elements.unit.value })).blob());
    say("Saved.");
  } catch (error) {
    say(`Not saved: ${error.message}`, true);
  }
}

async function start() {
  about = await (await fetch("/model")).json();
  fill(about, UNITS, "patch");
  at("file").addEventListener("change", () => take(at("file").files[0]));
  at("form").addEventListener("change", (event) => event.target.matches("select, input[type=radio]") && update());
  at("compare").addEventListener("click", toggleCompare);
  at("save").addEventListener("click", save);
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    take(event.dataTransfer.files[0]);
  });
  document.addEventListener("paste", (event) => take(event.clipboardData.files[0]));
  say("Choose an image above.");
  take(at("file").files[0]); // as after going back to the page
}

start();
