// Shows the description of the API from /openapi.json as a page.

import { element } from "/view.js";

const nameOf = (schema) => schema.$ref?.split("/").pop();

/** A type in words. */
function type(schema) {
  if (schema.$ref) return nameOf(schema);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.anyOf) return schema.anyOf.map(type).join(" | ");
  if (schema.type === "array") return `list of ${type(schema.items)}`;
  if (schema.type === "object") return `object of ${type(schema.additionalProperties || {})}`;
  return schema.type || "anything";
}

function table(schema) {
  const rows = Object.entries(schema.properties || {}).map(([name, field]) => {
    const given = schema.required?.includes(name) ? "" : ` = ${JSON.stringify(field.default ?? null)}`;
    const about = element("td", {}, field.description || "");
    return element("tr", {}, element("th", { scope: "row" }, element("code", {}, name)), element("td", {}, element("code", {}, type(field) + given)), about);
  });
  return element("table", {}, element("tbody", {}, ...rows));
}

/** Parameters as a schema, so that they are shown like one. */
const parameters = (given) => ({ properties: Object.fromEntries(given.map(({ name, schema, description }) => [name, { ...schema, description }])) });

const content = (body) => Object.entries(body?.content || {})[0] || [];

function route(path, method, operation) {
  const parts = [element("h2", {}, element("code", {}, `${method.toUpperCase()} ${path}`)), element("p", {}, operation.description || "")];
  const [sent, asked] = content(operation.requestBody);
  if (asked && sent === "application/json") parts.push(element("p", {}, "Takes JSON: ", element("code", {}, type(asked.schema))));
  else if (asked) parts.push(element("p", {}, `${operation.requestBody.description} Content-Type: `, element("code", {}, sent)));
  if (operation.parameters) parts.push(element("p", {}, "In the address:"), table(parameters(operation.parameters)));
  const rows = Object.entries(operation.responses).map(([status, answer]) => {
    const [kind, media] = content(answer);
    const what = media?.schema ? type(media.schema) : kind || "";
    return element("tr", {}, element("th", { scope: "row" }, status), element("td", {}, element("code", {}, what)), element("td", {}, answer.description));
  });
  return element("section", {}, ...parts, element("table", {}, element("tbody", {}, ...rows)));
}

const api = await (await fetch("/openapi.json")).json();
const routes = Object.entries(api.paths).flatMap(([path, methods]) =>
  Object.entries(methods).map(([method, operation]) => route(path, method, operation)),
);
const schemas = Object.entries(api.components.schemas).map(([name, schema]) =>
  element("section", {}, element("h3", {}, element("code", {}, name)), element("p", {}, schema.description || ""), table(schema)),
);
document.getElementById("routes").append(element("p", {}, api.info.description), ...routes, element("h2", {}, "Schemas"), ...schemas);
