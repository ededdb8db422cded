// A matrix of up to two million cells: nodes × time with jobs over it, ToR × ToR, ranks × steps.
import { t, number, quantity } from "./texts.js";
import { alternative, clamp, fitted, node, stage, style } from "./stage.js";
import { clock, timeTicks } from "./times.js";

const SCHEMES = {
  // Dark to bright, even steps in lightness, told apart by colour-blind readers.
  heat: [[13, 10, 46], [60, 15, 110], [122, 28, 109], [187, 55, 84], [237, 105, 37], [251, 170, 30], [252, 240, 150]],
  // Nothing stands out at zero; yellow to dark red where something is wrong.
  fault: [[46, 64, 72], [112, 120, 70], [214, 190, 60], [240, 140, 40], [220, 60, 40], [160, 10, 60]],
};

function lookup(scheme) {
  const stops = SCHEMES[scheme] ?? SCHEMES.heat, table = new Uint32Array(256);
  for (let n = 0; n < 256; n++) {
    const at = n / 255 * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2), part = at - low;
    const [r, g, b] = [0, 1, 2].map((c) => Math.round(stops[low][c] * (1 - part) + stops[low + 1][c] * part));
    table[n] = (0xff000000 | (b << 16) | (g << 8) | r) >>> 0;
  }
  return table;
}

const css = (word) => `rgb(${word & 255},${(word >> 8) & 255},${(word >> 16) & 255})`;

export function heatmap(box, columns, title) {
  let { header: h, arrays } = columns;
  let table = lookup(h.scheme), shown = "high", image = null;
  let rows = 0, cols = 0;                       // cells of the arrays, fewer than h.rows when reduced
  let view = null, cursor = null, labels = [];
  let left = 70, room = 100, body = 100;
  const times = () => arrays.times_ms;
  const value = (r, c, which = shown) => (arrays[which] ?? arrays.high)[r * cols + c];

  function paintImage() {
    const cells = arrays[shown] ?? arrays.high;
    rows = arrays.high.shape[0];
    cols = arrays.high.shape[1];
    image = document.createElement("canvas");
    image.width = Math.max(cols, 1);
    image.height = Math.max(rows, 1);
    const context = image.getContext("2d");
    const pixels = context.createImageData(image.width, image.height);
    const words = new Uint32Array(pixels.data.buffer);
    const scale = 255 / (h.high - h.low), low = h.low;
    for (let n = 0; n < cells.length; n++) {
      const at = (cells[n] - low) * scale;
      words[n] = at !== at ? 0 : table[at <= 0 ? 0 : at >= 255 ? 255 : at | 0];
    }
    context.putImageData(pixels, 0, 0);
  }
  paintImage();
  // More rows than pixels: drawing picks some and drops the others, and with them the one rank that
  // matters. Where the columns ask for it (h.pool) rows are joined by their maximum instead.
  let pooled = new Map(), pooledOf = null;     // rows joined → picture; kept, since zooming goes to and fro
  function imageFor(tall) {
    const pixels = Math.max(body * (window.devicePixelRatio || 1), 1);
    const by = h.pool ? 2 ** Math.ceil(Math.log2(Math.max(tall / pixels, 1))) : 1;
    if (by <= 1) return [image, 1];
    if (pooledOf !== image) { pooled = new Map(); pooledOf = image; }
    if (!pooled.has(by)) {
      const cells = arrays[shown] ?? arrays.high, made = document.createElement("canvas");
      made.width = Math.max(cols, 1);
      made.height = Math.max(Math.ceil(rows / by), 1);
      const context = made.getContext("2d"), pixel = context.createImageData(made.width, made.height);
      const words = new Uint32Array(pixel.data.buffer), scale = 255 / (h.high - h.low);
      for (let r = 0; r < made.height; r++) {
        for (let c = 0; c < cols; c++) {
          let most = NaN;
          for (let n = r * by; n < Math.min((r + 1) * by, rows); n++) {
            const value = cells[n * cols + c];
            if (!(most >= value) && value === value) most = value;
          }
          const at = (most - h.low) * scale;
          words[r * cols + c] = at !== at ? 0 : table[at <= 0 ? 0 : at >= 255 ? 255 : at | 0];
        }
      }
      context.putImageData(pixel, 0, 0);
      pooled.set(by, made);
    }
    return [pooled.get(by), by];
  }
  const whole = () => ({ r0: 0, r1: Math.max(rows, 1), c0: 0, c1: Math.max(cols, 1) });
  view = whole();

  const x = (c) => left + (c - view.c0) / (view.c1 - view.c0) * room;
  const y = (r) => (r - view.r0) / (view.r1 - view.r0) * body;
  const cell = (px, py) => {
    const c = Math.floor(view.c0 + (px - left) / room * (view.c1 - view.c0));
    const r = Math.floor(view.r0 + py / body * (view.r1 - view.r0));
    return px >= left && py >= 0 && px < left + room && py < body && r >= 0 && c >= 0 && r < rows && c < cols ? [r, c] : null;
  };
  const span = (first, per, total) => [first * per, Math.min((first + 1) * per, total) - 1];
  const rowName = (r) => {
    const [a, b] = span(r, h.rows_per_cell, h.rows);
    return a === b ? h.row_labels[a] ?? String(a) : `${h.row_labels[a] ?? a} – ${h.row_labels[b] ?? b}`;
  };
  const columnName = (c) => {
    if (times()) return clock(times()[c]);
    const [a, b] = span(c, h.columns_per_cell, h.columns);
    return a === b ? h.column_labels[a] ?? String(a) : `${h.column_labels[a] ?? a} – ${h.column_labels[b] ?? b}`;
  };
  const boxAt = (r, c) => {
    const row = r * h.rows_per_cell, column = c * h.columns_per_cell;
    return h.boxes.find(([, r0, r1, c0, c1]) => row >= r0 && row <= r1 && column >= c0 && column <= c1);
  };
  function tell(r, c) {
    const high = value(r, c, "high"), low = arrays.low ? value(r, c, "low") : high;
    const what = high === low || !Number.isFinite(high) ? quantity(high, h.unit) : `${quantity(low, h.unit)} – ${quantity(high, h.unit)}`;
    const inside = boxAt(r, c);
    return [rowName(r), columnName(c), what, ...(inside ? [t("job {}", inside[0])] : [])];
  }
  function follow(pattern, r, c) {
    if (!pattern) return null;
    const row = h.row_labels[r * h.rows_per_cell] ?? "", column = h.column_labels[c * h.columns_per_cell] ?? "";
    return pattern.replaceAll("{row}", encodeURIComponent(row)).replaceAll("{node}", encodeURIComponent(row.split("/")[0]))
      .replaceAll("{column}", encodeURIComponent(column));
  }
  function open(r, c) {
    const address = boxAt(r, c)?.[5] ?? follow(h.links.cell ?? h.links.row, r, c);
    if (address) location.assign(address);
  }

  function drawRows(context, muted) {
    context.fillStyle = muted;
    context.textBaseline = "middle";
    context.textAlign = "right";
    let free = -99;
    const each = body / (view.r1 - view.r0);
    const grouped = h.groups.length && each < 13;
    const list = grouped ? h.groups.map(([name, a, b]) => [name, a / h.rows_per_cell, (b + 1) / h.rows_per_cell])
      : Array.from({ length: Math.ceil(view.r1) - Math.floor(view.r0) }, (_, n) => {
        const r = Math.floor(view.r0) + n;
        return [rowName(r), r, r + 1];
      });
    for (const [name, a, b] of list) {
      const top = Math.max(y(a), 0), bottom = Math.min(y(b), body), middle = (top + bottom) / 2;
      if (bottom <= 0 || top >= body) continue;
      if (grouped && y(b) - y(a) > 26) {
        context.globalAlpha = 0.35;
        context.fillRect(left - 4, Math.round(y(a)), 4, 1);
        context.globalAlpha = 1;
      }
      const at = clamp(middle, 6, body - 6);
      if (at - free < 13) continue;
      context.fillText(fitted(context, name, left - 12), left - 7, at);
      free = at;
    }
  }
  function drawColumns(context, muted, width) {
    context.fillStyle = muted;
    context.textBaseline = "top";
    context.textAlign = "center";
    if (times()?.length) {
      const step = (h.step_ms ?? 1000) * h.columns_per_cell, first = times()[0];
      const from = first + view.c0 * step, to = first + view.c1 * step;
      for (const [at, text] of timeTicks(from, to, Math.max(room / 90, 2))) {
        const px = x((at - first) / step);
        if (px < left - 1 || px > left + room + 1) continue;
        context.globalAlpha = 0.5;
        context.fillRect(Math.round(px), body, 1, 5);
        context.globalAlpha = 1;
        if (px > left + 12 && px < width - 18) context.fillText(text, px, body + 7);
      }
      return;
    }
    let free = -1;
    context.textAlign = "left";
    for (let c = Math.floor(view.c0); c < Math.ceil(view.c1); c++) {
      const px = x(c + 0.5);
      if (px < free) continue;                 // before measuring: a thousand texts take milliseconds
      const text = columnName(c), wide = Math.min(context.measureText(text).width, 130);
      const at = clamp(px - wide / 2, left, left + room - wide);
      if (px < left || at < free || at + wide > width) continue;
      context.fillText(fitted(context, text, 130), at, body + 7);
      context.globalAlpha = 0.5;
      context.fillRect(Math.round(px), body, 1, 5);
      context.globalAlpha = 1;
      free = at + wide + 14;
    }
  }
  function drawBoxes(context) {
    labels = [];
    const line = style("--box");
    context.lineWidth = 1;
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.font = "11px system-ui, 'Noto Sans CJK JP', sans-serif";
    for (const [name, r0, r1, c0, c1, link] of h.boxes) {
      const x0 = Math.max(x(c0 / h.columns_per_cell), left - 1), x1 = Math.min(x((c1 + 1) / h.columns_per_cell), left + room + 1);
      const y0 = Math.max(y(r0 / h.rows_per_cell), -1), y1 = Math.min(y((r1 + 1) / h.rows_per_cell), body + 1);
      if (x1 - x0 < 2 || y1 - y0 < 2) continue;
      context.strokeStyle = line;
      context.strokeRect(Math.round(x0) + 0.5, Math.round(y0) + 0.5, Math.round(x1 - x0) - 1, Math.round(y1 - y0) - 1);
      if (x1 - x0 < 34 || y1 - y0 < 9) continue;
      const high = Math.min(15, y1 - y0 - 1), shownName = fitted(context, name, x1 - x0 - 8);
      if (!shownName || high < 9) continue;
      const wide = context.measureText(shownName).width + 7;
      context.fillStyle = "rgba(10,12,20,.72)";
      context.fillRect(x0 + 1, y0 + 1, wide, high);
      context.fillStyle = "#fff";
      context.fillText(shownName, x0 + 4, y0 + 1 + high / 2);
      if (link) labels.push([x0, y0, wide, high, link]);
    }
    context.font = "12px system-ui, 'Noto Sans CJK JP', sans-serif";
  }
  function drawTitles(context, muted, height) {
    if (times() || !h.column_title) return;
    context.fillStyle = muted;
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.fillText(`↓ ${h.row_title}  → ${h.column_title}`, left, height - 8);
  }
  function drawScale(context, muted, height) {
    const wide = Math.min(180, room / 3), top = height - 13, at = left + room - wide;
    const gradient = context.createLinearGradient(at, 0, at + wide, 0);
    for (let n = 0; n <= 16; n++) gradient.addColorStop(n / 16, css(table[Math.round(n / 16 * 255)]));
    context.fillStyle = gradient;
    context.fillRect(at, top, wide, 9);
    context.fillStyle = muted;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const text = `${quantity(h.low, h.unit)} – ${quantity(h.high, h.unit)}`;
    context.fillText(text, at - 8, top + 5);
    context.textAlign = "left";
    const blank = at - 8 - context.measureText(text).width - 12;
    context.textAlign = "right";
    context.fillText(t("no data"), blank, top + 5);
    const square = blank - context.measureText(t("no data")).width - 18;
    context.fillStyle = style("--blank");
    context.fillRect(square, top, 12, 9);
  }

  function draw(context, width, height) {
    const muted = style("--muted");
    const grouped = h.groups.length && (height - 40) / Math.max(view.r1 - view.r0, 1) < 13;
    const names = grouped ? h.groups.map((g) => g[0]) : h.row_labels.slice(0, 2000);
    const longest = names.reduce((a, b) => (b.length > a.length ? b : a), "");
    left = 14 + clamp(context.measureText(longest).width, 18, Math.min(170, width * 0.3));
    room = Math.max(width - left - 2, 10);
    body = Math.max(height - 40, 10);
    context.fillStyle = style("--blank");
    context.fillRect(left, 0, room, body);
    if (rows && cols) {
      const tall = view.r1 - view.r0, wide = view.c1 - view.c0, ratio = window.devicePixelRatio || 1;
      // Shrunk cells are mixed, so that a thin stripe grows pale but never falls between pixels.
      const across = wide / (room * ratio), down = tall / (body * ratio);
      context.imageSmoothingEnabled = !h.pool && Math.max(across, down) > 1 && Math.min(across, down) > 0.5;
      const [source, by] = imageFor(tall);
      context.drawImage(source, view.c0, view.r0 / by, wide, tall / by, left, 0, room, body);
    }
    context.save();
    context.beginPath();
    context.rect(left, 0, room, body);
    context.clip();
    drawBoxes(context);
    if (cursor && document.activeElement === self?.canvas) {
      const [r, c] = cursor;
      context.strokeStyle = style("--focus");
      context.lineWidth = 2;
      context.strokeRect(x(c) - 1, y(r) - 1, Math.max(x(c + 1) - x(c), 3) + 2, Math.max(y(r + 1) - y(r), 3) + 2);
      context.lineWidth = 1;
    }
    context.restore();
    drawRows(context, muted);
    drawColumns(context, muted, width);
    drawTitles(context, muted, height);
    drawScale(context, muted, height);
  }

  function limit() {
    const full = whole();
    const size = (a, b, most) => clamp(b - a, Math.min(4, most), most);
    const wide = size(view.c0, view.c1, full.c1), tall = size(view.r0, view.r1, full.r1);
    view.c0 = clamp(view.c0, 0, full.c1 - wide);
    view.r0 = clamp(view.r0, 0, full.r1 - tall);
    view.c1 = view.c0 + wide;
    view.r1 = view.r0 + tall;
  }
  const picture = {
    draw,
    zoom(factor, px, py, axis) {
      const c = view.c0 + clamp((px - left) / room, 0, 1) * (view.c1 - view.c0);
      const r = view.r0 + clamp(py / body, 0, 1) * (view.r1 - view.r0);
      if (axis !== "y") {
        const size = clamp((view.c1 - view.c0) * factor, Math.min(4, cols), Math.max(cols, 1));
        const part = (c - view.c0) / (view.c1 - view.c0);
        view.c0 = c - part * size;
        view.c1 = view.c0 + size;
      }
      if (axis !== "x") {
        const size = clamp((view.r1 - view.r0) * factor, Math.min(4, rows), Math.max(rows, 1));
        const part = (r - view.r0) / (view.r1 - view.r0);
        view.r0 = r - part * size;
        view.r1 = view.r0 + size;
      }
      limit();
    },
    pan(dx, dy) {
      const c = -dx / room * (view.c1 - view.c0), r = -dy / body * (view.r1 - view.r0);
      view.c0 += c; view.c1 += c; view.r0 += r; view.r1 += r;
      limit();
    },
    all() { view = whole(); },
    focus() { return cursor ? [x(cursor[1] + 0.5), y(cursor[0] + 0.5)] : [left + room / 2, body / 2]; },
    locate(px, py) {
      const at = cell(px, py);
      return at ? tell(...at).join("\n") : "";
    },
    press(px, py) {
      const hit = labels.find(([a, b, w, tall]) => px >= a && px <= a + w && py >= b && py <= b + tall);
      if (hit) { location.assign(hit[4]); return; }
      const at = cell(px, py);
      if (!at) return;
      if (cursor && at[0] === cursor[0] && at[1] === cursor[1] && h.links.cell) { open(...at); return; }
      cursor = at;
      self.say(tell(...at).join(" · "));
    },
    key(event) {
      const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (event.key === "Enter" && cursor) { open(...cursor); return true; }
      if (!move || !rows || !cols) return false;
      const far = event.shiftKey ? 10 : 1;
      cursor = cursor ? [clamp(cursor[0] + move[0] * far, 0, rows - 1), clamp(cursor[1] + move[1] * far, 0, cols - 1)]
        : [Math.floor((view.r0 + view.r1) / 2), Math.floor((view.c0 + view.c1) / 2)];
      const [r, c] = cursor, wide = view.c1 - view.c0, tall = view.r1 - view.r0;
      if (c < view.c0) { view.c0 = c; view.c1 = c + wide; }
      if (c + 1 > view.c1) { view.c1 = c + 1; view.c0 = c + 1 - wide; }
      if (r < view.r0) { view.r0 = r; view.r1 = r + tall; }
      if (r + 1 > view.r1) { view.r1 = r + 1; view.r0 = r + 1 - tall; }
      limit();
      self.say(tell(r, c).join(" · "));
      return true;
    },
  };
  const wanted = Number(box.dataset.height) || clamp(rows * 18, 120, rows > 60 ? 620 : 420);
  let self = null;
  const label = () => `${title}: ${t("{} rows by {} columns", number(h.rows), number(h.columns))}, ${quantity(h.low, h.unit)} – ${quantity(h.high, h.unit)}`;
  self = stage(box, wanted + 40, label(), picture);
  self.canvas.addEventListener("focus", self.ask);
  self.canvas.addEventListener("blur", self.ask);
  if (arrays.low) {
    const toggle = node("button", { type: "button", textContent: t("show minimum") });
    toggle.addEventListener("click", () => {
      shown = shown === "high" ? "low" : "high";
      toggle.textContent = shown === "high" ? t("show minimum") : t("show maximum");
      paintImage();
      self.ask();
    });
    self.extras.append(toggle);
    self.say(t("each cell holds {} rows and {} columns: minimum and maximum kept", h.rows_per_cell, h.columns_per_cell));
  }
  alternative(box, h);
  return {
    stage: self,
    view: () => view,
    room: () => room,
    update(next) {
      const before = whole(), all = view.c0 <= 0 && view.c1 >= before.c1 && view.r0 <= 0 && view.r1 >= before.r1;
      ({ header: h, arrays } = next);
      table = lookup(h.scheme);
      paintImage();
      if (all) view = whole(); else limit();
      if (cursor && (cursor[0] >= rows || cursor[1] >= cols)) cursor = null;
      const open = box.querySelector(":scope > .alternative")?.open;
      alternative(box, h);
      const details = box.querySelector(":scope > .alternative");
      if (details && open) details.open = true;
      self.ask();
    },
  };
}
