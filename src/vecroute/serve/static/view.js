// Shows an answer of /explain. Text enters the page only as text nodes, never as HTML.

const LEVELS = 9; // strengths of a colour
const MARKED = 8; // words with their number in the text
const CLASSES = 6; // probabilities shown

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; strings become text. */
export function element(name, attributes = {}, ...children) {
  const made = ["svg", "rect", "path", "text", "title"].includes(name)
    ? document.createElementNS(SVG, name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const TERMS = { base: "base", "special tokens": "special", "not explained": "rest" }; // explained by style.css

/** A word that is explained when it is pointed at or has the focus. */
const term = (name, text) => element("span", { class: `term ${name}`, tabindex: 0 }, text);

/** Write an integer, in units of the last decimal, as a decimal number. */
export function number(value, decimals, plus = true) {
  const digits = String(Math.abs(value)).padStart(decimals + 1, "0");
  const cut = digits.length - decimals;
  const sign = value < 0 ? "-" : value > 0 && plus ? "+" : "";
  return sign + digits.slice(0, cut) + (decimals ? "." + digits.slice(cut) : "");
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const sum = (values) => values.reduce((a, b) => a + b, 0);

/** The number of each segment of a text, null for a segment that belongs to no part. */
const segmentValues = ({ segments, values }) =>
  segments.map(({ parts }) => (parts.length ? sum(parts.map((i) => values[i])) : null));

/** The largest contribution of a segment in the units of the score, for a scale that several texts share. */
export function largest({ shown }) {
  return Math.max(0, ...segmentValues(shown).map(Math.abs)) / 10 ** shown.decimals;
}

export function colour(value, scale) {
  const level = scale ? Math.round(LEVELS * Math.min(Math.abs(value) / scale, 1)) : 0;
  return level ? (value > 0 ? "p" : "n") + level : "";
}

function heat({ shown }, scale) {
  const values = segmentValues(shown);
  const order = values.map((_, k) => k).filter((k) => values[k]);
  order.sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]));
  const marked = new Set(order.slice(0, MARKED));
  const paragraph = element("p", { class: "text", dir: "auto" });
  shown.segments.forEach(({ text, runs }, k) => {
    if (values[k] === null) {
      paragraph.append(text);
      return;
    }
    const span = element("span", { "data-k": k, class: colour(values[k], scale * 10 ** shown.decimals) }, text);
    if (marked.has(k)) {
      span.dataset.n = number(values[k], shown.decimals);
      span.dataset.runs = runs;
    }
    paragraph.append(span);
  });
  return paragraph;
}

function bar(value, longest) {
  const width = longest ? (100 * Math.abs(value)) / longest : 0;
  const x = value < 0 ? -width : 0;
  const rectangle = element("rect", { class: value < 0 ? "down" : "up", x, y: 1, width, height: 8 });
  const axis = element("path", { class: "axis", d: "M0 0v10" });
  const attributes = { class: "bar", viewBox: "-100 0 200 10", preserveAspectRatio: "none", "aria-hidden": true };
  return element("svg", attributes, axis, rectangle);
}

/** A table of lines that add up to the score. */
function table(caption, head, lines, score, decimals) {
  const longest = Math.max(...lines.map((line) => Math.abs(line.value)));
  const rows = lines.map(({ label, value, is_sum }) =>
    element(
      "tr",
      is_sum ? { class: "sum" } : {},
      element("th", { scope: "row" }, is_sum && label in TERMS ? term(TERMS[label], label) : element("bdi", {}, label)),
      element("td", { class: "number" }, number(value, decimals)),
      element("td", {}, bar(value, longest)),
    ),
  );
  const heads = [element("th", { scope: "col" }, head), element("th", { scope: "col", class: "number" }, "adds")];
  const last = [element("th", { scope: "row" }, "score"), element("td", { class: "number" }, number(score, decimals, false))];
  return element(
    "table",
    {},
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...heads, element("td"))),
    element("tbody", {}, ...rows),
    element("tfoot", {}, element("tr", {}, ...last, element("td"))),
  );
}

function probabilities({ probabilities, label }) {
  const likely = Object.entries(probabilities).sort((a, b) => b[1] - a[1]);
  const list = element("ol", { class: "probabilities", "aria-label": "Probabilities" });
  for (const [name, share] of likely.slice(0, CLASSES)) {
    const meter = element("rect", { class: "up", y: 1, width: 100 * share, height: 8 });
    const drawn = element("svg", { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": true }, meter);
    const chosen = Array.isArray(label) ? label.includes(name) : name === label;
    list.append(element("li", chosen ? { class: "chosen" } : {}, element("bdi", {}, name), drawn, element("span", { class: "number" }, percent(share))));
  }
  if (likely.length > CLASSES) list.append(element("li", { class: "note" }, `and ${likely.length - CLASSES} more`));
  return list;
}

function depthLines({ names, values, base, rest }) {
  const lines = names.map((label, k) => ({ label, value: values[k], is_sum: false }));
  lines.push({ label: "base", value: base, is_sum: true });
  if (rest) lines.push({ label: "not explained", value: rest, is_sum: true });
  return lines;
}

/** Fill a section with an answer. Sections may share the scale of colours. By default, draw a text. */
export function show(section, answer, scale, drawn = heat(answer, scale)) {
  const { shown, unit, depth, label } = answer;
  const predicted = Array.isArray(label) ? label.join(", ") || "none" : label;
  const { title, meaning, chance } = answer.told;
  const score = number(shown.score, shown.decimals, false);
  const depthName = depth === null ? "" : ` at ${answer.depthName}`;
  const lines = shown.lines.map((line) =>
    depth !== null && line.label === "base" && !line.rows.length ? { ...line, label: "base and other depths" } : line,
  );
  const tables = [table(`What adds up to the score${depthName}, most first`, unit, lines, shown.score, shown.decimals)];
  const { depths } = shown;
  if (depth === null && depths.names.length > 1) {
    tables.push(table("By depth, from the embeddings up", "depth", depthLines(depths), depths.score, depths.decimals));
  }
  section.replaceChildren(
    element("p", { class: "prediction" }, "Predicted ", element("strong", {}, element("bdi", {}, predicted))),
    probabilities(answer),
    element("h2", {}, `${title} Score: ${score}`),
    ...(chance.what ? [element("p", { class: "note" }, `${chance.what}: `, element("b", {}, chance.percent), ` = ${chance.formula}, with `, term("temperature", "T"), ` = ${chance.temperature}`)] : []),
    element("p", { class: "note" }, `${meaning} All numbers and the `, term("base", "base"), " add up to the score."),
    element("p", { class: "key" }, element("span", { class: "p5" }, "solid line, blue"), " raises the score, ", element("span", { class: "n5" }, "dashed line, orange"), " lowers it"),
    element("div", { class: "sides" }, drawn, element("div", { class: "tables" }, ...tables)),
  );
  section.hidden = false;
}

/** The content of the tooltip of a word: its number, and how much of it comes from each depth. */
export function details(answer, k) {
  const { shown } = answer;
  const { parts } = shown.segments[k];
  const values = shown.by_depth[parts[0]].map((_, d) => sum(parts.map((i) => shown.by_depth[i][d])));
  const total = segmentValues(shown)[k];
  const { start } = answer.parts[parts[0]];
  const { end } = answer.parts[parts[parts.length - 1]];
  const where = `characters ${start}–${end}`;
  const head = element("p", {}, element("b", {}, number(total, shown.decimals)), element("span", { class: "note" }, ` ${where}`));
  if (values.length < 2) return [head];
  const longest = Math.max(...values.map(Math.abs));
  const rows = values.map((value, d) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, shown.depths.names[d]),
      element("td", { class: "number" }, number(value, shown.decimals)),
      element("td", {}, bar(value, longest)),
    ),
  );
  return [head, element("table", {}, element("tbody", {}, ...rows))];
}
