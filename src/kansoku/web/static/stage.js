// What every canvas of the site has: size and theme followed, one paint a frame, zoom and move by
// wheel, drag, keys and buttons, a tip, a spoken read-out, and its content as text.
import { t } from "./texts.js";
import { clock } from "./times.js";

export const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// Colours are asked for once a theme: every asking may make the browser compute styles anew.
const styles = new Map();
export function style(name) {
  if (!styles.has(name)) styles.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return styles.get(name);
}

const listeners = new Set();
const repaintAll = () => { styles.clear(); for (const ask of listeners) ask(); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaintAll);

export function fitted(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width <= room) low = middle;
    else high = middle - 1;
  }
  return low ? `${text.slice(0, low)}…` : "";
}

export function node(name, properties = {}, ...children) {
  const element = document.createElement(name);
  Object.assign(element, properties);
  element.append(...children);
  return element;
}

let serial = 0;

// `picture` has draw(context, width, height), zoom(factor, x, y, axis), pan(dx, dy), all(),
// key(event) → handled, locate(x, y) → text, press(x, y, event), describe() → text.
export function stage(box, height, label, picture) {
  box.replaceChildren();
  const id = `readout-${++serial}`;
  const canvas = node("canvas", { tabIndex: 0 });
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-label", `${label}. ${t("arrows move, + and - zoom, 0 shows all, Enter opens")}`);
  canvas.setAttribute("aria-describedby", id);
  const tip = node("div", { className: "tip", hidden: true });
  const readout = node("p", { className: "readout", id });
  readout.setAttribute("aria-live", "polite");
  const button = (text, name, act) => {
    const made = node("button", { type: "button", textContent: text, title: t(name) });
    made.setAttribute("aria-label", t(name));
    made.addEventListener("click", () => { act(); ask(); });
    return made;
  };
  const middle = () => [box.clientWidth / 2, height / 2];
  const buttons = node("div", { className: "zoom" },
    button("+", "zoom in", () => picture.zoom(0.5, ...middle(), "both")),
    button("−", "zoom out", () => picture.zoom(2, ...middle(), "both")),
    button("⤢", "show all", () => picture.all()));
  const extras = node("div", { className: "extras" });
  const foot = node("div", { className: "foot" }, readout, extras, buttons);
  box.append(canvas, tip, foot);
  // Opaque: the browser need not mix it with what lies below.
  const context = canvas.getContext("2d", { alpha: false });
  const self = { canvas, ask, say, extras, context, height, resize, frames: [] };
  let asked = false;

  function paint() {
    asked = false;
    const width = canvas.clientWidth || box.clientWidth, ratio = window.devicePixelRatio || 1;
    const began = performance.now();
    const w = Math.max(1, Math.round(width * ratio)), h = Math.max(1, Math.round(self.height * ratio));
    if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = style("--panel");
    context.fillRect(0, 0, width, self.height);
    context.font = "12px system-ui, 'Noto Sans CJK JP', sans-serif";
    picture.draw(context, width, self.height);
    self.frames.push(performance.now() - began);
    if (self.frames.length > 600) self.frames.shift();
  }
  function ask() {
    if (!asked) { asked = true; requestAnimationFrame(paint); }
  }
  function say(text) {
    if (readout.textContent !== text) readout.textContent = text;
  }
  function resize(next) {
    self.height = next;
    canvas.style.height = `${next}px`;
    ask();
  }
  const place = (event) => {
    const at = canvas.getBoundingClientRect();
    return [event.clientX - at.left, event.clientY - at.top];
  };

  let held = null, moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    held = place(event);
    moved = 0;
    canvas.setPointerCapture(event.pointerId);
    canvas.focus({ preventScroll: true });
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (held !== null && event.buttons) {
      const dx = x - held[0], dy = y - held[1];
      moved += Math.abs(dx) + Math.abs(dy);
      if (moved > 3) { picture.pan(dx, dy); ask(); }
      held = [x, y];
    }
    const text = picture.locate(x, y);
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    tip.style.left = `${clamp(x + 14, 0, Math.max(box.clientWidth - tip.offsetWidth - 2, 0))}px`;
    tip.style.top = `${y + 18 + tip.offsetHeight > self.height + 40 ? y - tip.offsetHeight - 8 : y + 18}px`;
  });
  canvas.addEventListener("pointerup", (event) => {
    if (held !== null && moved <= 3) picture.press(...place(event), event);
    held = null;
    ask();
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", (event) => { picture.zoom(0.5, ...place(event), "both"); ask(); });
  canvas.addEventListener("wheel", (event) => {
    // Without focus the wheel scrolls the page, as a reader on the way down expects.
    if (document.activeElement !== canvas && !event.ctrlKey) return;
    event.preventDefault();
    const axis = event.shiftKey ? "x" : event.altKey ? "y" : "both";
    const amount = event.deltaY || event.deltaX;
    picture.zoom(Math.exp(clamp(amount, -240, 240) * 0.0022), ...place(event), axis);
    ask();
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey) return;
    let handled = true;
    if (event.key === "+" || event.key === "=") picture.zoom(0.7, ...(picture.focus?.() ?? middle()), "both");
    else if (event.key === "-" || event.key === "_") picture.zoom(1 / 0.7, ...(picture.focus?.() ?? middle()), "both");
    else if (event.key === "0") picture.all();
    else handled = picture.key(event);
    if (!handled) return;
    event.preventDefault();
    ask();
  });
  new ResizeObserver(ask).observe(box);
  listeners.add(ask);
  canvas.style.height = `${height}px`;
  paint();
  return self;
}

// The text beside a canvas: sentences and a table, from the columns' header.
export function alternative(box, header) {
  box.querySelector(":scope > .alternative")?.remove();
  if (!header.summary?.length && !header.alternative) return;
  const details = node("details", { className: "alternative" }, node("summary", { textContent: t("what it shows") }));
  const local = (text) => text.replace(/\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ/g, (stamp) => clock(Date.parse(stamp)));
  for (const text of header.summary ?? []) details.append(node("p", { textContent: local(text) }));
  const table = header.alternative;
  if (table && table.rows.length) {
    const head = node("tr", {}, ...table.columns.map((c) => node("th", { scope: "col", textContent: c.title, className: c.numeric ? "n" : "" })));
    const body = node("tbody", {}, ...table.rows.map((row) => node("tr", {}, ...row.map((v, n) => node("td", {
      className: table.columns[n].numeric ? "n" : "",
      textContent: v === null ? "–" : typeof v === "number" ? v.toLocaleString(document.documentElement.lang, { maximumSignificantDigits: 5 }) : v,
    })))));
    const wide = node("div", { className: "wide", tabIndex: 0 },
      node("table", {}, node("caption", { textContent: table.title }), node("thead", {}, head), body));
    wide.setAttribute("role", "group");
    wide.setAttribute("aria-label", table.title);
    details.append(wide);
  }
  box.append(details);
}
