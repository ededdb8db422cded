// Tables: sort by a column's head, filter long ones, reveal rows in parts.
import { t } from "./texts.js";
import { node } from "./stage.js";

const LONG = 12;
const states = new Map();

const SUFFIX = { n: 1e-9, µ: 1e-6, m: 1e-3, k: 1e3, K: 1e3, M: 1e6, G: 1e9, T: 1e12 };
function figure(text) {
  const match = /^[-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?/i.exec(text.trim());
  if (!match) return null;
  const unit = /^\s*([nµmkKMGT])(?=[A-Za-z])/.exec(text.trim().slice(match[0].length));
  return Number(match[0].replaceAll(",", "")) * (unit ? SUFFIX[unit[1]] ?? 1 : 1);
}

const SECONDS = { "µs": 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600, d: 86400 };
function time(text) {
  const match = /^(-?[\d,]*\.?\d+) (µs|ms|s|min|h|d)$/.exec(text);
  return match ? Number(match[1].replaceAll(",", "")) * SECONDS[match[2]] : null;
}

function keyOf(cell) {
  const stamp = cell.querySelector("time[datetime]");
  if (stamp) return Date.parse(stamp.getAttribute("datetime"));
  const text = cell.textContent.trim();
  if (text === "–") return null;
  return time(text) ?? (cell.classList.contains("n") ? figure(text) ?? text : text);
}

function compare(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), undefined, { numeric: true });
}

export function tables(root) {
  for (const table of root.querySelectorAll("table[data-sortable]")) enhance(table);
}

function enhance(table) {
  if (table.dataset.enhanced) return;
  table.dataset.enhanced = "1";
  const name = table.caption?.textContent ?? "", body = table.tBodies[0];
  const original = [...body.rows];
  const state = states.get(name) ?? { column: -1, down: false, text: "" };
  states.set(name, state);
  const heads = [...table.tHead.rows[0].cells];
  let count = null;
  function apply() {
    const wanted = state.text.toLocaleLowerCase();
    const rows = original.filter((row) => !wanted || row.textContent.toLocaleLowerCase().includes(wanted));
    if (state.column >= 0) {
      const keyed = rows.map((row) => [keyOf(row.cells[state.column]), row]);
      keyed.sort((a, b) => {
        if (a[0] === null || b[0] === null) return compare(a[0], b[0]);
        return state.down ? compare(b[0], a[0]) : compare(a[0], b[0]);
      });
      body.replaceChildren(...keyed.map((pair) => pair[1]));
    } else body.replaceChildren(...rows);
    heads.forEach((head, n) => head.setAttribute("aria-sort", n !== state.column ? "none" : state.down ? "descending" : "ascending"));
    if (count) count.textContent = rows.length ? t("{} of {} rows", rows.length, original.length) : t("nothing matches");
  }
  if (original.length > 1) {
    heads.forEach((head, n) => {
      const button = node("button", { type: "button", className: "sort" }, ...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const numeric = head.classList.contains("n");
        if (state.column !== n) { state.column = n; state.down = numeric; } else state.down = !state.down;
        apply();
      });
    });
  }
  if (original.length > LONG) {
    const input = node("input", { type: "search", placeholder: t("filter rows"), value: state.text });
    input.setAttribute("aria-label", `${t("filter rows")}: ${name}`);
    input.addEventListener("input", () => { state.text = input.value; apply(); });
    count = node("span", { className: "count" });
    count.setAttribute("role", "status");
    table.parentElement.before(node("div", { className: "filter" }, input, count));
    table.parentElement.classList.add("long");
  }
  apply();
}
