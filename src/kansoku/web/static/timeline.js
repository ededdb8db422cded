// Spans on lanes over time: hundreds of ranks, hundreds of spans each. Spans come sorted by lane,
// depth and start, so each row is searched for the visible part and drawn a pixel at a time.
import { duration, number, t } from "./texts.js";
import { alternative, clamp, fitted, node, stage, style } from "./stage.js";

export const KIND_COLOURS = {
  step: "#8e97a1", data_wait: "#e69f00", forward: "#3f8fd2", backward: "#63b76c", optimizer: "#b07cc6",
  collective: "#e4572e", collective_wait: "#e4572e", checkpoint: "#cc79a7", evaluation: "#7d6fd0", gc: "#a9a13b",
  compile: "#c48a1b", compute: "#3f8fd2", communication: "#e4572e", memory: "#cc79a7", idle: "#8e97a1",
};
const PALETTE = ["#3f8fd2", "#e69f00", "#63b76c", "#cc79a7", "#e4572e", "#56b4e9", "#a9a13b", "#8e97a1", "#7d6fd0", "#c48a1b"];

// First place in from…to whose value is not below the wanted one.
function lower(array, from, to, wanted) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (array[middle] < wanted) from = middle + 1; else to = middle;
  }
  return from;
}

export function timeline(box, columns, title) {
  let { header: h, arrays: a } = columns;
  let lines, tops, full, end, colours, joins;
  let from = 0, to = 1, top = 0, chosen = -1, grow = 1;   // grow: height of rows, 1 is as laid out
  let left = 80, room = 100, body = 100;
  const hidden = new Set();

  function prepare() {
    const count = a.lane.length;
    lines = [];
    end = 1;
    // Rows of one lane and depth; the longest span so far bounds how far back a search must begin.
    for (let n = 0; n < count;) {
      const lane = a.lane[n], depth = a.depth[n], first = n;
      let longest = 0;
      for (; n < count && a.lane[n] === lane && a.depth[n] === depth; n++) {
        longest = Math.max(longest, a.duration_ns[n]);
        end = Math.max(end, a.start_ns[n] + a.duration_ns[n]);
      }
      lines.push({ lane, depth, first, last: n, longest });
    }
    const deepest = new Int32Array(h.lanes.length);
    for (const line of lines) deepest[line.lane] = Math.max(deepest[line.lane], line.depth);
    const many = h.lanes.length > 24, bar = many ? 7 : 14, gap = many ? 3 : 8;
    tops = new Float64Array(h.lanes.length + 1);
    for (let n = 0; n < h.lanes.length; n++) tops[n + 1] = tops[n] + (deepest[n] + 1) * bar + gap;
    for (const line of lines) { line.y = tops[line.lane] + line.depth * bar; line.bar = bar; }
    full = Math.max(tops[h.lanes.length], 24);
    colours = h.kinds.map((kind, n) => KIND_COLOURS[kind] ?? PALETTE[n % PALETTE.length]);
    joins = null;
  }
  prepare();
  to = end;
  const most = Number(box.dataset.height) || 620;
  const scale = () => room / (to - from);
  const tall = () => full * grow;
  const least = () => Math.min(1, body / full);
  const yOf = (line) => line.y * grow - top;
  const byLine = (py) => lines.find((line) => py >= yOf(line) && py < yOf(line) + line.bar * grow);

  function drawLine(context, line, dark) {
    const k = scale(), y0 = yOf(line), bar = Math.max(line.bar * grow, 1), thin = bar > 2 ? 1 : 0;
    if (y0 + bar < 0 || y0 > body) return;
    let n = lower(a.start_ns, line.first, line.last, from - line.longest);
    let filled = -1;
    const wideEnough = bar > 10;
    while (n < line.last) {
      const start = a.start_ns[n];
      if (start > to) break;
      const x0 = left + (start - from) * k, x1 = x0 + a.duration_ns[n] * k;
      if (x1 < left || hidden.has(a.kind[n])) { n++; continue; }
      if (x1 <= filled && !a.mark[n]) {
        // All within a pixel already drawn: go on behind it.
        n = Math.max(n + 1, lower(a.start_ns, n, line.last, from + (filled - left - 1) / k - line.longest));
        continue;
      }
      const wide = Math.max(x1 - x0, 1);
      context.fillStyle = colours[a.kind[n]];
      if (h.kinds[a.kind[n]] === "step") context.globalAlpha = 0.35;
      context.fillRect(x0, y0, wide > 3 ? wide - 0.6 : wide, bar - thin);
      context.globalAlpha = 1;
      if (a.mark[n]) {
        context.strokeStyle = dark.bad;
        context.lineWidth = 1.5;
        context.strokeRect(x0 + 0.75, y0 + 0.75, Math.max(wide - 1.5, 1), Math.max(bar - 2.5, 1));
      }
      if (wideEnough && wide > 30) {
        context.fillStyle = "#10151b";
        context.font = "10.5px system-ui, 'Noto Sans CJK JP', sans-serif";
        const shown = Math.max(x0, left);
        context.fillText(fitted(context, h.names[a.name[n]] ?? "", Math.min(x1, left + room) - shown - 7), shown + 4, y0 + bar / 2);
      }
      filled = Math.max(x1, Math.ceil(x0));
      n++;
    }
  }
  // Many thin lanes: one line of pixels a row of spans, written straight into memory. Tens of thousands
  // of rectangles would take the browser's painter longer than a frame. Where rows are a few pixels
  // high the lines are stretched by drawImage, so that only they, not the whole picture, are written.
  let pixels = null;
  const strip = document.createElement("canvas");
  const word = (colour, part = 1, ground = [0, 0, 0]) => {
    const [r, g, b] = [1, 3, 5].map((at, n) => Math.round(parseInt(colour.slice(at, at + 2), 16) * part + ground[n] * (1 - part)));
    return (0xff000000 | (b << 16) | (g << 8) | r) >>> 0;
  };
  // Writes one row of spans into words from a place on; marked spans are added to the list.
  function writeLine(words, base, width, line, k, inks, marked) {
    let filled = -1;
    for (let n = lower(a.start_ns, line.first, line.last, from - line.longest); n < line.last && a.start_ns[n] <= to; n++) {
      if (hidden.has(a.kind[n])) continue;
      const x0 = Math.max(Math.round((a.start_ns[n] - from) * k), 0);
      const x1 = Math.round((a.start_ns[n] + a.duration_ns[n] - from) * k);
      if (x1 < 0) continue;
      if (a.mark[n]) marked.push(n);
      if (x1 <= filled) continue;
      filled = Math.max(x1, x0 + 1);
      // A pixel is left free between neighbours that are wide enough to spare it.
      const stop = Math.min(x1 - x0 > 3 ? x1 - 1 : filled, width), ink = inks[a.kind[n]];
      if (stop - x0 > 8) words.fill(ink, base + x0, base + stop);
      else for (let x = x0; x < stop; x++) words[base + x] = ink;
    }
  }
  function drawPixels(context, tones) {
    const ratio = window.devicePixelRatio || 1, width = Math.max(Math.round(room * ratio), 1), height = Math.max(Math.round(body * ratio), 1);
    const seen = lines.filter((line) => yOf(line) + line.bar * grow > 0 && yOf(line) < body);
    const ground = [1, 3, 5].map((at) => parseInt(tones.blank.slice(at, at + 2), 16)), blank = word(tones.blank);
    const inks = colours.map((colour, n) => word(colour, h.kinds[n] === "step" ? 0.35 : 1, ground));
    const k = scale() * ratio, marked = [], tallEnough = seen.length > 0 && seen[0].bar * grow * ratio >= 3;
    // Squeezed, rows share pixels: each is written where it stands, what is nested over what it is nested in.
    const rows = tallEnough ? seen.length : height;
    if (!pixels || pixels.width !== width || pixels.height !== rows) pixels = context.createImageData(width, rows);
    const words = new Uint32Array(pixels.data.buffer);
    words.fill(blank);
    seen.forEach((line, n) => {
      const at = tallEnough ? n : Math.round(yOf(line) * ratio);
      if (at < 0 || at >= rows) return;
      writeLine(words, at * width, width, line, k, inks, marked);
      const more = tallEnough ? 1 : Math.round((yOf(line) + line.bar * grow) * ratio) - at;
      if (more > 1 && at + 1 < rows) words.copyWithin((at + 1) * width, at * width, (at + 1) * width);
    });
    if (tallEnough) {
      strip.width = width;
      strip.height = rows;
      strip.getContext("2d", { alpha: false }).putImageData(pixels, 0, 0);
      context.imageSmoothingEnabled = false;
      seen.forEach((line, n) => context.drawImage(strip, 0, n, width, 1, left, Math.round(yOf(line)), room, Math.max(Math.round(line.bar * grow) - 1, 1)));
    } else context.putImageData(pixels, Math.round(left * ratio), 0);
    context.strokeStyle = tones.bad;
    context.lineWidth = 1.5;
    for (const n of marked) {
      const line = lineOf(n), x0 = left + (a.start_ns[n] - from) * k / ratio, wide = a.duration_ns[n] * k / ratio;
      context.strokeRect(x0 + 0.75, yOf(line) + 0.75, Math.max(wide - 1.5, 1), Math.max(line.bar * grow - 2.5, 1));
    }
  }
  function together(n) {
    if (!a.join || a.join[n] < 0) return [n];
    if (!joins) {
      joins = new Map();
      for (let m = 0; m < a.join.length; m++) {
        if (a.join[m] < 0) continue;
        if (!joins.has(a.join[m])) joins.set(a.join[m], []);
        joins.get(a.join[m]).push(m);
      }
    }
    return joins.get(a.join[n]) ?? [n];
  }
  const lineOf = (n) => {
    let low = 0, high = lines.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (lines[middle].first <= n) low = middle; else high = middle - 1;
    }
    return lines[low];
  };
  function drawChosen(context, ink) {
    if (chosen < 0) return;
    const k = scale(), members = together(chosen);
    context.strokeStyle = ink;
    context.lineWidth = 1.5;
    let before = null;
    for (const n of members) {
      const line = lineOf(n), x0 = left + (a.start_ns[n] - from) * k, y0 = yOf(line), bar = Math.max(line.bar * grow, 1);
      context.strokeRect(x0 - 1, y0 - 1, Math.max(a.duration_ns[n] * k, 2) + 2, bar + 1);
      if (before) {
        context.globalAlpha = 0.5;
        context.beginPath();
        context.moveTo(before[0], before[1]);
        context.lineTo(x0, y0);
        context.stroke();
        context.globalAlpha = 1;
      }
      before = [x0, y0 + bar];
    }
  }
  function draw(context, width, height) {
    const tones = { bad: style("--bad"), blank: style("--blank"), muted: style("--muted"), ink: style("--ink") };
    const longest = h.lanes.reduce((x, y) => (y.length > x.length ? y : x), "");
    left = 14 + clamp(context.measureText(longest).width, 18, Math.min(180, width * 0.3));
    room = Math.max(width - left - 2, 10);
    body = height - 26;
    context.fillStyle = style("--blank");
    context.fillRect(left, 0, room, body);
    context.fillStyle = tones.muted;
    context.textBaseline = "middle";
    context.textAlign = "right";
    let free = -20;
    for (let n = 0; n < h.lanes.length; n++) {
      const at = tops[n] * grow - top;
      if (at < -12 || at > body || at - free < 13) continue;
      free = at;
      if (at + 7 > 5 && at + 7 < body - 4) context.fillText(fitted(context, h.lanes[n], left - 12), left - 7, at + 7);
    }
    context.save();
    context.beginPath();
    context.rect(left, 0, room, body);
    context.clip();
    context.textAlign = "left";
    if (lines.length && lines[0].bar * grow <= 10) drawPixels(context, tones);
    else for (const line of lines) drawLine(context, line, tones);
    drawChosen(context, tones.ink);
    context.restore();
    context.font = "12px system-ui, 'Noto Sans CJK JP', sans-serif";
    context.fillStyle = tones.muted;
    context.textBaseline = "top";
    context.textAlign = "center";
    const raw = (to - from) / Math.max(room / 110, 1), power = 10 ** Math.floor(Math.log10(raw));
    const tick = [1, 2, 5, 10].map((m) => m * power).find((m) => m >= raw);
    for (let at = Math.ceil(from / tick) * tick; at <= to; at += tick) {
      const px = left + (at - from) * scale();
      context.globalAlpha = 0.18;
      context.fillRect(Math.round(px), 0, 1, body);
      context.globalAlpha = 1;
      if (px < width - 26 && px > left + 8) context.fillText(duration(at), px, body + 7);
    }
    if (tall() > body + 1) {
      context.globalAlpha = 0.45;
      context.fillRect(left + room - 4, top / tall() * body, 4, Math.max(body * body / tall(), 16));
      context.globalAlpha = 1;
    }
  }
  const kindTitle = (k) => h.kind_titles?.[k] ?? t(h.kinds[k] ?? "").replaceAll("_", " ");
  const laneKind = (n) => kindTitle(a.kind[n]);
  function tell(n) {
    const mark = a.mark[n] ? [t(h.marks[a.mark[n]])] : [];
    const name = h.names[a.name[n]], late = a.late_ns?.[n];
    return [`${h.lanes[a.lane[n]]}: ${name && name !== h.kinds[a.kind[n]] ? `${name} (${laneKind(n)})` : laneKind(n)}`,
      t("at {}", duration(a.start_ns[n])), t("for {}", duration(a.duration_ns[n])), ...mark,
      ...(late > 0 ? [t("{} after the first arrival", duration(late))] : [])];
  }
  function find(px, py) {
    const line = byLine(py);
    if (!line || px < left) return -1;
    const at = from + (px - left) / scale(), near = 2 / scale();
    let best = -1;
    for (let n = lower(a.start_ns, line.first, line.last, at - line.longest - near); n < line.last && a.start_ns[n] <= at + near; n++) {
      if (a.start_ns[n] + a.duration_ns[n] >= at - near && (best < 0 || a.duration_ns[n] < a.duration_ns[best])) best = n;
    }
    return best;
  }
  function choose(n) {
    chosen = n;
    if (n >= 0) {
      self.say(tell(n).join(" · "));
      const line = lineOf(n);
      if (yOf(line) < 0) top = line.y * grow;
      if (yOf(line) + line.bar * grow > body) top = (line.y + line.bar) * grow - body;
      if (a.start_ns[n] < from || a.start_ns[n] > to) {
        const wide = to - from;
        from = a.start_ns[n] - wide / 4;
        to = from + wide;
      }
    }
    box.dispatchEvent(new CustomEvent("span", { detail: { index: n, columns: { header: h, arrays: a } } }));
  }
  const picture = {
    draw,
    zoom(factor, px, py, axis) {
      if (axis === "y") {
        const next = clamp(grow / factor, least(), 4), lane = (top + py) / grow;
        top = clamp(lane * next - py, 0, Math.max(full * next - body, 0));
        grow = next;
        return;
      }
      const centre = from + clamp((px - left) / room, 0, 1) * (to - from);
      const wide = clamp((to - from) * factor, 50, end * 1.2), part = (centre - from) / (to - from);
      from = centre - part * wide;
      to = from + wide;
    },
    pan(dx, dy) {
      const moved = -dx / scale(), wide = to - from;
      from = clamp(from + moved, -wide * 0.9, end - wide * 0.1);
      to = from + wide;
      top = clamp(top - dy, 0, Math.max(tall() - body, 0));
    },
    all() {
      // Once: all of the time. Again: all of the lanes as well, and back.
      const whole = from === 0 && to === end && top === 0;
      grow = whole && grow === 1 ? least() : 1;
      from = 0; to = end; top = 0;
    },
    focus() { return chosen >= 0 ? [left + (a.start_ns[chosen] - from) * scale(), 0] : [left + room / 2, 0]; },
    locate(px, py) {
      const n = find(px, py);
      return n < 0 ? "" : tell(n).join("\n");
    },
    press(px, py) { choose(find(px, py)); },
    key(event) {
      if (event.key === "[" || event.key === "]") { picture.zoom(event.key === "]" ? 0.7 : 1 / 0.7, left, body / 2, "y"); return true; }
      if (event.key === "Escape") { chosen = -1; return true; }
      if (event.key === "Enter" && chosen >= 0 && h.links?.span) {
        location.assign(h.links.span.replaceAll("{lane}", encodeURIComponent((h.lane_keys ?? h.lanes)[a.lane[chosen]]))
          .replaceAll("{index}", chosen).replaceAll("{id}", a.id ? a.id[chosen] : chosen));
        return true;
      }
      if (event.key === "PageDown" || event.key === "PageUp") { picture.pan(0, event.key === "PageDown" ? -body * 0.8 : body * 0.8); return true; }
      if (!event.key.startsWith("Arrow") || !lines.length) return false;
      if (event.shiftKey) { picture.pan(event.key === "ArrowLeft" ? 80 : event.key === "ArrowRight" ? -80 : 0, 0); return true; }
      if (chosen < 0) { choose(lower(a.start_ns, lines[0].first, lines[0].last - 1, from)); return true; }
      const line = lineOf(chosen);
      if (event.key === "ArrowRight") choose(Math.min(chosen + 1, line.last - 1));
      else if (event.key === "ArrowLeft") choose(Math.max(chosen - 1, line.first));
      else {
        const next = lines[clamp(lines.indexOf(line) + (event.key === "ArrowDown" ? 1 : -1), 0, lines.length - 1)];
        choose(Math.min(lower(a.start_ns, next.first, next.last, a.start_ns[chosen]), next.last - 1));
      }
      return true;
    },
  };
  let self = null;
  const label = () => `${title}: ${t("{} spans on {} lanes over {}", number(a.lane.length), h.lanes.length, duration(end))}`;
  self = stage(box, Math.min(full, most) + 26, label(), picture);
  const legend = node("div", { className: "legend" });
  h.kinds.forEach((kind, n) => {
    const dot = node("i");
    dot.style.background = colours[n];
    const item = node("button", { type: "button", className: "key" }, dot, kindTitle(n));
    item.setAttribute("aria-pressed", "true");
    item.addEventListener("click", () => {
      if (hidden.has(n)) hidden.delete(n); else hidden.add(n);
      item.setAttribute("aria-pressed", String(!hidden.has(n)));
      self.ask();
    });
    legend.append(item);
  });
  box.prepend(legend);
  alternative(box, h);
  // A page that names a span opens with it chosen and in sight.
  if (Number.isInteger(h.choose) && h.choose >= 0 && h.choose < a.lane.length) { choose(h.choose); self.ask(); }
  return {
    stage: self,
    view: () => ({ from, to, top }),
    fits: () => tall() <= body + 1,
    late: (after = -1) => a.mark.indexOf(1, after + 1),
    choose,
    update(next) {
      const all = from <= 0 && to >= end;
      ({ header: h, arrays: a } = next);
      prepare();
      if (all) { from = 0; to = end; }
      chosen = -1;
      alternative(box, h);
      self.ask();
    },
  };
}
