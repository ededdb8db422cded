// Live pages: the server says which tables have fresh rows, the page asks for itself again and
// exchanges what changed; canvases keep their zoom, tables their order.
import { t } from "./texts.js";
import { clockOnly } from "./times.js";

const LEAST_MS = 2000;

export function live(refresh) {
  const blocks = document.getElementById("blocks");
  const tables = blocks?.dataset.live;
  const pulse = document.getElementById("pulse");
  if (!tables) return;
  pulse.hidden = false;
  let last = 0, waiting = null, busy = false, missed = false;
  const state = (name, text) => { pulse.dataset.state = name; pulse.textContent = text; };
  state("waiting", t("not connected"));
  async function go() {
    waiting = null;
    if (busy) { soon(); return; }
    busy = true;
    last = performance.now();
    try {
      await refresh();
      state("live", t("updated {}", clockOnly(Date.now())));
      document.documentElement.dataset.updates = String(Number(document.documentElement.dataset.updates ?? 0) + 1);
    } catch (error) {
      state("waiting", `${t("could not be loaded")}: ${error.message}`);
    } finally {
      busy = false;
    }
  }
  function soon() {
    if (waiting === null) waiting = setTimeout(go, Math.max(LEAST_MS - (performance.now() - last), 0));
  }
  const source = new EventSource(`/live?tables=${encodeURIComponent(tables)}`);
  source.addEventListener("open", () => {
    state("live", t("live"));
    // What arrived while nobody told is asked for at once, not with the next row.
    if (missed) { missed = false; soon(); }
  });
  source.addEventListener("fresh", () => { if (!document.hidden) soon(); });
  source.addEventListener("error", () => {
    missed = true;
    state("waiting", t("not connected"));
    // A refusal ends the stream for good: ask for the page now and then instead.
    if (source.readyState === EventSource.CLOSED) setInterval(() => { if (!document.hidden) soon(); }, 15_000);
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) soon(); });
  window.addEventListener("pagehide", () => source.close());
}
