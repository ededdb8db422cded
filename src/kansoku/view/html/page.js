// Draws what the page's data elements hold: Bokeh figures, heat maps, timelines.
"use strict";
(() => {
  const KIND_COLOURS = {
    step: "#9aa3ad", data_wait: "#e69f00", forward: "#0072b2", backward: "#56b4e9",
    optimizer: "#009e73", collective: "#d55e00", collective_wait: "#d55e00", checkpoint: "#cc79a7",
    evaluation: "#6a5acd", gc: "#8a8a3c", compile: "#b8860b", compute: "#0072b2",
    communication: "#d55e00", memory: "#cc79a7", idle: "#9aa3ad",
  };
  const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a8a3c",
    "#7f7f7f", "#6a5acd", "#b8860b"];
  // Viridis at nine points (Smith and van der Walt, CC0): even steps for the eye, also in grey.
  const STOPS = [[68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142],
    [31, 158, 137], [53, 183, 121], [109, 205, 89], [253, 231, 37]];

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
  const clamp = (v, low, high) => Math.min(Math.max(v, low), high);

  function colour(share) {
    const at = clamp(share, 0, 1) * (STOPS.length - 1);
    const low = Math.min(Math.floor(at), STOPS.length - 2), part = at - low;
    return [0, 1, 2].map((c) => Math.round(STOPS[low][c] * (1 - part) + STOPS[low + 1][c] * part));
  }

  function number(v) {
    if (!Number.isFinite(v)) return "no data";
    const size = Math.abs(v);
    return size !== 0 && (size < 1e-3 || size >= 1e7) ? v.toExponential(3) : String(Number(v.toPrecision(5)));
  }

  function duration(ns) {
    const size = Math.abs(ns);
    if (size >= 1e9) return `${number(ns / 1e9)} s`;
    if (size >= 1e6) return `${number(ns / 1e6)} ms`;
    return size >= 1e3 ? `${number(ns / 1e3)} µs` : `${number(ns)} ns`;
  }

  const clock = (ms) => new Date(ms).toISOString().replace("T", " ").slice(0, 19);

  // A canvas that follows the width of its box, redraws on demand, and shows a tip.
  function stage(box, height, label, draw, locate) {
    const canvas = document.createElement("canvas"), tip = document.createElement("div");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", label);
    tip.className = "tip";
    box.append(canvas, tip);
    const context = canvas.getContext("2d");
    let asked = false;
    const paint = () => {
      asked = false;
      const width = box.clientWidth, ratio = window.devicePixelRatio || 1;
      canvas.style.height = `${height}px`;
      canvas.width = Math.max(1, Math.round(width * ratio));
      canvas.height = Math.round(height * ratio);
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, width, height);
      context.font = "12px system-ui, sans-serif";
      draw(context, width, height);
    };
    const ask = () => { if (!asked) { asked = true; requestAnimationFrame(paint); } };
    canvas.addEventListener("mousemove", (event) => {
      const at = canvas.getBoundingClientRect();
      const x = event.clientX - at.left, y = event.clientY - at.top;
      const text = locate(x, y, box.clientWidth);
      tip.style.display = text ? "block" : "none";
      if (!text) return;
      tip.textContent = text;
      tip.style.left = `${clamp(x + 14, 0, Math.max(box.clientWidth - tip.offsetWidth, 0))}px`;
      tip.style.top = `${y + 16}px`;
    });
    canvas.addEventListener("mouseleave", () => { tip.style.display = "none"; });
    new ResizeObserver(ask).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", ask);
    paint();
    return { canvas, ask };
  }

  function fitted(context, text, room) {
    if (context.measureText(text).width <= room) return text;
    let low = 0, high = text.length;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (context.measureText(`${text.slice(0, middle)}…`).width <= room) low = middle;
      else high = middle - 1;
    }
    return low ? `${text.slice(0, low)}…` : "";
  }

  function heatmap(box, d, title) {
    const cells = new Float32Array(bytes(d.cells));
    const image = document.createElement("canvas");
    image.width = Math.max(d.columns, 1);
    image.height = Math.max(d.rows, 1);
    const pixels = image.getContext("2d").createImageData(image.width, image.height);
    const words = new Uint32Array(pixels.data.buffer);
    const table = new Uint32Array(256);
    for (let n = 0; n < 256; n++) {
      const [r, g, b] = colour(n / 255);
      table[n] = 0xff000000 | (b << 16) | (g << 8) | r;
    }
    const range = d.high > d.low ? d.high - d.low : 1;
    for (let n = 0; n < cells.length; n++) {
      const v = cells[n];
      words[n] = Number.isFinite(v) ? table[Math.round(clamp((v - d.low) / range, 0, 1) * 255)] : 0;
    }
    image.getContext("2d").putImageData(pixels, 0, 0);

    const cell = clamp(Math.floor(420 / Math.max(d.rows, 1)), 1, 22);
    const body = Math.max(d.rows * cell, 60), height = body + 64;
    let left = 60;
    const columnLabel = (n) => d.columnTimes ? clock(d.columnTimes[n]) : d.columnLabels[n] ?? String(n);
    const draw = (context, width) => {
      const ink = style("--ink"), muted = style("--muted");
      left = 12 + Math.min(180, Math.max(20, ...d.rowLabels.slice(0, 2000).map((t) => context.measureText(t).width)));
      const room = width - left - 8;
      context.imageSmoothingEnabled = d.columns > room * 2;
      context.fillStyle = style("--soft");
      context.fillRect(left, 0, room, body);
      if (d.columns && d.rows) context.drawImage(image, left, 0, room, body);
      context.fillStyle = muted;
      context.textBaseline = "middle";
      context.textAlign = "right";
      const every = Math.ceil(13 / (body / Math.max(d.rows, 1)));
      for (let r = 0; r < d.rows; r += every) {
        context.fillText(fitted(context, d.rowLabels[r] ?? "", left - 10), left - 6, (r + 0.5) * body / d.rows);
      }
      context.textBaseline = "top";
      context.textAlign = "left";
      let free = -1;
      for (let c = 0; c < d.columns; c++) {
        const x = left + c * room / d.columns, text = columnLabel(c);
        if (x < free || x + context.measureText(text).width > width) continue;
        context.fillText(text, x, body + 4);
        free = x + context.measureText(text).width + 16;
      }
      context.fillText(d.columnTitle, left, body + 20);
      context.strokeStyle = ink;
      context.fillStyle = ink;
      context.lineWidth = 1.5;
      for (const [name, r0, r1, c0, c1] of d.boxes) {
        const x = left + c0 * room / d.columns, y = r0 * body / d.rows;
        context.strokeRect(x, y, (c1 - c0 + 1) * room / d.columns, (r1 - r0 + 1) * body / d.rows);
        context.fillText(fitted(context, name, room), x + 3, y + 3);
      }
      const bar = Math.min(200, room / 2), y = body + 42;
      for (let n = 0; n < bar; n++) {
        const [r, g, b] = colour(n / bar);
        context.fillStyle = `rgb(${r},${g},${b})`;
        context.fillRect(left + n, y, 1, 8);
      }
      context.fillStyle = muted;
      context.textBaseline = "middle";
      context.fillText(`${number(d.low)} – ${number(d.high)} ${d.unit}`, left + bar + 8, y + 4);
    };
    const locate = (x, y, width) => {
      const room = width - left - 8;
      const c = Math.floor((x - left) / room * d.columns), r = Math.floor(y / body * d.rows);
      if (c < 0 || r < 0 || c >= d.columns || r >= d.rows) return "";
      const v = cells[r * d.columns + c];
      const value = Number.isFinite(v) ? `${number(v)} ${d.unit}` : "no data";
      return `${d.rowLabels[r] ?? r}\n${d.columnTitle} ${columnLabel(c)}\n${value}`.replace("\n ", "\n");
    };
    stage(box, height, `${title}: ${d.rows} rows by ${d.columns} columns, ${number(d.low)} to ${number(d.high)} ${d.unit}`, draw, locate);
  }

  function timeline(box, d, title) {
    const lane = new Int32Array(bytes(d.lane)), depth = new Int32Array(bytes(d.depth));
    const start = new Float64Array(bytes(d.start)), length = new Float64Array(bytes(d.duration));
    const name = new Int32Array(bytes(d.name)), kind = new Int32Array(bytes(d.kind));
    const mark = new Int32Array(bytes(d.mark));
    const count = lane.length;
    const deepest = new Int32Array(d.lanes.length);
    let end = 0;
    for (let n = 0; n < count; n++) {
      deepest[lane[n]] = Math.max(deepest[lane[n]], depth[n]);
      end = Math.max(end, start[n] + length[n]);
    }
    const many = d.lanes.length > 24, bar = many ? 7 : 13, gap = many ? 3 : 8;
    const top = new Float64Array(d.lanes.length + 1);
    for (let n = 0; n < d.lanes.length; n++) top[n + 1] = top[n] + (deepest[n] + 1) * bar + gap;
    const body = Math.max(top[d.lanes.length], 20), height = body + 26;
    const colours = d.kinds.map((k, n) => KIND_COLOURS[k] ?? PALETTE[n % PALETTE.length]);
    const legend = document.createElement("div");
    legend.className = "legend";
    d.kinds.forEach((k, n) => {
      const item = document.createElement("span"), dot = document.createElement("i");
      dot.style.background = colours[n];
      item.append(dot, k.replaceAll("_", " "));
      legend.append(item);
    });
    box.append(legend);

    let from = 0, to = end || 1, left = 70;
    const draw = (context, width) => {
      const muted = style("--muted"), ink = style("--ink"), room = width - left - 8;
      left = 12 + Math.min(180, Math.max(20, ...d.lanes.slice(0, 2000).map((t) => context.measureText(t).width)));
      const scale = room / (to - from);
      context.textBaseline = "middle";
      context.textAlign = "right";
      context.fillStyle = muted;
      let label = -20;
      for (let n = 0; n < d.lanes.length; n++) {
        if (top[n] - label < 12) continue;
        label = top[n];
        context.fillText(fitted(context, d.lanes[n], left - 10), left - 6, top[n] + bar / 2 + 1);
      }
      context.save();
      context.beginPath();
      context.rect(left, 0, room, body);
      context.clip();
      context.textAlign = "left";
      // Spans come sorted by lane, depth, start: what falls on a pixel already filled is left out.
      let filled = -1, row = -1;
      for (let n = 0; n < count; n++) {
        const x0 = left + (start[n] - from) * scale, x1 = x0 + length[n] * scale;
        if (x1 < left || x0 > left + room) continue;
        const here = lane[n] * 64 + depth[n];
        if (here !== row) { row = here; filled = -1; }
        if (x1 <= filled) continue;
        filled = Math.max(x1, Math.ceil(x0));
        const y = top[lane[n]] + depth[n] * bar, wide = Math.max(x1 - x0, 1);
        context.fillStyle = colours[kind[n]];
        context.globalAlpha = d.kinds[kind[n]] === "step" ? 0.45 : 1;
        context.fillRect(x0, y, wide > 3 ? wide - 0.5 : wide, bar - 1);
        context.globalAlpha = 1;
        if (mark[n]) {
          context.strokeStyle = style("--bad");
          context.lineWidth = 1.5;
          context.strokeRect(x0 + 0.75, y + 0.75, Math.max(wide - 1.5, 1), bar - 2.5);
        }
        if (!many && wide > 26) {
          context.fillStyle = "#fff";
          context.font = "10px system-ui, sans-serif";
          const shown = Math.max(x0, left);
          context.fillText(fitted(context, d.names[name[n]], x1 - shown - 6), shown + 3, y + bar / 2);
        }
      }
      context.restore();
      context.font = "12px system-ui, sans-serif";
      context.fillStyle = muted;
      context.strokeStyle = muted;
      context.textBaseline = "top";
      context.textAlign = "center";
      const raw = (to - from) / Math.max(room / 110, 1), power = 10 ** Math.floor(Math.log10(raw));
      const tick = [1, 2, 5, 10].map((m) => m * power).find((m) => m >= raw);
      for (let t = Math.ceil(from / tick) * tick; t <= to; t += tick) {
        const x = left + (t - from) * scale;
        context.globalAlpha = 0.25;
        context.fillRect(x, 0, 1, body);
        context.globalAlpha = 1;
        if (x < width - 30) context.fillText(duration(t), x, body + 6);
      }
      void ink;
    };
    const locate = (x, y, width) => {
      const room = width - left - 8, t = from + (x - left) / room * (to - from);
      const near = (to - from) / room;
      let best = -1;
      for (let n = 0; n < count; n++) {
        const at = top[lane[n]] + depth[n] * bar;
        if (y < at || y >= at + bar) continue;
        if (t >= start[n] - near && t <= start[n] + length[n] + near && (best < 0 || length[n] < length[best])) best = n;
      }
      if (best < 0) return "";
      const extra = mark[best] ? `\n${d.marks[mark[best]]}` : "";
      return `${d.lanes[lane[best]]}: ${d.names[name[best]]} (${d.kinds[kind[best]].replaceAll("_", " ")})\n` +
        `at ${duration(start[best])}, for ${duration(length[best])}${extra}`;
    };
    const { canvas, ask } = stage(box, height, `${title}: ${count} spans on ${d.lanes.length} lanes over ${duration(end)}`, draw, locate);
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const at = canvas.getBoundingClientRect(), room = at.width - left - 8;
      const centre = from + (event.clientX - at.left - left) / room * (to - from);
      const factor = Math.exp(event.deltaY * 0.002);
      if ((to - from) * factor < 100 || (to - from) * factor > 4 * end) return;
      from = centre - (centre - from) * factor;
      to = centre + (to - centre) * factor;
      ask();
    }, { passive: false });
    let held = null;
    canvas.addEventListener("pointerdown", (event) => { held = event.clientX; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", () => { held = null; });
    canvas.addEventListener("pointermove", (event) => {
      if (held === null) return;
      const moved = (held - event.clientX) / (box.clientWidth - left - 8) * (to - from);
      held = event.clientX;
      from += moved;
      to += moved;
      ask();
    });
    canvas.addEventListener("dblclick", () => { from = 0; to = end || 1; ask(); });
  }

  const waiting = [];
  for (const element of document.querySelectorAll("script.data")) {
    const { type, target, title, item } = JSON.parse(element.textContent);
    const box = document.getElementById(target);
    if (type === "bokeh") {
      item.target_id = target;
      waiting.push(Bokeh.embed.embed_item(item, target));
    } else if (type === "heatmap") heatmap(box, item, title);
    else timeline(box, item, title);
  }
  Promise.all(waiting).then(() => {
    document.documentElement.dataset.ready = "true";
  }, (error) => {
    document.documentElement.dataset.ready = "error";
    document.documentElement.dataset.error = String(error);
  });
})();
