// Texts in the reader's language: keyed by their English form, {} standing for figures.
const element = document.getElementById("texts");
const table = element ? JSON.parse(element.textContent) : {};

export const language = document.documentElement.lang || "en";

export function t(text, ...values) {
  const shown = table[text] ?? text;
  let next = 0;
  return shown.replace(/\{(\d*)\}/g, (_, place) => String(values[place === "" ? next++ : Number(place)] ?? ""));
}

const plain = new Intl.NumberFormat(language, { maximumSignificantDigits: 4 });

// A number people can read: 1,234 and 0.00123, exponents only far outside.
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return t("no data");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e15)) return value.toExponential(2);
  return plain.format(value);
}

const SCALES = {
  "B/s": ["", "k", "M", "G", "T", "P"], "W": ["", "k", "M", "G"], "B": ["", "k", "M", "G", "T", "P"],
  "bit/s": ["", "k", "M", "G", "T"], "/s": ["", "k", "M", "G"],
};

// A value with its unit: ratios as percent, bytes and watts with a prefix.
export function quantity(value, unit) {
  if (value === null || !Number.isFinite(value)) return t("no data");
  if (unit === "ratio") return `${number(value * 100)} %`;
  if (unit === "ns") return duration(value);
  const prefixes = SCALES[unit];
  if (!prefixes) return unit ? `${number(value)} ${unit}` : number(value);
  let place = 0;
  while (Math.abs(value) >= 1000 && place < prefixes.length - 1) { value /= 1000; place++; }
  return `${number(value)} ${prefixes[place]}${unit}`;
}

export function duration(ns) {
  if (!Number.isFinite(ns)) return t("no data");
  const size = Math.abs(ns);
  if (size >= 60e9) return `${number(ns / 60e9)} min`;
  if (size >= 1e9) return `${number(ns / 1e9)} s`;
  if (size >= 1e6) return `${number(ns / 1e6)} ms`;
  return size >= 1e3 ? `${number(ns / 1e3)} µs` : `${number(ns)} ns`;
}
