// Brings a page to life: columns fetched and drawn, curves embedded, tables and times, live ticks.
// The root element carries data-drawn when canvases are on the screen, data-ready when everything is.
import { fetchColumns } from "./columns.js";
import { heatmap } from "./heatmap.js";
import { timeline } from "./timeline.js";
import { tables } from "./tables.js";
import { localise } from "./times.js";
import { live } from "./live.js";
import { t } from "./texts.js";
import { node } from "./stage.js";

const DRAW = { heatmap, timeline };
const drawn = new Map();      // plot element → what draws it
const curves = new Map();
let failed = "";

async function plot(box, fresh = false) {
  if (!DRAW[box.dataset.kind]) return;
  try {
    const columns = await fetchColumns(box.dataset.columns, fresh);
    const before = drawn.get(box);
    if (before?.update) { before.update(columns); return; }
    drawn.set(box, DRAW[box.dataset.kind](box, columns, box.dataset.title));
  } catch (error) {
    if (drawn.has(box)) throw error;
    failed = error.message;
    const again = node("button", { type: "button", textContent: t("try again") });
    again.addEventListener("click", () => { box.replaceChildren(node("p", { className: "loading", textContent: t("loading…") })); plot(box, true); });
    box.replaceChildren(node("p", { className: "sentence bad", textContent: `${t("could not be loaded")}: ${error.message} ` }), again);
  }
}

// BokehJS is a megabyte of script: asked for with the page, read by the browser after the canvases.
let library = null;
function bokeh() {
  library ??= new Promise((done, fail) => {
    const script = node("script", { src: document.getElementById("blocks").dataset.bokeh });
    script.addEventListener("load", done);
    script.addEventListener("error", () => { library = null; fail(new Error("BokehJS")); });
    document.head.append(script);
  });
  return library;
}

async function curve(box) {
  const source = document.getElementById(box.dataset.curves);
  if (!source) return;
  await bokeh();
  const item = JSON.parse(source.textContent);
  item.target_id = box.id;
  curves.get(box.id)?.clear?.();
  curves.set(box.id, await window.Bokeh.embed.embed_item(item, box.id));
}

// Perfetto fetches the trace itself and wants its whole address.
function traces(root) {
  for (const link of root.querySelectorAll("a[data-perfetto]")) {
    const trace = new URL(link.getAttribute("href"), location.href);
    link.href = `${link.dataset.perfetto}/#!/?url=${encodeURIComponent(trace)}`;
  }
}

async function bring(root) {
  const waiting = [...root.querySelectorAll(".plot[data-columns]")].map((box) => plot(box));
  localise(root);
  tables(root);
  traces(root);
  await Promise.all(waiting);
  if (root === document) document.documentElement.dataset.drawn = "true";
  // One after the other, so that the browser paints in between.
  for (const box of root.querySelectorAll(".plot[data-curves]")) await curve(box);
}

// Ask for the page again; exchange blocks that differ, let canvases fetch their columns.
async function refresh() {
  const answer = await fetch(location.href, { headers: { accept: "text/html" }, cache: "no-store" });
  if (!answer.ok) throw new Error(String(answer.status));
  const next = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("blocks");
  const now = document.getElementById("blocks");
  if (!next) throw new Error(t("try again"));
  const old = [...now.children].filter((child) => !child.matches(".filter")), fresh = [...next.children];
  const same = old.length === fresh.length && old.every((child, n) => child.tagName === fresh[n].tagName);
  if (!same) {
    if (now.contains(document.activeElement)) return;
    drawn.clear();
    now.replaceChildren(...fresh);
    await bring(now);
    return;
  }
  const waiting = [];
  for (const [n, child] of old.entries()) {
    const plots = child.matches("figure.remote") ? child.querySelectorAll(".plot[data-columns]") : [];
    if (plots.length) { for (const box of plots) waiting.push(plot(box, true)); continue; }
    if (child.dataset.source === undefined) child.dataset.source = "";
    if (sources.get(child) === fresh[n].outerHTML || child.contains(document.activeElement)) continue;
    if (child.previousElementSibling?.matches(".filter")) {
      if (child.previousElementSibling.contains(document.activeElement)) continue;
      child.previousElementSibling.remove();
    }
    const open = child.querySelector("details")?.open;
    sources.set(fresh[n], fresh[n].outerHTML);
    child.replaceWith(fresh[n]);
    if (open) fresh[n].querySelector("details").open = true;
    const holder = { querySelectorAll: (s) => [...(fresh[n].matches(s) ? [fresh[n]] : []), ...fresh[n].querySelectorAll(s)] };
    waiting.push(bring(holder));
  }
  await Promise.all(waiting);
}
const sources = new WeakMap();
for (const child of document.querySelectorAll("#blocks[data-live] > *")) sources.set(child, child.outerHTML);

window.kansoku = { drawn, refresh };
bring(document).then(() => {
  document.documentElement.dataset.ready = failed ? "error" : "true";
  if (failed) document.documentElement.dataset.error = failed;
  live(refresh);
}, (error) => {
  document.documentElement.dataset.ready = "error";
  document.documentElement.dataset.error = String(error);
});
// Choices apply at once; the button stays for keyboards and for browsers without scripts.
document.addEventListener("change", (event) => {
  if (event.target.matches("form.choices select")) event.target.form.requestSubmit();
});
