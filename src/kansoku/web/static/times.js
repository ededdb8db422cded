// Times in the reader's zone or UTC.
import { language } from "./texts.js";

export const zone = document.documentElement.dataset.zone === "utc" ? "UTC" : undefined;

// Swedish writes dates as ISO 8601 does: no reader takes the month for the day.
const format = (options, locale = "sv-SE") => new Intl.DateTimeFormat(locale, { timeZone: zone, hour12: false, ...options });
const DAY = { year: "numeric", month: "2-digit", day: "2-digit" };
const full = format({ ...DAY, hour: "2-digit", minute: "2-digit", second: "2-digit" });
const minute = format({ hour: "2-digit", minute: "2-digit" });
const second = format({ hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = format({ month: "short", day: "numeric" }, language === "ja" ? "ja-JP" : "en-GB");
const long = format({ ...DAY, hour: "2-digit", minute: "2-digit", second: "2-digit", timeZoneName: "short" });

export const clock = (ms) => full.format(ms).replace(",", "");
export const clockOnly = (ms) => second.format(ms);
export const clockZone = (ms) => long.format(ms).replace(",", "");

const STEPS = [1e3, 2e3, 5e3, 10e3, 15e3, 30e3, 60e3, 120e3, 300e3, 600e3, 900e3, 1800e3, 3600e3, 7200e3,
  10800e3, 21600e3, 43200e3, 86400e3, 172800e3, 604800e3, 1209600e3, 2592000e3];

// The zone's distance from UTC at a moment, ms.
function offset(ms) {
  if (zone === "UTC") return 0;
  return -new Date(ms).getTimezoneOffset() * 60_000;
}

// Moments for an axis from one time to another, at most so many, on round times of the zone.
export function timeTicks(from, to, most) {
  const step = STEPS.find((s) => (to - from) / s <= most) ?? STEPS[STEPS.length - 1] * Math.ceil((to - from) / STEPS[STEPS.length - 1] / most);
  const shift = offset(from), found = [];
  for (let at = Math.ceil((from + shift) / step) * step - shift; at <= to; at += step) {
    const midnight = (at + offset(at)) % 86400e3 === 0;
    found.push([at, midnight || step >= 86400e3 ? day.format(at) : (step < 60e3 ? second : minute).format(at)]);
  }
  return found;
}

export function localise(root) {
  for (const element of root.querySelectorAll("time[datetime]")) {
    const ms = Date.parse(element.getAttribute("datetime"));
    if (!Number.isFinite(ms) || element.dataset.shown) continue;
    element.dataset.shown = "1";
    element.title = clockZone(ms);
    element.textContent = clock(ms);
  }
}
